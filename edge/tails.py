"""The three tails of an edge process, without a group: all partitions of the token log, the workers' reports, admission's rows.

The token tail is never seeked. Records are folded in slices, so that a backlog does not hold the event loop for long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from edge.runs import RunTable
from edge.soft_views import Accounts, BrokerClock, Workers
from infra.log.records import BadRecord, LogRecord
from infra.log.span_reader import START_WAIT_MS_MAX, SpanReader
from infra.log.tail import Tail
from producers.log_writer import AppendFailed, LogWriter
from producers.parking import park
from schemas.topics import WORKERS, Topic

SLICE_RECORDS_MAX: Final = 400

log = logging.getLogger(__name__)


async def open_tail(
    bootstrap: str, reader: SpanReader, topic: Topic, partitions: int, *, from_start: bool = False
) -> tuple[Tail, dict[int, int]]:
    """A tail of the whole topic, not yet entered, and the end offset of each partition as it is now."""
    every = list(range(partitions))
    bounds = await reader.bounds(topic, every, wait_ms_max=START_WAIT_MS_MAX)
    starts = {p: (b.first if from_start else b.end) for p, b in bounds.items()}
    tail = Tail(bootstrap=bootstrap, client_id="turnlog-edge", topic=topic, starts=starts)
    return tail, {p: b.end for p, b in bounds.items()}


async def follow_tokens(tail: Tail, runs: RunTable, clock: BrokerClock) -> None:
    """Fold the token log for ever. Raises OffsetsGone or KafkaError: then this process starts anew."""
    while True:
        records = await tail.read()
        for at in range(0, len(records), SLICE_RECORDS_MAX):
            runs.apply(records[at : at + SLICE_RECORDS_MAX])
            await asyncio.sleep(0)
        if records:
            clock.saw(runs.newest_ms)


async def follow_accounts(
    tail: Tail, ends: dict[int, int], accounts: Accounts, caught_up: asyncio.Event
) -> None:
    """Take admission's rows for ever; `caught_up` is set once those that existed at the start are in."""

    def take(record: LogRecord) -> None:
        accounts.note(record.event, record.appended_ms)

    while True:
        if all(tail.positions[p] >= end for p, end in ends.items()):
            caught_up.set()
        await _take(await tail.read(), take)


async def follow_workers(
    tail: Tail, workers: Workers, clock: BrokerClock, writer: LogWriter, *, parks: bool
) -> None:
    """Take workers' reports for ever. Edges are this topic's only readers, so one of them `parks` what is no report (I19)."""

    def take(record: LogRecord) -> None:
        clock.saw(record.appended_ms)
        workers.note(record.event, record.appended_ms)

    while True:
        records = await tail.read()
        await _take(records, take)
        for record in records:
            if isinstance(record, BadRecord) and parks:
                await _park(writer, WORKERS, record)


async def _take(records: list[LogRecord | BadRecord], take: Callable[[LogRecord], None]) -> None:
    for count, record in enumerate(records):
        if isinstance(record, LogRecord):
            take(record)
        if count % SLICE_RECORDS_MAX == SLICE_RECORDS_MAX - 1:
            await asyncio.sleep(0)


async def _park(writer: LogWriter, topic: Topic, record: BadRecord) -> None:
    log.warning("parking %s/%d/%d: %s", topic.name, record.partition, record.offset, record.reason)
    try:
        await park(writer, topic, record)
    except AppendFailed:
        log.warning("could not park %s/%d/%d", topic.name, record.partition, record.offset)
