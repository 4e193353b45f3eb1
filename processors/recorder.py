"""The recorder: a group member on the token log that writes what became of each run, and ends runs that outlive their deadline.

`python -m processors.recorder`. The rules are in `decisions.recorder`; this shell reads, reads back, writes and commits. Outputs are
sent without waiting; their acknowledgements move the offset that may be committed. A send that fails ends the process before that,
so the next one does it again: ids derived from the run make twice the same as once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NoReturn

from aiokafka.errors import KafkaError

from infra.log.broker_wait import broker_listens
from infra.log.group import Batch, GroupReader, Source
from infra.log.records import BadRecord, LogRecord, RawRecord, bad_record, read_record
from infra.log.span_reader import SpanFailed, SpanReader
from infra.log.tail import OffsetsGone
from infra.process import DEFECT_EXIT, announce_ready, start_logging, stop_requested
from infra.settings import group_session_ms, kafka_bootstrap, read_settings_or_exit
from processors.decisions.recorder import (
    Concluded,
    Overdue,
    Partition,
    ReadBack,
    Seen,
    misplaced,
)
from producers.log_writer import Appended, AppendFailed, LogWriter, RecordTooLarge
from producers.parking import park
from schemas.events.tokens import PartitionTick
from schemas.ids import derived_event_id
from schemas.topics import ACCOUNTS, OUTCOMES, TOKENS

GROUP: Final = "recorder"
TICK_EVERY_MS: Final = 2_000
COMMIT_EVERY_MS: Final = 500
ACK_WAIT_MS_MAX: Final = 30_000
STOP_ACK_WAIT_MS_MAX: Final = 2_000
# Outputs on their way at once; above it reading waits for acknowledgements.
PENDING_MAX: Final = 20_000

_log = logging.getLogger("recorder")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderSettings:
    """What the recorder reads of the environment."""

    kafka: str
    kafka_port: int
    session_ms: int
    log: str


def end_process(why: str, error: BaseException | None) -> NoReturn:
    """A send failed or a promise broke: end before anything more is committed."""
    _log.critical("ending: %s (%s)", why, type(error).__name__ if error else "-")
    logging.shutdown()
    os._exit(DEFECT_EXIT)


class Recorder:
    """One process's share of the token log."""

    def __init__(self, *, bootstrap: str, session_ms: int) -> None:
        self._writer = LogWriter(bootstrap=bootstrap, client_id=GROUP)
        self._spans = SpanReader(bootstrap=bootstrap, client_id=GROUP, readers_max=2)
        self._reader = GroupReader(
            bootstrap=bootstrap,
            client_id=GROUP,
            group_id=GROUP,
            topics=(TOKENS,),
            session_ms=session_ms,
            on_assigned=self._assigned,
            on_revoked=self._revoked,
        )
        # Made at the first record of an assignment, dropped whole when the partition is revoked.
        self._partitions: dict[int, Partition] = {}
        self._pending: dict[asyncio.Future[list[Appended]], float] = {}
        self._committed: dict[int, int] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`. Raises what the broker's clients raise where it cannot go on."""
        async with self._writer, self._spans, self._reader:
            async with asyncio.TaskGroup() as tasks:
                upkeep = tasks.create_task(self._upkeep())
                while not stop.is_set():
                    for batch in await self._reader.read():
                        if not await self._take(batch):
                            break
                    await self._write_overdue()
                    await self._room()
                upkeep.cancel()
            if self._pending:
                await asyncio.wait(self._pending, timeout=STOP_ACK_WAIT_MS_MAX / 1000)
            await self._commit()

    def _assigned(self, sources: Sequence[Source]) -> None:
        _log.info("assigned %d partitions", len(sources))
        announce_ready()

    def _revoked(self, sources: Sequence[Source]) -> None:
        self._partitions.clear()  # Eager: all of them. Outputs under way may still arrive; they are right, and done again.
        self._committed.clear()

    async def _take(self, batch: Batch) -> bool:
        """Fold a batch. False: the assignment changed meanwhile, and what was read with it is void."""
        number = batch.source.partition
        assignment = self._reader.assignments
        for raw in batch.records:
            partition = self._partitions.get(number)
            if partition is None:
                partition = self._partitions[number] = Partition(raw.offset)
            if raw.offset < partition.position:
                continue
            await self._take_one(number, partition, raw)
            if self._reader.assignments != assignment:
                return False
        return True

    async def _take_one(self, number: int, partition: Partition, raw: RawRecord) -> None:
        record = read_record(TOKENS, raw)
        if isinstance(record, BadRecord):
            await self._park(raw, record.reason)
            partition.passed(raw.offset, raw.timestamp)
            return
        seen = seen_of(record)
        if (reason := misplaced(number, seen)) is not None:
            await self._park(raw, reason)
            partition.passed(raw.offset, raw.timestamp)
            return
        step = partition.take(seen)
        if isinstance(step, ReadBack):
            step = partition.replace(step, await self._read_back(number, step))
        if step is not None:
            await self._conclude(partition, step)

    async def _read_back(self, number: int, asked: ReadBack) -> list[Seen]:
        try:
            return await self._span(number, asked, asked.mint_offset)
        except OffsetsGone:
            # The bounds (protocol §4) keep retention well beyond a run's life: this is a defect, and what is left decides.
            first = (await self._spans.bounds(TOKENS, [number]))[number].first
            _log.error("run %s: its stream begins before what is kept", asked.run_id)
            return await self._span(number, asked, first)

    async def _span(self, number: int, asked: ReadBack, start: int) -> list[Seen]:
        found: list[Seen] = []
        async for records in self._spans.span(TOKENS, number, start, asked.through + 1):
            for record in records:
                if isinstance(record, LogRecord):
                    seen = seen_of(record)
                    if getattr(seen.event, "run_id", None) == asked.run_id:
                        found.append(seen)
        return found

    async def _park(self, raw: RawRecord, reason: str) -> None:
        _log.warning("parked %s/%d/%d: %s", TOKENS.name, raw.partition, raw.offset, reason)
        await park(self._writer, TOKENS, bad_record(raw, reason))

    async def _conclude(self, partition: Partition, done: Concluded) -> None:
        sent = []
        try:
            sent.append(
                await self._writer.send(
                    OUTCOMES, done.outcome, event_id=done.outcome_id, cause_id=done.cause_id
                )
            )
        except RecordTooLarge as error:
            # A grant beyond what a topic can hold is a defect of the policy. The bill must not wait for it.
            _log.critical("run %s: its outcome is not written: %s", done.run_id, error)
        sent.append(
            await self._writer.send(
                ACCOUNTS, done.usage, event_id=done.usage_id, cause_id=done.cause_id
            )
        )
        self._track(sent, partial(partition.acknowledged, done.run_id))

    async def _write_overdue(self) -> None:
        for number, partition in list(self._partitions.items()):
            for late in partition.overdue():
                await self._write_terminal(number, late)

    async def _write_terminal(self, number: int, late: Overdue) -> None:
        _log.info("run %s is past its deadline", late.ended.run_id)
        self._track(
            [
                await self._writer.send(
                    TOKENS, late.ended, event_id=late.event_id, cause_id=late.cause_id
                )
            ]
        )

    def _track(
        self,
        sent: Sequence[asyncio.Future[Appended]],
        acknowledged: partial[None] | None = None,
    ) -> None:
        both = asyncio.gather(*sent)
        self._pending[both] = time.monotonic()

        def done(future: asyncio.Future[list[Appended]]) -> None:
            del self._pending[future]
            if future.cancelled() or (error := future.exception()) is not None:
                end_process("a send failed", None if future.cancelled() else error)
            if acknowledged is not None:
                acknowledged()

        both.add_done_callback(done)

    async def _room(self) -> None:
        while len(self._pending) > PENDING_MAX:
            await asyncio.wait(
                self._pending,
                timeout=ACK_WAIT_MS_MAX / 1000,
                return_when=asyncio.FIRST_COMPLETED,
            )

    async def _upkeep(self) -> None:
        """Ticks, commits, and the watch over acknowledgements that do not come."""
        last_tick: dict[int, float] = {}
        while True:
            await asyncio.sleep(COMMIT_EVERY_MS / 1000)
            now = time.monotonic()
            oldest = next(iter(self._pending.values()), now)
            if now - oldest > ACK_WAIT_MS_MAX / 1000:
                end_process("no acknowledgement in time", None)
            for number, partition in list(self._partitions.items()):
                if not partition.open_runs:
                    last_tick.pop(number, None)
                elif now - last_tick.setdefault(number, now) >= TICK_EVERY_MS / 1000:
                    last_tick[number] = now
                    await self._tick(number, partition)
            await self._commit()

    async def _tick(self, number: int, partition: Partition) -> None:
        event_id = derived_event_id(f"{TOKENS.name}/{number}/{partition.position}", "PartitionTick")
        self._track(
            [await self._writer.send(TOKENS, PartitionTick(), event_id=event_id, partition=number)]
        )

    async def _commit(self) -> None:
        ready = {
            number: partition.commit_offset() for number, partition in self._partitions.items()
        }
        moved = {n: offset for n, offset in ready.items() if self._committed.get(n) != offset}
        assignment = self._reader.assignments
        done = await self._reader.commit(
            {Source(topic=TOKENS, partition=n): offset for n, offset in moved.items()}
        )
        if done and self._reader.assignments == assignment:
            self._committed.update(moved)


def seen_of(record: LogRecord) -> Seen:
    """The record as the decisions know it; its topic's events are token events."""
    return Seen(
        offset=record.offset,
        appended_ms=record.appended_ms,
        event_id=record.envelope.event_id,
        event=record.event,  # type: ignore[arg-type]
    )


async def run(settings: RecorderSettings) -> None:
    """Run until SIGTERM."""
    stop = stop_requested()
    bootstrap = kafka_bootstrap(kafka=settings.kafka, kafka_port=settings.kafka_port)
    await broker_listens(bootstrap)
    recorder = Recorder(
        bootstrap=bootstrap,
        session_ms=group_session_ms(session_ms=settings.session_ms, kafka=settings.kafka),
    )
    await recorder.run(stop)


def main() -> None:
    """Entry point of the process."""
    settings = read_settings_or_exit(RecorderSettings)
    start_logging(GROUP, settings.log)
    try:
        asyncio.run(run(settings))
    except* (KafkaError, TimeoutError, AppendFailed, SpanFailed) as failed:
        for error in failed.exceptions:
            _log.critical("ending: %s %s", type(error).__name__, error)
        raise SystemExit(DEFECT_EXIT) from None


if __name__ == "__main__":
    main()
