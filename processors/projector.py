"""The projector: chats, admissions and outcomes into the history store, as soon as they are on the log.

`python -m processors.projector`. The store keeps, in the transaction of each batch, the offsets that it reached; reading resumes there,
whatever the group has committed: a store that was removed is rebuilt, and one that was put back from a copy catches up. Kafka's
committed offsets follow each transaction and say how far the group is.

It is also the named reader of the topics that no other group follows: their records are decoded and what is no event is parked (I19).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn, TypeVar

from aiokafka.errors import KafkaError

from infra.history import HistoryUnavailable
from infra.history.sqlite import HISTORY_FILE
from infra.history.sqlite_writer import HistoryWriter, Unstorable
from infra.log.broker_wait import broker_listens
from infra.log.epoch import topic_epoch
from infra.log.group import Batch, GroupReader, Source
from infra.log.records import BadRecord, LogRecord, RawRecord, bad_record, read_record
from infra.process import DEFECT_EXIT, announce_ready, start_logging, stop_requested
from infra.settings import group_session_ms, kafka_bootstrap, read_settings_or_exit
from producers.log_writer import AppendFailed, LogWriter
from producers.parking import park
from schemas.topics import (
    ACCOUNT_SNAPSHOTS,
    ADMISSIONS,
    CHATS,
    OUTCOMES,
    QUOTAS,
    USAGE,
    Cleanup,
)

GROUP: Final = "projector"
PROJECTED: Final = (CHATS, ADMISSIONS, OUTCOMES)
# Workers' reports are not among them: an edge parks what is no report.
INSPECTED: Final = (QUOTAS, USAGE, ACCOUNT_SNAPSHOTS)
COMMIT_EVERY_MS: Final = 500
# A full disk may be emptied: the same batch is tried again for so long, then the process ends and comes again.
STORE_WAIT_MS_MAX: Final = 30_000
STORE_RETRY_MS: Final = 500

T = TypeVar("T")

_log = logging.getLogger(GROUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorSettings:
    """What the projector reads of the environment."""

    home: Path
    kafka: str
    kafka_port: int
    session_ms: int
    log: str


@dataclass(slots=True)
class _Work:
    """What one read gave: records to apply, the offsets reached in the store, and the positions to commit."""

    records: list[tuple[LogRecord, RawRecord, Source]]
    reached: dict[tuple[str, int], int]
    positions: dict[Source, int]


class Projector:
    """One process's share of the projection."""

    def __init__(self, *, bootstrap: str, session_ms: int, path: Path) -> None:
        self._bootstrap = bootstrap
        self._store = HistoryWriter(path)
        # Read within a rebalance, while the other connection may be in the middle of a transaction.
        self._marks = HistoryWriter(path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=GROUP)
        self._writer = LogWriter(bootstrap=bootstrap, client_id=GROUP)
        self._reader = GroupReader(
            bootstrap=bootstrap,
            client_id=GROUP,
            group_id=GROUP,
            topics=(*PROJECTED, *INSPECTED),
            session_ms=session_ms,
            on_assigned=self._assigned,
            on_revoked=self._revoked,
        )
        self._expected: dict[Source, int] = {}
        self._positions: dict[Source, int] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`. Raises HistoryUnavailable, AppendFailed, or what the broker's clients raise."""
        if await self._in_thread(self._store.read_from, await topic_epoch(self._bootstrap)):
            _log.warning("the topics are others than before: all of them are projected")
        async with self._writer, self._reader:
            async with asyncio.TaskGroup() as tasks:
                commits = tasks.create_task(self._commit_often())
                while not stop.is_set():
                    await self._take(await self._reader.read())
                commits.cancel()
            await self._commit()
        self._thread.shutdown()
        self._store.close()
        self._marks.close()

    def _assigned(self, sources: Sequence[Source]) -> None:
        try:
            marks = self._marks.projected()
        except HistoryUnavailable as error:
            end_process(error)
        for source in sources:
            if source.topic in PROJECTED:
                offset = marks.get((source.topic.name, source.partition), 0)
                self._expected[source] = offset
                self._reader.seek(source, offset)
        _log.info("assigned %d partitions", len(sources))
        announce_ready()

    def _revoked(self, sources: Sequence[Source]) -> None:
        self._expected.clear()
        self._positions.clear()

    async def _take(self, batches: Sequence[Batch]) -> None:
        assignment = self._reader.assignments
        work = _Work([], {}, {})
        for batch in batches:
            expected = self._expected.get(batch.source)
            if expected is not None and batch.records[0].offset != expected:
                await self._resume(batch.source, expected)
            else:
                await self._read(batch, work)
            if self._reader.assignments != assignment:
                return  # All of it comes again.
        if work.reached:
            await self._apply(work)
        if self._reader.assignments == assignment:
            self._positions |= work.positions
            for source, position in work.positions.items():
                if source in self._expected:
                    self._expected[source] = position

    async def _resume(self, source: Source, expected: int) -> None:
        """What came is not what the store needs next: fetched before the seek, or the needed records are not there any more."""
        first, end = await self._reader.bounds(source)
        if self._expected.get(source) != expected:
            return  # Assigned anew meanwhile.
        name = f"{source.topic.name}/{source.partition}"
        if expected > end:
            _log.warning("%s was made anew: it is projected from its beginning", name)
            await self._in_thread(self._store.forget_projected, source.topic.name, source.partition)
            expected = first
        elif expected < first:
            if expected > 0:
                _log.error("%s: records %d to %d were never projected", name, expected, first)
            expected = first
        self._expected[source] = expected
        self._reader.seek(source, expected)

    async def _read(self, batch: Batch, work: _Work) -> None:
        source = batch.source
        for raw in batch.records:
            if raw.value is None and source.topic.cleanup is Cleanup.COMPACT:
                continue  # A row was removed.
            record = read_record(source.topic, raw)
            if isinstance(record, BadRecord):
                await self._park(source, raw, record.reason)
            elif source.topic in PROJECTED:
                work.records.append((record, raw, source))
        position = batch.records[-1].offset + 1
        work.positions[source] = position
        if source.topic in PROJECTED:
            work.reached[source.topic.name, source.partition] = position

    async def _apply(self, work: _Work) -> None:
        deadline = asyncio.get_running_loop().time() + STORE_WAIT_MS_MAX / 1000
        while not await self._applied(work):
            if asyncio.get_running_loop().time() > deadline:
                raise HistoryUnavailable("the history store takes nothing any more")
            await asyncio.sleep(STORE_RETRY_MS / 1000)

    async def _applied(self, work: _Work) -> bool:
        """Whether the store has the batch now."""
        while True:
            records = [record for record, _, _ in work.records]
            try:
                done = await self._in_thread(self._store.apply, records, work.reached)
            except Unstorable as error:
                await self._set_aside(work, error)
                continue
            except HistoryUnavailable as error:
                _log.error("%s; trying again", error)
                return False
            for run_id in done.contradicted:
                _log.critical("run %s concluded twice with different content", run_id)
            return True

    async def _set_aside(self, work: _Work, error: Unstorable) -> None:
        for entry in work.records:
            if entry[0] is error.record:
                await self._park(entry[2], entry[1], str(error))
        work.records = [entry for entry in work.records if entry[0] is not error.record]

    async def _park(self, source: Source, raw: RawRecord, reason: str) -> None:
        _log.warning("parked %s/%d/%d: %s", source.topic.name, raw.partition, raw.offset, reason)
        await park(self._writer, source.topic, bad_record(raw, reason))

    async def _commit_often(self) -> None:
        while True:
            await asyncio.sleep(COMMIT_EVERY_MS / 1000)
            await self._commit()

    async def _commit(self) -> None:
        moved, self._positions = self._positions, {}
        await self._reader.commit(moved)

    async def _in_thread(self, work: Callable[..., T], *values: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *values)


def end_process(error: BaseException) -> NoReturn:
    """Where an exception would be swallowed: end before anything is committed."""
    _log.critical("ending: %s", error)
    logging.shutdown()
    os._exit(DEFECT_EXIT)


async def run(settings: ProjectorSettings) -> None:
    """Run until SIGTERM."""
    stop = stop_requested()
    bootstrap = kafka_bootstrap(kafka=settings.kafka, kafka_port=settings.kafka_port)
    await broker_listens(bootstrap)
    projector = Projector(
        bootstrap=bootstrap,
        session_ms=group_session_ms(session_ms=settings.session_ms, kafka=settings.kafka),
        path=settings.home / HISTORY_FILE,
    )
    await projector.run(stop)


def main() -> None:
    """Entry point of the process."""
    settings = read_settings_or_exit(ProjectorSettings)
    start_logging(GROUP, settings.log)
    try:
        asyncio.run(run(settings))
    except* (KafkaError, TimeoutError, AppendFailed) as failed:
        for error in failed.exceptions:
            _log.critical("ending: %s %s", type(error).__name__, error)
        raise SystemExit(DEFECT_EXIT) from None


if __name__ == "__main__":
    main()
