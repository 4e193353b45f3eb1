"""One partition of the token topic, followed from the lowest mint offset of the open requests on, for as long as it is ours.

The tail is never seeked. A run that was minted before the tail began, or that was forgotten since, is read back by another reader
from its mint offset up to where the tail is (rules B1 to B3 of `decisions/run_book.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from inference_workers.decisions.run_book import (
    NEW,
    Absence,
    Followed,
    FollowedRun,
    RunBook,
    follow,
)
from infra.log.records import BadRecord, LogRecord
from infra.log.span_reader import Bounds, SpanFailed, SpanReader
from infra.log.tail import OffsetsGone, Tail
from schemas.events.tokens import PartitionTick
from schemas.topics import TOKENS

logger = logging.getLogger(__name__)

READ_TRIES_MAX: Final = 6
READ_AGAIN_AFTER_S: Final = 0.5


class PartitionTail:
    """`on_followed` is called for every record that was folded; `on_moved` after every batch, and when the tail has caught up;
    `on_read_back` for runs that were unknown and now are known, or (gone) whose records retention removed."""

    def __init__(
        self,
        *,
        partition: int,
        bootstrap: str,
        client_id: str,
        spans: SpanReader,
        on_followed: Callable[[Followed], None],
        on_moved: Callable[[], None],
        on_read_back: Callable[[list[str], bool], None],
    ) -> None:
        self.partition = partition
        self.bad_records = 0
        self._bootstrap = bootstrap
        self._client_id = client_id
        self._spans = spans
        self._on_followed = on_followed
        self._on_moved = on_moved
        self._on_read_back = on_read_back
        self._book: RunBook | None = None
        self._end_at_start = 0
        self._needed: dict[str, None] = {}
        self._need = asyncio.Event()

    @property
    def caught_up(self) -> bool:
        """What was on the log when the tail began has been folded: only now may a run be judged."""
        return self._book is not None and self._book.position >= self._end_at_start

    @property
    def book(self) -> RunBook:
        """The runs. Only once the tail has begun."""
        assert self._book is not None, "the tail has begun"
        return self._book

    @property
    def position(self) -> int:
        """The offset that is folded next; 0 before the tail has begun."""
        return self._book.position if self._book is not None else 0

    def find(self, run_id: str) -> FollowedRun | Absence:
        """The run, or why it is not here; an unknown one is read back."""
        if not self.caught_up:
            return Absence.BEING_READ
        found = self.book.find(run_id)
        if found is Absence.UNKNOWN:
            self._needed[run_id] = None
            self._need.set()
        return found

    async def follow(self, lowest_mint: int | None) -> None:
        """Follow from this offset (None: from the end) until cancelled. Raises OffsetsGone, SpanFailed or KafkaError."""
        bounds = await self._bounds()
        start = bounds.end if lowest_mint is None else max(lowest_mint, bounds.first)
        self._book = RunBook(partition=self.partition, start=min(start, bounds.end))
        self._end_at_start = bounds.end
        async with (
            Tail(
                bootstrap=self._bootstrap,
                client_id=self._client_id,
                topic=TOKENS,
                starts={self.partition: self._book.position},
            ) as tail,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(self._read_back_when_needed())
            self._on_moved()
            while True:
                records = await tail.read()
                for record in records:
                    self._apply(record)
                if records:
                    self._on_moved()

    def _apply(self, record: LogRecord | BadRecord) -> None:
        if isinstance(record, BadRecord):
            self.bad_records += 1  # The recorder parks it.
            self.book.passed(record.offset)
            return
        event = record.event
        if isinstance(event, PartitionTick):
            self.book.passed(record.offset)
            return
        followed = self.book.apply(record.offset, event)  # type: ignore[arg-type]
        if followed is not None:
            self._on_followed(followed)

    async def _bounds(self) -> Bounds:
        for _ in range(READ_TRIES_MAX - 1):
            try:
                return (await self._spans.bounds(TOKENS, [self.partition]))[self.partition]
            except SpanFailed:
                await asyncio.sleep(READ_AGAIN_AFTER_S)
        return (await self._spans.bounds(TOKENS, [self.partition]))[self.partition]

    async def _read_back_when_needed(self) -> None:
        failures = 0
        while True:
            await self._need.wait()
            self._need.clear()
            book = self.book
            runs = {run: NEW for run in self._needed if book.find(run) is Absence.UNKNOWN}
            self._needed.clear()
            if not runs:
                continue
            try:
                await self._read_back(runs)
            except OffsetsGone:
                book.give_up_reading_back(runs)
                await self._read_back_singly(list(runs))
                continue
            except SpanFailed:
                book.give_up_reading_back(runs)
                failures += 1
                if failures >= READ_TRIES_MAX:
                    raise
                self._needed.update(dict.fromkeys(runs))
                self._need.set()
                await asyncio.sleep(READ_AGAIN_AFTER_S)
                continue
            failures = 0

    async def _read_back_singly(self, run_ids: list[str]) -> None:
        """The oldest of these lies before what retention kept; find out which."""
        for run_id in run_ids:
            try:
                await self._read_back({run_id: NEW})
            except OffsetsGone:
                self.book.give_up_reading_back([run_id])
                self._on_read_back([run_id], True)

    async def _read_back(self, runs: dict[str, FollowedRun]) -> None:
        span = self.book.begin_reading_back(runs)
        async for batch in self._spans.span(TOKENS, self.partition, span.start, span.end):
            for record in batch:
                if isinstance(record, BadRecord) or isinstance(record.event, PartitionTick):
                    continue
                event = record.event
                run = runs.get(event.run_id)  # type: ignore[attr-defined]
                if run is not None:
                    runs[event.run_id], _ = follow(run, event)  # type: ignore[attr-defined,arg-type]
        logger.info(
            "runs_read_back partition=%d runs=%d records=%d",
            self.partition,
            len(runs),
            span.end - span.start,
        )
        for followed in self.book.end_reading_back(runs):
            self._on_followed(followed)
        self._on_read_back(list(runs), False)
