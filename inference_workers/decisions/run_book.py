"""The runs of one token partition, as far as a worker has read it: its own fold of everything that happens there.

Requests arrive later than the first records of their runs, so every run of the partition is folded, not only those with a request.
The memory for that is bounded, and what is forgotten is read back when it is needed.

Rules:
  B1  A run that is held was folded from its mint offset: what is held is always the whole truth up to `position`.
  B2  A run that was minted at or after `complete_from` and is not held has no record before `position`.
  B3  Any other run is unknown: it is read back from its mint offset up to `position`, while what the tail brings for it waits;
      both are then folded in order.
  B4  Ended runs are kept as such only, the latest ENDED_HELD_MAX of them; of open runs without a request the latest OPEN_HELD_MAX.
      Forgetting a run raises `complete_from` beyond its mint offset, which keeps B2 true.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from schemas.events.tokens import AttemptStarted, RunEvent, TokensGenerated
from schemas.ids import BadId, run_address
from schemas.run_fold import NEW_RUN, RunState, fold

ENDED_HELD_MAX: Final = 1_000
OPEN_HELD_MAX: Final = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedRun:
    """A run with what a takeover needs. `ids` are those of all its tokens, piece by piece, or None where they are not exact.

    `barren_workers` are those whose attempts were accepted since the last accepted token.
    """

    state: RunState = NEW_RUN
    ids: tuple[tuple[int, ...], ...] | None = ()
    barren_workers: frozenset[str] = frozenset()

    @property
    def emitted_ids(self) -> tuple[int, ...] | None:
        """All ids in one."""
        return None if self.ids is None else tuple(i for piece in self.ids for i in piece)


NEW: Final = FollowedRun()


def follow(run: FollowedRun, event: RunEvent) -> tuple[FollowedRun, bool]:
    """The run fold, with ids. Also says whether the event counted."""
    state, accepted = fold(run.state, event)
    if not accepted:
        return run, False
    match event:
        case TokensGenerated():
            exact = event.ids is not None and len(event.ids) == event.count
            ids = (*run.ids, event.ids or ()) if run.ids is not None and exact else None
            return replace(run, state=state, ids=ids, barren_workers=frozenset()), True
        case AttemptStarted():
            barren = run.barren_workers | {event.worker_id}
            return replace(run, state=state, barren_workers=barren), True
        case _:
            return replace(run, state=state), True


class Absence(StrEnum):
    """Why a run is not held."""

    NO_RECORD = "no_record"
    ENDED = "ended"
    UNKNOWN = "unknown"
    BEING_READ = "being_read"


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A record was folded: the run after it, and whether the record counted."""

    event: RunEvent
    run: FollowedRun
    accepted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Offsets to read back: start <= offset < end."""

    start: int
    end: int


class RunBook:
    """The fold of one partition from `start` on. Holds no clock and does no I/O."""

    def __init__(
        self,
        *,
        partition: int,
        start: int,
        ended_held_max: int = ENDED_HELD_MAX,
        open_held_max: int = OPEN_HELD_MAX,
    ) -> None:
        self.position = start
        self.complete_from = start
        self._partition = partition
        self._ended_held_max = ended_held_max
        self._open_held_max = open_held_max
        self._held: dict[str, FollowedRun] = {}
        self._ended: dict[str, None] = {}
        self._waiting: dict[str, list[RunEvent]] = {}
        self._pinned: set[str] = set()

    def pin(self, run_id: str) -> None:
        """There is a request for this run: never forget it while it is open."""
        self._pinned.add(run_id)

    def unpin(self, run_id: str) -> None:
        """Its request is done or gone."""
        self._pinned.discard(run_id)

    def find(self, run_id: str) -> FollowedRun | Absence:
        """The run as it is at `position`, or why it is not here."""
        run = self._held.get(run_id)
        if run is not None:
            return run
        if run_id in self._ended:
            return Absence.ENDED
        if run_id in self._waiting:
            return Absence.BEING_READ
        if run_address(run_id).mint_offset >= self.complete_from:
            return Absence.NO_RECORD  # B2
        return Absence.UNKNOWN  # B3

    def passed(self, offset: int) -> None:
        """The tail has come past this offset without an event of a run."""
        self.position = max(self.position, offset + 1)

    def apply(self, offset: int, event: RunEvent) -> Followed | None:
        """Fold the record at `offset`. None where the run is ended or not ours to judge, or the record was seen before."""
        if offset < self.position:
            return None
        self.position = offset + 1
        run_id = event.run_id
        waiting = self._waiting.get(run_id)
        if waiting is not None:
            waiting.append(event)  # B3
            return None
        run = self._held.get(run_id)
        if run is None:
            if run_id in self._ended or not self._complete(run_id):
                return None
            run = NEW
        return self._fold(run_id, run, event)

    def begin_reading_back(self, run_ids: Iterable[str]) -> Span:
        """These runs are unknown: what the tail brings for them waits from here on (B3)."""
        start = self.position
        for run_id in run_ids:
            assert self.find(run_id) is Absence.UNKNOWN, "B3: only what is unknown is read back"
            self._waiting[run_id] = []
            start = min(start, run_address(run_id).mint_offset)
        return Span(start=start, end=self.position)

    def end_reading_back(self, runs: Mapping[str, FollowedRun]) -> list[Followed]:
        """What the span held of these runs. Gives what the tail brought meanwhile, folded."""
        followed: list[Followed] = []
        for run_id, run in runs.items():
            events = self._waiting.pop(run_id)
            self._keep(run_id, run)
            for event in events:
                if run_id in self._ended:
                    break
                step = self._fold(run_id, self._held.get(run_id, NEW), event)
                followed.append(step)
        return followed

    def give_up_reading_back(self, run_ids: Iterable[str]) -> None:
        """The span could not be read: the runs are unknown again."""
        for run_id in run_ids:
            self._waiting.pop(run_id, None)

    def _complete(self, run_id: str) -> bool:
        try:
            address = run_address(run_id)
        except BadId:
            return False  # Nobody has a request for what is no run.
        return address.partition == self._partition and address.mint_offset >= self.complete_from

    def _fold(self, run_id: str, run: FollowedRun, event: RunEvent) -> Followed:
        run, accepted = follow(run, event)
        self._keep(run_id, run)
        return Followed(event=event, run=run, accepted=accepted)

    def _keep(self, run_id: str, run: FollowedRun) -> None:
        if not run.state.ended:
            self._held[run_id] = run
            if len(self._held) > self._open_held_max:
                self._forget_an_open_run()
            return
        self._held.pop(run_id, None)
        self._ended[run_id] = None
        if len(self._ended) > self._ended_held_max:
            self._forget(self._ended)

    def _forget_an_open_run(self) -> None:
        oldest = next((run_id for run_id in self._held if run_id not in self._pinned), None)
        if oldest is not None:
            del self._held[oldest]
            self._raise_complete_from(oldest)

    def _forget(self, ended: dict[str, None]) -> None:
        oldest = next(iter(ended))
        del ended[oldest]
        self._raise_complete_from(oldest)

    def _raise_complete_from(self, run_id: str) -> None:
        beyond = run_address(run_id).mint_offset + 1  # B4
        self.complete_from = max(self.complete_from, beyond)
