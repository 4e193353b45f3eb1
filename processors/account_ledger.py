"""The accounts of the partitions that this process owns: loaded at assignment, decided in order, saved twice a second.

The order that makes a crash harmless (protocol §2, rules S1 to S3): outputs are sent without waiting; when those of all records up to
some offset are acknowledged, the rows of these records are sent and acknowledged, then the accounts as they were at that offset, and
only then the source records, in order. A failed or late acknowledgement ends the process before that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, assert_never, cast

from infra.log.committed import committed_offsets
from infra.log.records import BadRecord, LogRecord
from infra.log.span_reader import SpanReader
from processors.decisions.account_partition import AccountPartition, Decided, Save, plan_save
from processors.decisions.account_state import AccountOutput, output_id, snapshot
from processors.faust_process import bad_record, log_bad, or_die, park_bad
from producers.log_writer import ACK_WAIT_MS_MAX, Appended, AppendFailed, LogWriter, acknowledged
from producers.placement import LADDER_ROW_KEY, LIMITS_ROW_KEY, place
from schemas.events.account_snapshots import (
    AccountSnapshot,
    AccountSnapshotEvent,
    IdempotencyKeyBound,
    LadderKept,
    LimitsKept,
    RunKnown,
)
from schemas.events.accounts import AccountEvent, PromptSubmitted, UsageMeasured
from schemas.events.admissions import PromptAdmitted, PromptRefused
from schemas.events.quotas import QuotaReleased, QuotaReserved
from schemas.events.tokens import RunCancelled, RunEnded, RunQueued, RunRedirected
from schemas.events.usage import UsageSettled
from schemas.ids import BadId, derived_event_id, partition_for_key, run_address
from schemas.topics import ACCOUNT_SNAPSHOTS, ACCOUNTS, ADMISSIONS, QUOTAS, TOKENS, USAGE, Topic

log = logging.getLogger(__name__)

SAVE_INTERVAL_MS: Final = 500
OVERDUE_SAVES: Final = ACK_WAIT_MS_MAX // SAVE_INTERVAL_MS
IN_FLIGHT_RECORDS_MAX: Final = 4_000
# Well within the snapshot topic's min.compaction.lag.ms of a day.
REFRESH_INTERVAL_MS: Final = 4 * 3_600_000
REFRESH_ROWS_MAX: Final = 1_000
# Between so many rows of a save others have their turn: a decision must not wait for a whole save.
ROWS_AT_ONCE: Final = 20

TOPIC_OF_OUTPUT: Final[dict[type[AccountOutput], Topic]] = {
    QuotaReserved: QUOTAS,
    QuotaReleased: QUOTAS,
    RunQueued: TOKENS,
    RunCancelled: TOKENS,
    RunEnded: TOKENS,
    RunRedirected: TOKENS,
    PromptAdmitted: ADMISSIONS,
    PromptRefused: ADMISSIONS,
    UsageSettled: USAGE,
}

Sent = asyncio.Future[Appended]
StateRow = AccountSnapshot | RunKnown | IdempotencyKeyBound | LimitsKept | LadderKept


class HoleInLog(Exception):
    """Records between what was decided and what came next are missing: going on would lose them for good."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A decided record whose source is not acknowledged yet."""

    message: Any
    decided: Decided
    sent: tuple[Sent, ...]
    since_save: int

    def delivered(self, save: int) -> bool:
        """Whether all outputs are acknowledged at this save. Raises AppendFailed where one never will be.

        Saves are counted, and no clock is read: in a time in which the whole process stood still no acknowledgement could be seen.
        """
        for future in self.sent:
            if not future.done():
                if save - self.since_save > OVERDUE_SAVES:
                    raise AppendFailed(f"an output of offset {self.decided.offset} is overdue")
                return False
            if (error := future.exception()) is not None:
                raise AppendFailed(f"an output of offset {self.decided.offset}") from error
        return True


@dataclass(slots=True)
class _Owned:
    """A partition while it is ours. `next_offset` None: its first record has not come."""

    number: int
    loading: asyncio.Task[None] | None = None
    state: AccountPartition = field(default_factory=AccountPartition)
    first_offset_max: int = 0
    next_offset: int | None = None
    in_flight: deque[_InFlight] = field(default_factory=deque)
    refreshed_s: float = field(default_factory=time.monotonic)

    def expect(self, offset: int) -> None:
        """Raises HoleInLog where records were passed over."""
        bound = self.first_offset_max if self.next_offset is None else self.next_offset
        if offset > bound:
            raise HoleInLog(f"{ACCOUNTS.name}/{self.number}: {offset} came, {bound} was due")
        self.next_offset = max(offset + 1, self.next_offset or 0)

    def take_delivered(self, save: int) -> list[_InFlight]:
        """The longest prefix whose outputs are acknowledged at this save. Raises AppendFailed."""
        span = []
        while self.in_flight and self.in_flight[0].delivered(save):
            span.append(self.in_flight.popleft())
        return span


class AccountLedger:
    """Decides the records of chat.accounts. `acknowledge` lets a source record be committed."""

    def __init__(
        self,
        *,
        writer: LogWriter,
        reader: SpanReader,
        bootstrap: str,
        group: str,
        tasks: asyncio.TaskGroup,
        acknowledge: Callable[[Any], None],
    ) -> None:
        self._writer = writer
        self._reader = reader
        self._bootstrap = bootstrap
        self._group = group
        self._tasks = tasks
        self._acknowledge = acknowledge
        self._owned: dict[int, _Owned] = {}
        self._room = asyncio.Event()
        self._saves = 0

    # Assignment

    async def assigned(self, partitions: Iterable[int]) -> None:
        """Load these partitions; returns when all are loaded, or taken away again."""
        loading = [task for number in partitions if (task := self._own(number).loading)]
        if loading:
            await asyncio.wait(loading)

    def revoked(self, partitions: Iterable[int]) -> None:
        """Forget these partitions. What was sent is delivered all the same; who owns them next decides alike."""
        for number in partitions:
            owned = self._owned.pop(number, None)
            if owned is not None and owned.loading is not None:
                owned.loading.cancel()
        self._room.set()

    def _own(self, number: int) -> _Owned:
        owned = self._owned.get(number)
        if owned is None:
            owned = self._owned[number] = _Owned(number=number)
            work = or_die("a partition could not be loaded", self._load(owned))
            owned.loading = self._tasks.create_task(work)
        return owned

    async def _load(self, owned: _Owned) -> None:
        number = owned.number
        kept = (await self._reader.bounds(ACCOUNT_SNAPSHOTS, [number]))[number]
        rows: list[AccountSnapshotEvent] = []
        async for batch in self._reader.span(ACCOUNT_SNAPSHOTS, number, kept.first, kept.end):
            for record in batch:
                if isinstance(record, LogRecord):
                    rows.append(cast("AccountSnapshotEvent", record.event))
                elif record.value is not None:  # None: the row was removed, see K4.
                    log_bad(ACCOUNT_SNAPSHOTS, record)
        owned.state = AccountPartition(rows)
        await self._append_rows(number, owned.state.rows_out_of_order())
        committed = await committed_offsets(self._bootstrap, self._group, ACCOUNTS, [number])
        first = (await self._reader.bounds(ACCOUNTS, [number]))[number].first
        owned.first_offset_max = committed.get(number, first)
        log.info("loaded partition=%d accounts=%d rows=%d", number, len(owned.state), len(rows))

    # Deciding

    async def take(self, message: Any, record: LogRecord | BadRecord) -> None:
        """Decide one record and send what it brings, without waiting for its acknowledgement."""
        owned = self._own(record.partition)
        if owned.loading is not None and not owned.loading.done():
            await asyncio.wait([owned.loading])
        while sum(len(each.in_flight) for each in self._owned.values()) >= IN_FLIGHT_RECORDS_MAX:
            self._room.clear()
            await self._room.wait()
        if self._owned.get(record.partition) is not owned:
            return  # Taken away meanwhile: its next owner decides it.
        owned.expect(record.offset)
        readable = record if isinstance(record, BadRecord) else await self._checked(message, record)
        if isinstance(readable, BadRecord):
            await park_bad(self._writer, ACCOUNTS, readable)
            decided, sent = Decided(offset=record.offset), []
        else:
            decided = owned.state.take(
                offset=record.offset,
                appended_ms=record.appended_ms,
                event_id=readable.envelope.event_id,
                event=cast("AccountEvent", readable.event),
            )
            if decided.unfit:  # S6
                await park_bad(self._writer, ACCOUNTS, bad_record(message, readable, decided.unfit))
            sent = await self._send_outputs(decided, readable.envelope.trace)
        owned.in_flight.append(_InFlight(message, decided, tuple(sent), self._saves))

    async def _checked(self, message: Any, record: LogRecord) -> LogRecord | BadRecord:
        """A well-formed event that no decision could place is as bad as one that cannot be decoded."""
        match record.event:
            case PromptSubmitted(account_id=account_id, run_id=run_id):
                reason = await self._misplaced(account_id, record.partition)
                try:
                    if run_address(run_id).partition >= await self._writer.partitions_of(TOKENS):
                        reason = "the run's partition does not exist"
                except BadId:
                    reason = "the run id is none"
            case UsageMeasured(account_id=account_id):
                reason = await self._misplaced(account_id, record.partition)
            case _:
                reason = ""
        if not reason:
            return record
        return bad_record(message, record, reason)

    async def _misplaced(self, account_id: str, partition: int) -> str:
        right = partition_for_key(account_id, await self._writer.partitions_of(ACCOUNTS))
        return "" if right == partition else "the account belongs to another partition"

    async def _send_outputs(self, decided: Decided, trace: str) -> list[Sent]:
        return [
            await self._writer.send(
                TOPIC_OF_OUTPUT[type(output)],
                output,
                event_id=output_id(decided.event_id, output),
                cause_id=decided.event_id,
                trace=trace,
            )
            for output in decided.outputs
        ]

    # Saving

    async def save_forever(self) -> None:
        """Save every SAVE_INTERVAL_MS. Raises AppendFailed: then the process must end."""
        while True:
            await asyncio.sleep(SAVE_INTERVAL_MS / 1000)
            await self.save()

    async def save(self) -> None:
        """One save of all partitions: rows, then snapshots, then the source records."""
        self._saves += 1
        spans = [
            (owned, span)
            for owned in self._owned.values()
            if (span := owned.take_delivered(self._saves))
        ]
        plans = [(owned, plan_save([each.decided for each in span])) for owned, span in spans]
        await self._send_rows((owned.number, row) for owned, plan in plans for row in plan.rows)
        await self._send_rows(
            (owned.number, snapshot(account)) for owned, plan in plans for account in plan.accounts
        )
        for (owned, plan), (_, span) in zip(plans, spans, strict=True):
            await self._finish(owned, plan, span)
        self._room.set()
        for owned in list(self._owned.values()):
            await self._refresh(owned)

    async def _finish(self, owned: _Owned, plan: Save, span: Sequence[_InFlight]) -> None:
        removable = owned.state.saved(plan)
        if self._owned.get(owned.number) is not owned:
            return  # Taken away meanwhile: the next owner acknowledges.
        for each in span:
            self._acknowledge(each.message)
        await self._wait_for([await self._remove_row(owned.number, row) for row in removable])

    async def _refresh(self, owned: _Owned) -> None:
        """S3. Write every saved state again from time to time."""
        if time.monotonic() - owned.refreshed_s < REFRESH_INTERVAL_MS / 1000:
            return
        owned.refreshed_s = time.monotonic()
        await self._append_rows(owned.number, owned.state.rows_to_refresh())

    async def _append_rows(self, number: int, rows: Sequence[StateRow]) -> None:
        for at in range(0, len(rows), REFRESH_ROWS_MAX):
            await self._send_rows((number, row) for row in rows[at : at + REFRESH_ROWS_MAX])

    async def _send_rows(self, rows: Iterable[tuple[int, StateRow]]) -> None:
        """Append rows, each with its partition, and wait for them. Raises AppendFailed."""
        sent: list[Sent] = []
        for number, row in rows:
            sent.append(await self._send_row(number, row))
            if len(sent) % ROWS_AT_ONCE == 0:
                await asyncio.sleep(0)
        await self._wait_for(sent)

    async def _send_row(self, number: int, row: StateRow) -> Sent:
        kind = type(row).__name__
        match row:
            case LimitsKept() | LadderKept():
                return await self._writer.send(
                    ACCOUNT_SNAPSHOTS,
                    row,
                    event_id=derived_event_id(f"{number}", kind, row.source_offset),
                    partition=number,
                    key=LIMITS_ROW_KEY if isinstance(row, LimitsKept) else LADDER_ROW_KEY,
                )
            case AccountSnapshot():
                event_id = derived_event_id(row.account_id, kind, row.applied_offset)
            case RunKnown() | IdempotencyKeyBound():
                event_id = derived_event_id(row.run_id, kind, row.source_offset)
            case _:
                assert_never(row)
        return await self._writer.send(ACCOUNT_SNAPSHOTS, row, event_id=event_id)

    async def _remove_row(self, number: int, row: RunKnown | IdempotencyKeyBound) -> Sent:
        partitions = await self._writer.partitions_of(ACCOUNT_SNAPSHOTS)
        key = place(ACCOUNT_SNAPSHOTS, row, partitions).key
        assert key is not None, "these rows have keys"
        return await self._writer.send_raw(
            ACCOUNT_SNAPSHOTS.name, None, key=key.encode(), partition=number, headers=[]
        )

    async def _wait_for(self, sent: Sequence[Sent]) -> None:
        for future in sent:
            if not future.done():
                await acknowledged(future)
            elif (error := future.exception()) is not None:
                raise AppendFailed("a row of state") from error
