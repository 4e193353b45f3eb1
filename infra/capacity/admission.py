"""Admission processes over the account log: the real account fold, its saves, and what happens when one begins again from them.

Each process decides its partitions' records in order, each in DECIDE_MS. Twice a second what it decided is saved; one that begins again
restores the last save and decides what came after it once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from infra.capacity.clock import START_MS, Timeline
from infra.capacity.ledger import Ledger
from infra.capacity.runs import TokenLog
from infra.capacity.scenario import Scenario
from processors.decisions.account_partition import AccountPartition, Decided, Row, plan_save
from processors.decisions.account_state import AccountOutput, AccountState, output_id, snapshot
from processors.decisions.quota import window_at
from schemas.events.account_snapshots import AccountSnapshotEvent, WindowUse
from schemas.events.accounts import AccountEvent, PromptSubmitted, TierLimits
from schemas.events.admissions import PromptAdmitted, PromptRefused
from schemas.events.quotas import QuotaReleased, QuotaReserved
from schemas.events.tokens import RunCancelled, RunEnded, RunQueued, RunRedirected
from schemas.events.usage import UsageSettled
from schemas.ids import partition_for_key
from schemas.vocabulary import Tier

APPEND_MS: Final = 3.0
"""From a send to the broker's stamp."""
FETCH_MS: Final = 3.0
"""From the stamp to a consumer that has the record."""
DECIDE_MS: Final = 0.5
"""One record with its sends. A process has one core; a prompt and its measure take it about 1 ms when they come fast (infra/benchmarks)."""
SAVE_MS: Final = 500.0
RESTART_MS: Final = 3_000.0
"""How long a process is away that was killed."""
POOR_LEFT_TOKENS: Final = 3_000
"""What an account has left of its quota that used nearly all of it before."""


Judged = Callable[[PromptSubmitted, Sequence[AccountOutput], AccountState, int], None]


@dataclass(slots=True, kw_only=True)
class Record:
    """A record of the account log."""

    offset: int
    appended_ms: int
    event_id: str
    event: AccountEvent


@dataclass(slots=True, kw_only=True)
class _Partition:
    """One partition: its log since the last save, what a save keeps of it, and the state in memory."""

    number: int
    log: list[Record] = field(default_factory=list)
    end: int = 0
    decided: int = 0
    since_save: list[Decided] = field(default_factory=list)
    accounts: dict[str, AccountState] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    committed: int = 0
    state: AccountPartition = field(default_factory=AccountPartition)
    highest: int = 0
    """The end of what was decided in any life."""
    life: int = 0
    """Of the process that owns it: what an earlier one booked does not happen."""


class Admission:
    """Every partition of the account log, and the processes that own them: one a partition."""

    def __init__(
        self,
        scenario: Scenario,
        timeline: Timeline,
        tokens: TokenLog,
        ledger: Ledger,
        admitted: Callable[[PromptAdmitted], None],
        *,
        poor: Iterable[tuple[str, Tier]] = (),
    ) -> None:
        self._scenario = scenario
        self._timeline = timeline
        self._tokens = tokens
        self._ledger = ledger
        self._admitted = admitted
        self._free_at = [0.0] * scenario.account_partitions
        self.partitions = [_Partition(number=n) for n in range(scenario.account_partitions)]
        self.duplicate_every = 0
        """One record of so many lies twice on the log; 0: none."""
        self._appended = 0
        self.on_judged: Judged = lambda prompt, outputs, account, level: None
        for account_id, tier in poor:
            number = partition_for_key(account_id, len(self.partitions))
            past = _past(account_id, scenario.policy.tiers[tier])
            self.partitions[number].accounts[account_id] = past
            ledger.began(past)
        for partition in self.partitions:
            partition.state = AccountPartition(map(snapshot, partition.accounts.values()))
            self._append(partition, scenario.policy, f"limits {partition.number}")
            timeline.after(SAVE_MS * (1 + partition.number / 64), self._save, partition)

    def send(self, event: AccountEvent, account_id: str, event_id: str) -> None:
        """It will lie on the account's partition."""
        number = partition_for_key(account_id, len(self.partitions))
        self._timeline.after(APPEND_MS, self._append, self.partitions[number], event, event_id)

    def _append(self, partition: _Partition, event: AccountEvent, event_id: str) -> None:
        self._appended += 1
        twice = self.duplicate_every and self._appended % self.duplicate_every == 0
        for _ in range(2 if twice else 1):
            record = Record(
                offset=partition.end,
                appended_ms=self._timeline.broker_ms,
                event_id=event_id,
                event=event,
            )
            partition.end += 1
            partition.log.append(record)
            self._book(partition, record)

    def _book(self, partition: _Partition, record: Record) -> None:
        """The partition's process decides it when it has decided what came before."""
        number, now = partition.number, self._timeline.now
        ready = max(now + FETCH_MS, self._free_at[number]) + DECIDE_MS
        self._free_at[number] = ready
        self._timeline.at(ready, self._decide, partition, record, partition.life)

    def _decide(self, partition: _Partition, record: Record, life: int) -> None:
        if life != partition.life:
            return
        event = record.event
        decided = partition.state.take(
            offset=record.offset,
            appended_ms=record.appended_ms,
            event_id=record.event_id,
            event=event,
        )
        partition.since_save.append(decided)
        partition.decided = record.offset + 1
        again = record.offset < partition.highest
        partition.highest = max(partition.highest, record.offset + 1)
        for output in decided.outputs:
            self._say(record, output)
        if decided.accounts and not again:
            self._ledger.decided(decided.accounts[0])
            if isinstance(event, PromptSubmitted):
                self.on_judged(event, decided.outputs, decided.accounts[0], partition.state.level)

    def _say(self, record: Record, output: AccountOutput) -> None:
        match output:
            case RunQueued() | RunCancelled() | RunEnded() | RunRedirected():
                self._timeline.after(
                    APPEND_MS, self._to_run, output, output_id(record.event_id, output)
                )
            case PromptAdmitted():
                self._timeline.after(APPEND_MS, self._admitted, output)
            case QuotaReserved():
                self._ledger.reserved(output, output_id(record.event_id, output))
            case UsageSettled():
                self._ledger.settled(output, output_id(record.event_id, output))
            case QuotaReleased():
                self._ledger.released(output, output_id(record.event_id, output))
            case PromptRefused():
                pass

    def _to_run(
        self, output: RunQueued | RunCancelled | RunEnded | RunRedirected, event_id: str
    ) -> None:
        run = self._tokens.runs.get(output.run_id)
        if run is not None:
            self._tokens.append(run, output, event_id=event_id)

    def _save(self, partition: _Partition) -> None:
        """S2."""
        save = plan_save(partition.since_save)
        for account in save.accounts:
            partition.accounts[account.account_id] = account
        partition.rows.extend(save.rows)
        partition.state.saved(save)
        partition.since_save.clear()
        partition.committed = partition.decided
        partition.log = [each for each in partition.log if each.offset >= partition.committed]
        self._timeline.after(SAVE_MS, self._save, partition)

    def restart(self, partition: _Partition) -> int:
        """The process is killed before it saved and begins again from the rows. How many records it decides again."""
        partition.life += 1
        rows: list[AccountSnapshotEvent] = [
            snapshot(account) for account in partition.accounts.values()
        ]
        partition.state = AccountPartition([*rows, *partition.rows])
        partition.since_save.clear()
        again = partition.decided - partition.committed
        partition.decided = partition.committed
        self._free_at[partition.number] = self._timeline.now + RESTART_MS
        for record in partition.log:
            self._book(partition, record)
        return again

    @property
    def levels(self) -> list[int]:
        """The ladder's level in each partition."""
        return [partition.state.level for partition in self.partitions]


def _past(account_id: str, tier: TierLimits) -> AccountState:
    """An account that has little left in its window."""
    window = window_at(tier.window, START_MS)
    used = max(0, tier.tokens_per_window - POOR_LEFT_TOKENS)
    return AccountState(
        account_id=account_id, windows=(WindowUse(window=window.name, settled=used, reserved=0),)
    )
