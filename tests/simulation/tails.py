"""A worker's tail of one token partition in the simulator: the order of effects of `inference_workers/partition_tail.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

from inference_workers.decisions.run_book import (
    NEW,
    Absence,
    Followed,
    FollowedRun,
    RunBook,
    Span,
    follow,
)
from schemas.events.tokens import PartitionTick, TokenEvent
from schemas.topics import TOKENS
from tests.simulation.world import World

BATCH_RECORDS_MAX: Final = 8
# Small, so that runs are forgotten and read back within a seed.
ENDED_HELD_MAX: Final = 4
OPEN_HELD_MAX: Final = 6


class SimulatedTail:
    """Begins at the lowest mint offset of the open requests, or at the end; never seeked."""

    def __init__(
        self,
        world: World,
        partition: int,
        *,
        lowest_mint: int | None,
        on_followed: Callable[[Followed], None],
    ) -> None:
        self.world = world
        self.partition = partition
        end = world.log.end(TOKENS, partition)
        start = end if lowest_mint is None else min(lowest_mint, end)
        self.book = RunBook(
            partition=partition,
            start=start,
            ended_held_max=ENDED_HELD_MAX,
            open_held_max=OPEN_HELD_MAX,
        )
        self._end_at_start = end
        self._on_followed = on_followed
        self._needed: dict[str, None] = {}
        self._reading: tuple[Span, dict[str, FollowedRun]] | None = None

    @property
    def caught_up(self) -> bool:
        """What was on the log when the tail began has been folded."""
        return self.book.position >= self._end_at_start

    @property
    def position(self) -> int:
        """The offset that is folded next."""
        return self.book.position

    def find(self, run_id: str) -> FollowedRun | Absence:
        """The run, or why it is not here; an unknown one is read back."""
        if not self.caught_up:
            return Absence.BEING_READ
        found = self.book.find(run_id)
        if found is Absence.UNKNOWN:
            if self.world.order.read_back_unknown_runs:
                self._needed[run_id] = None
            else:
                return NEW
        return found

    def follow(self) -> bool:
        """Fold the next records."""
        book = self.book
        records = self.world.log.partition(TOKENS, self.partition).records
        at = book.position
        if at >= len(records):
            return False
        for record in records[at : at + self.world.rng.randint(1, BATCH_RECORDS_MAX)]:
            event = cast("TokenEvent", record.event)
            if isinstance(event, PartitionTick):
                book.passed(record.offset)
                continue
            followed = book.apply(record.offset, event)
            if followed is not None:
                self._on_followed(followed)
        return True

    def read_back(self) -> bool:
        """Begin to read back what is needed; or end it, the tail having moved meanwhile."""
        if self._reading is None:
            runs = {run: NEW for run in self._needed if self.book.find(run) is Absence.UNKNOWN}
            self._needed.clear()
            if not runs:
                return False
            self._reading = (self.book.begin_reading_back(runs), runs)
            return True
        span, runs = self._reading
        self._reading = None
        records = self.world.log.partition(TOKENS, self.partition).records
        for record in records[span.start : span.end]:
            event = cast("TokenEvent", record.event)
            if isinstance(event, PartitionTick):
                continue
            run = runs.get(event.run_id)
            if run is not None:
                runs[event.run_id], _ = follow(run, event)
        self.world.sometimes["worker read back"] += 1
        for followed in self.book.end_reading_back(runs):
            self._on_followed(followed)
        return True
