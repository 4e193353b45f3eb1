"""The account log under audit: its inputs in order, what was decided of them, and the decisions made again from the same inputs.

Two independent looks: `AccountPartition` (the very fold of admission) decides everything again and every output must be what is on the
log (I12); and `judgement` adds up reservations by a few lines of its own (I6, I7).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from infra.verify.findings import Copies, Findings, LogTime, Record, digest
from processors.decisions.account_partition import AccountPartition, outranked
from processors.decisions.account_state import AccountOutput, output_id, snapshot
from schemas.events.account_snapshots import AccountSnapshot
from schemas.events.accounts import LimitsChanged, PromptSubmitted, TierLimits, UsageMeasured
from schemas.events.admissions import PromptAdmitted, PromptRefused
from schemas.events.quotas import QuotaReleased, QuotaReserved
from schemas.events.tokens import RunCancelled, RunEnded, RunQueued, RunRedirected
from schemas.events.usage import UsageSettled
from schemas.ids import partition_for_key
from schemas.topics import ACCOUNTS, ADMISSIONS, QUOTAS, USAGE, Topic

_INVARIANT_OF = {
    QuotaReserved: "I6",
    QuotaReleased: "I6",
    UsageSettled: "I5",
    RunQueued: "I1",
    RunEnded: "I1",
    RunRedirected: "I14",
    RunCancelled: "I1",
    PromptAdmitted: "I1",
    PromptRefused: "I1",
}
_ON_TOKENS = frozenset({"RunQueued", "RunEnded", "RunRedirected", "RunCancelled"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A PromptSubmitted without its text. `limits` are its tier's, by the last LimitsChanged below it."""

    run_id: str
    account_id: str
    partition: int
    offset: int
    appended_ms: int
    idempotency_key: str | None
    fingerprint: str
    limits: TierLimits | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A UsageMeasured at its place in the account log."""

    partition: int
    offset: int
    appended_ms: int
    usage: UsageMeasured


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """An output that a decision has when it is made again."""

    invariant: str
    kind: str
    run_id: str
    source_ms: int
    digest: bytes


class AccountAudit:
    """Take accounts, quotas, usage, admissions and snapshots in, each partition in order from the first offset that is kept."""

    def __init__(self, time: LogTime, *, partitions: int) -> None:
        """`partitions` of the account-keyed topics."""
        self._time = time
        self._partitions = partitions
        self.prompts: dict[str, Prompt] = {}
        self.inputs: dict[int, list[Prompt | Measured]] = {}
        self.measured: dict[str, Measured] = {}
        self.counts: Counter[str] = Counter()
        self.copies = {topic.name: Copies() for topic in (ACCOUNTS, QUOTAS, USAGE, ADMISSIONS)}
        self._limits: dict[int, LimitsChanged] = {}
        # Partitions whose log is whole are decided again.
        self._again: dict[int, AccountPartition] = {}
        self._stopped: list[tuple[int, Record, str]] = []
        self.expected: dict[str, Expected] = {}
        self._states: dict[tuple[str, int], bytes] = {}
        self._snapshots: list[tuple[AccountSnapshot, int]] = []

    def begins(self, partition: int, first: int) -> None:
        """The first offset that is kept of a partition of the account log."""
        if first == 0:
            self._again[partition] = AccountPartition()
        else:
            self.counts["account partitions not judged from the start"] += 1

    def take(self, topic: Topic, record: Record) -> None:
        """One record of one of the topics."""
        self._time.saw(record.appended_ms)
        if isinstance(record.event, AccountSnapshot):
            self._snapshots.append((record.event, record.appended_ms))
            return
        if topic.name not in self.copies:
            return
        first = self.copies[topic.name].take(record)
        if topic is ACCOUNTS:
            self._decide_again(record)
            if first:
                self._input(record)

    def _input(self, record: Record) -> None:
        event = record.event
        inputs = self.inputs.setdefault(record.partition, [])
        match event:
            case PromptSubmitted():
                known = self._limits.get(record.partition)
                prompt = Prompt(
                    run_id=event.run_id,
                    account_id=event.account_id,
                    partition=record.partition,
                    offset=record.offset,
                    appended_ms=record.appended_ms,
                    idempotency_key=event.idempotency_key,
                    fingerprint=event.fingerprint,
                    limits=known.tiers.get(event.tier) if known is not None else None,
                )
                if event.run_id not in self.prompts:
                    self.prompts[event.run_id] = prompt
                    inputs.append(prompt)
            case UsageMeasured():
                measured = Measured(
                    partition=record.partition,
                    offset=record.offset,
                    appended_ms=record.appended_ms,
                    usage=event,
                )
                if event.run_id not in self.measured:
                    self.measured[event.run_id] = measured
                    inputs.append(measured)
            case LimitsChanged():
                newest = self._limits.get(record.partition)
                if newest is None or not outranked(event, newest):
                    self._limits[record.partition] = event
            case _:
                pass

    def _decide_again(self, record: Record) -> None:
        again = self._again.get(record.partition)
        if again is None:
            return
        try:
            decided = again.take(
                offset=record.offset,
                appended_ms=record.appended_ms,
                event_id=record.event_id,
                event=record.event,  # type: ignore[arg-type]
            )
        except AssertionError as error:
            # The fold says which of its rules broke; nothing after it in this partition can be decided.
            self._stopped.append((record.partition, record, str(error)))
            del self._again[record.partition]
            return
        if decided.unfit:
            self.counts["account records set aside"] += 1
        for account in decided.accounts:
            at = (account.account_id, account.applied_offset)
            self._states[at] = digest(snapshot(account))
        for output in decided.outputs:
            self.expected[output_id(decided.event_id, output)] = _expected(output, record)

    def decided_again(self, account_id: str) -> bool:
        """Whether this account's partition could be decided again from its first record."""
        return partition_for_key(account_id, self._partitions) in self._again

    def judge(
        self, findings: Findings, on_tokens: list[Record], *, on_log: Callable[[str], bool]
    ) -> None:
        """Hold what is on the log against the decisions made again (I12, and the invariant that each missing output is for).

        `on_tokens` are admission's records on the token log; `on_log` says whether that still has all of a run.
        """
        for partition, record, why in self._stopped:
            findings.broken(
                "I12", f"accounts/{partition}/{record.offset}", f"the account fold stops: {why}"
            )
        written: dict[str, Record] = {}
        for topic in (QUOTAS, USAGE, ADMISSIONS):
            written.update(self.copies[topic.name].first)
        written.update((record.event_id, record) for record in on_tokens)
        for event_id, expected in self.expected.items():
            found = written.get(event_id)
            if found is None and expected.kind in _ON_TOKENS and not on_log(expected.run_id):
                continue  # Kept for less long than the account log.
            if found is None:
                findings.missing(
                    expected.invariant,
                    expected.run_id,
                    f"{expected.kind} was decided and is not on the log",
                    age_ms=self._time.age_ms(expected.source_ms),
                )
            elif digest(found.event) != expected.digest:
                findings.broken(
                    "I12", expected.run_id, f"{expected.kind} is not what the account log decides"
                )
        for event_id, record in written.items():
            if event_id not in self.expected and self._should_be_expected(record):
                findings.missing(
                    "I12",
                    _run_of(record),
                    f"{type(record.event).__name__} follows from no record of the account log",
                    age_ms=self._time.age_ms(record.appended_ms),
                )
        self._judge_snapshots(findings)

    def _should_be_expected(self, record: Record) -> bool:
        account_id = getattr(record.event, "account_id", None)
        if account_id is None:
            prompt = self.prompts.get(_run_of(record))
            account_id = prompt.account_id if prompt is not None else None
        return account_id is not None and self.decided_again(account_id)

    def _judge_snapshots(self, findings: Findings) -> None:
        for row, appended_ms in self._snapshots:
            if not self.decided_again(row.account_id):
                continue
            state = self._states.get((row.account_id, row.applied_offset))
            if state is None:
                findings.missing(
                    "I12",
                    row.account_id,
                    f"a snapshot at {row.applied_offset}, where the account has no record",
                    age_ms=self._time.age_ms(appended_ms),
                )
            elif state != digest(row):
                findings.broken(
                    "I12",
                    row.account_id,
                    f"the snapshot at {row.applied_offset} is not the fold up to there",
                )


def _expected(output: AccountOutput, record: Record) -> Expected:
    return Expected(
        invariant=_INVARIANT_OF[type(output)],
        kind=type(output).__name__,
        run_id=output.run_id,
        source_ms=record.appended_ms,
        digest=digest(output),
    )


def _run_of(record: Record) -> str:
    return str(getattr(record.event, "run_id", "-"))
