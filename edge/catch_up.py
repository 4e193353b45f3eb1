"""Reading back a run that this edge does not hold: from the token log where it is kept, else from history.

A run is folded afresh from its mint offset; what the tail brings meanwhile is set aside and joined at the exact offset. Several
readers of one run share one read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from edge.decisions.viewer import Transcript
from edge.runs import LiveRun, RunTable
from infra.history import History, Run
from infra.log.records import LogRecord
from infra.log.span_reader import SpanFailed, SpanReader
from infra.log.tail import OffsetsGone
from schemas.ids import RunAddress, run_address
from schemas.topics import TOKENS
from schemas.vocabulary import RunStatus

SPAN_RECORDS_MAX: Final = 400_000
"""A longer way back is not read for a run that history tells whole."""
LOADS_MAX: Final = 32
RUNS_ASKED_MAX: Final = 256
"""Runs that are read back or wait for it, about two seconds' work: who asks for another one is refused, and comes back."""
FIRST_RECORD_WAIT_S_MAX: Final = 1.0
UP_TO_DATE_WAIT_S_MAX: Final = 5.0
"""Where the broker is there this takes moments. Whoever is told less than before was told wrong, so a busy machine has its time."""
SILENT_WAIT_S_MAX: Final = 1.0
"""While the broker is away: nobody is to wait long for what the last one who asked did not get either."""
TAIL_WAIT_S_MAX: Final = 4.0


class RunUnknown(LookupError):
    """Neither the log nor history has a record of this run."""


class LogBehind(Exception):
    """The log has more than this edge has read so far: it may not say yet what another has said already."""


class CatchUpFull(Exception):
    """As many runs are asked for as can be read back soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """A concluded run whose records are gone, or too far back: history tells its end, not its course."""

    run: Run


@dataclass(slots=True)
class _Turn:
    """A run that somebody asks for: one of those who do reads it back."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    askers: int = 0


class CatchUp:
    """Finds any run: held, on the log, or in history."""

    def __init__(self, *, runs: RunTable, reader: SpanReader, history: History) -> None:
        self._runs = runs
        self._reader = reader
        self._history = history
        self._turns: dict[str, _Turn] = {}
        self._places = asyncio.Semaphore(LOADS_MAX)
        self._asking = asyncio.Lock()
        self._callers = 0
        self._asked_for = 0
        """The caller up to whom the ends were asked."""
        self._ends: dict[int, int] = {}
        self._silent = False
        """Whether the last question for the ends had no answer."""

    async def find(
        self, run_id: str, *, wait_s: float = FIRST_RECORD_WAIT_S_MAX
    ) -> LiveRun | PastRun:
        """The run; waits `wait_s` for one of which this edge has seen no record yet, since another may have read further.

        Then it is unknown only where this edge has read as far as the log went; with a `wait_s` of 0 at once.
        Raises RunUnknown, LogBehind, CatchUpFull, SpanFailed or HistoryUnavailable.
        """
        held = self._runs.get(run_id)
        if held is not None and held.transcript.last_offset >= 0:
            return held
        address = run_address(run_id)
        if self._runs.knows(address):
            try:
                return await self._first_record(self._runs.expect(run_id), wait_s)
            except (RunUnknown, LogBehind, SpanFailed):
                # History may know of it all the same: where its topic was made anew, with other offsets, it alone does.
                if (concluded := await self._concluded(run_id)) is None:
                    held = self._runs.get(run_id)
                    if held is not None and held.transcript.last_offset >= 0:
                        return held  # Its first record came while history was asked.
                    raise
                return PastRun(run=concluded)
        concluded = await self._concluded(run_id)
        if address.epoch != self._runs.epoch or address.partition not in self._runs.positions:
            if concluded is None:
                raise RunUnknown(run_id)
            return PastRun(run=concluded)
        if concluded is not None and self._too_far(address, concluded):
            return PastRun(run=concluded)
        try:
            async with self._turn(run_id):
                held = self._runs.get(run_id)
                found = held if held is not None else await self._load(run_id, address, concluded)
        except OffsetsGone:
            if concluded is None:
                raise RunUnknown(run_id) from None
            return PastRun(run=concluded)
        if found is not None:
            return found
        if concluded is None:
            raise RunUnknown(run_id)
        return PastRun(run=concluded)

    async def _concluded(self, run_id: str) -> Run | None:
        past = await self._history.run(run_id)
        return past if past is not None and _has_ended(past) else None

    async def bring_up_to_date(self) -> None:
        """Read up to where the log ends now: another edge may have shown what this one has not even seen begin (I15).

        Where the log does not say in UP_TO_DATE_WAIT_S_MAX where it ends, in SILENT_WAIT_S_MAX while it says nothing to anybody, what
        is held has to do. Raises LogBehind where this edge does not get there in TAIL_WAIT_S_MAX.
        """
        try:
            ends = await self._ends_in_time()
        except SpanFailed:
            return
        await self._reach(ends)

    async def _ends_in_time(self) -> dict[int, int]:
        """Where each partition ends. Raises SpanFailed after UP_TO_DATE_WAIT_S_MAX, or SILENT_WAIT_S_MAX."""
        wait_s = SILENT_WAIT_S_MAX if self._silent else UP_TO_DATE_WAIT_S_MAX
        try:
            async with asyncio.timeout(wait_s):
                ends = await self._ends_now()
        except (SpanFailed, TimeoutError) as error:
            self._silent = True
            raise SpanFailed(TOKENS.name) from error
        self._silent = False
        return ends

    async def _ends_now(self) -> dict[int, int]:
        """Where each partition ends, asked after this call. Many who call at once share one question."""
        self._callers += 1
        mine = self._callers
        async with self._asking:
            if self._asked_for < mine:
                asked_for = self._callers
                self._ends = await self._reader.ends(TOKENS, list(self._runs.positions))
                self._asked_for = asked_for
            return self._ends

    @asynccontextmanager
    async def _turn(self, run_id: str) -> AsyncIterator[None]:
        turn = self._turns.get(run_id)
        if turn is None:
            if len(self._turns) >= RUNS_ASKED_MAX:
                raise CatchUpFull
            turn = self._turns[run_id] = _Turn()
        turn.askers += 1
        try:
            async with turn.lock, self._places:
                yield
        finally:
            turn.askers -= 1
            if not turn.askers:
                del self._turns[run_id]

    async def _first_record(self, run: LiveRun, wait_s: float) -> LiveRun:
        try:
            async with asyncio.timeout(wait_s):
                while run.transcript.last_offset < 0:
                    await run.changed()
        except TimeoutError:
            if wait_s:
                await self._reach_end(run.address.partition)
            if run.transcript.last_offset < 0:
                raise RunUnknown(run.run_id) from None
        return run

    async def _reach_end(self, partition: int) -> None:
        """Read up to where the log of the partition ends now. Raises SpanFailed or LogBehind where that takes too long."""
        await self._reach({partition: (await self._ends_in_time())[partition]})

    async def _reach(self, ends: Mapping[int, int]) -> None:
        try:
            async with asyncio.timeout(TAIL_WAIT_S_MAX):
                await self._runs.reach(ends)
        except TimeoutError:
            raise LogBehind from None

    @staticmethod
    def _too_far(address: RunAddress, run: Run) -> bool:
        return (
            run.end_offset is not None and run.end_offset - address.mint_offset > SPAN_RECORDS_MAX
        )

    async def _load(
        self, run_id: str, address: RunAddress, concluded: Run | None
    ) -> LiveRun | None:
        """Fold from the mint offset to where the tail stands, or only to a known end."""
        transcript = Transcript()
        end = self._runs.begin_load(run_id)
        if concluded is not None and concluded.end_offset is not None:
            end = min(end, concluded.end_offset + 1)
        try:
            async for batch in self._reader.span(
                TOKENS, address.partition, address.mint_offset, end, only_key=run_id.encode()
            ):
                for record in batch:
                    if isinstance(record, LogRecord):
                        transcript.accept(record.offset, record.appended_ms, record.event)  # type: ignore[arg-type]
                await asyncio.sleep(0)
        except BaseException:
            self._runs.abandon_load(run_id)
            raise
        return self._runs.finish_load(run_id, transcript)


def _has_ended(run: Run) -> bool:
    return run.end_offset is not None or run.status is RunStatus.REFUSED
