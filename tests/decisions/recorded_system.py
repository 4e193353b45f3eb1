"""A small system's topics in memory, made by the real decisions: what an audit must find in order, until a test damages it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import msgspec

from infra.verify.findings import Findings, Record
from infra.verify.judgement import Audit
from processors.decisions.account_partition import AccountPartition, Decided, plan_save
from processors.decisions.account_state import output_id, snapshot
from processors.decisions.recorder import Concluded, Partition, Seen
from schemas.events import Event
from schemas.events.accounts import LimitsChanged, PromptSubmitted, TierLimits
from schemas.events.admissions import PromptAdmitted, PromptRefused
from schemas.events.quotas import QuotaReleased, QuotaReserved
from schemas.events.tokens import (
    AttemptStarted,
    PartitionTick,
    RunCancelled,
    RunEnded,
    TokensGenerated,
)
from schemas.events.usage import UsageSettled
from schemas.ids import RunAddress, mint_run_id
from schemas.topics import (
    ACCOUNT_SNAPSHOTS,
    ACCOUNTS,
    ADMISSIONS,
    OUTCOMES,
    QUOTAS,
    TOKENS,
    USAGE,
    Topic,
)
from schemas.vocabulary import CancelReason, EndCause, EndWriter, Tier

ACCOUNT = "acc-1"
MODEL = "m"
LIMITS = LimitsChanged(
    version="v1",
    tiers={
        tier: TierLimits(
            tokens_per_window=1_000,
            window="day",
            open_runs_max=3,
            models=(MODEL,),
            input_tokens_max=100,
            output_tokens_max=50,
            run_deadline_ms=60_000,
            queue_wait_ms_max=60_000,
        )
        for tier in Tier
    },
    changed_by="test",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A record with its topic."""

    topic: Topic
    record: Record

    def changed(self, **fields: object) -> Item:
        """The same record with other fields in its event."""
        event = msgspec.structs.replace(self.record.event, **fields)
        return replace(self, record=replace(self.record, event=event))


_TOPIC_OF: dict[type[Event], Topic] = {
    QuotaReserved: QUOTAS,
    QuotaReleased: QUOTAS,
    UsageSettled: USAGE,
    PromptAdmitted: ADMISSIONS,
    PromptRefused: ADMISSIONS,
}


@dataclass(slots=True)
class RecordedSystem:
    """One partition of each topic. Every append is 5 ms after the one before."""

    items: list[Item] = field(default_factory=list)
    now_ms: int = 1_700_000_000_000
    ends: dict[str, int] = field(default_factory=dict)
    accounts: AccountPartition = field(default_factory=AccountPartition)
    recorder: Partition = field(default_factory=lambda: Partition(0))
    minted: int = 0
    decided: list[Decided] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.append(ACCOUNTS, LIMITS)

    def append(self, topic: Topic, event: Event, event_id: str = "") -> None:
        """As a broker would; admission and recorder react at once."""
        offset = self.ends.get(topic.name, 0)
        self.ends[topic.name] = offset + 1
        self.now_ms += 5
        record = Record(
            partition=0,
            offset=offset,
            appended_ms=self.now_ms,
            event_id=event_id or f"{topic.name}/{offset}",
            event=event,
        )
        self.items.append(Item(topic=topic, record=record))
        if topic is ACCOUNTS:
            self._admission(record)
        elif topic is TOKENS:
            self._recorder(record)

    def _admission(self, record: Record) -> None:
        decided = self.accounts.take(
            offset=record.offset,
            appended_ms=record.appended_ms,
            event_id=record.event_id,
            event=record.event,  # type: ignore[arg-type]
        )
        self.decided.append(decided)
        for output in decided.outputs:
            topic = _TOPIC_OF.get(type(output), TOKENS)
            self.append(topic, output, output_id(decided.event_id, output))

    def _recorder(self, record: Record) -> None:
        step = self.recorder.take(
            Seen(
                offset=record.offset,
                appended_ms=record.appended_ms,
                event_id=record.event_id,
                event=record.event,  # type: ignore[arg-type]
            )
        )
        if step is not None:
            assert isinstance(step, Concluded), "everything is held from its mint offset"
            self.append(OUTCOMES, step.outcome, step.outcome_id)
            self.append(ACCOUNTS, step.usage, step.usage_id)

    def submit(self, *, key: str | None = None, fingerprint: str = "f", tokens: int = 10) -> str:
        """A prompt in a chat of its own."""
        self.minted += 1
        address = RunAddress(epoch=1, partition=0, mint_offset=self.ends.get(TOKENS.name, 0))
        run_id = mint_run_id(
            key=b"k" * 32,
            account_id=ACCOUNT,
            address=address,
            random=self.minted.to_bytes(10, "big"),
        )
        self.append(
            ACCOUNTS,
            PromptSubmitted(
                run_id=run_id,
                account_id=ACCOUNT,
                tier=Tier.FREE,
                chat_id=f"chat-{run_id}",
                user_message_id=f"user-{run_id}",
                assistant_message_id=f"answer-{run_id}",
                parent_id=None,
                content="text",
                model=MODEL,
                idempotency_key=key,
                fingerprint=fingerprint,
                prompt_tokens={MODEL: tokens},
            ),
        )
        return run_id

    def start(self, run_id: str, attempt: int = 1) -> None:
        self.append(
            TOKENS,
            AttemptStarted(
                run_id=run_id,
                attempt=attempt,
                nonce=f"n{attempt}",
                worker_id="w",
                input_tokens=12,
            ),
        )

    def say(self, run_id: str, index: int, text: str, attempt: int = 1, count: int = 1) -> None:
        self.append(
            TOKENS,
            TokensGenerated(
                run_id=run_id, nonce=f"n{attempt}", index=index, count=count, text=text
            ),
        )

    def stop(self, run_id: str, end: int, attempt: int = 1) -> None:
        self.append(
            TOKENS,
            RunEnded(
                run_id=run_id,
                cause=EndCause.STOP,
                writer=EndWriter.WORKER,
                nonce=f"n{attempt}",
                end=end,
            ),
        )

    def cancel(self, run_id: str) -> None:
        self.append(TOKENS, RunCancelled(run_id=run_id, reason=CancelReason.USER))

    def answer(self, run_id: str) -> None:
        self.start(run_id)
        self.say(run_id, 0, "one ")
        self.say(run_id, 1, "two")
        self.stop(run_id, 2)

    def save(self) -> None:
        """Snapshots, as admission writes them."""
        for account in plan_save(self.decided).accounts:
            self.append(ACCOUNT_SNAPSHOTS, snapshot(account))

    def runs_for(self, seconds: int) -> None:
        """Time passes in a system that is alive."""
        for _ in range(seconds):
            self.now_ms += 1_000
            self.append(TOKENS, PartitionTick())


def audited(items: Iterable[Item], *, first_token: int = 0, first_account: int = 0) -> Findings:
    """What an audit says of these records; nothing before the given offsets is kept."""
    audit = Audit(partitions=1, epoch=1)
    audit.runs.begins(0, first_token)
    audit.accounts.begins(0, first_account)
    for item in items:
        if item.topic is TOKENS:
            if item.record.offset >= first_token:
                audit.runs.take(item.record)
        elif item.topic is not ACCOUNTS or item.record.offset >= first_account:
            audit.take(item.topic, item.record)
    return audit.judge()


def dropped(items: Iterable[Item], *kinds: type[Event], run: str = "") -> list[Item]:
    """Without the events of these kinds (of one run, or of all)."""
    return [
        item
        for item in items
        if not isinstance(item.record.event, kinds)
        or (run and getattr(item.record.event, "run_id", "") != run)
    ]


def altered(items: Iterable[Item], kind: type[Event], change: Callable[[Item], Item]) -> list[Item]:
    """With every event of this kind changed."""
    return [change(item) if isinstance(item.record.event, kind) else item for item in items]
