"""What the recorder knows of one partition of the token log, and what follows from each record of it.

States of a run here: unknown, cancelled before it was queued (`early`), open (queued and not ended), ended.

Rules (tests and simulator cite them; protocol §1):
  C1  A run is folded from its mint offset, by `schemas.run_fold`. A RunQueued of a run that is not held complete from there is read back
      from there, through that record, and replaces what was held.
  C2  On the accepted terminal of a queued run: RunConcluded and UsageMeasured, with ids derived from the run's id. For a run that was
      refused or redirected: nothing. Input tokens are 0 where no attempt was accepted.
  C3  The committed offset is the least mint offset of the runs that are open, or ended with outputs not acknowledged; never beyond the
      position.
  C4  An open run is past its deadline when the append time of the partition's newest record is deadline_ms or more after that of its
      RunQueued. Then the recorder writes RunEnded(deadline), once; it counts when it comes back and is accepted.
  C5  Memory is bounded. What is forgotten is known by its mint offset: of a run minted at or before it nothing is kept before its
      RunQueued, which is read back (C1), and the log says the truth again.
  C6  A record whose run id is no address in this partition at or before the record itself is malformed: no reader could ever fold it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from schemas.events.accounts import UsageMeasured
from schemas.events.outcomes import RunConcluded
from schemas.events.tokens import PartitionTick, RunEnded, RunEvent, RunQueued, TokenEvent
from schemas.ids import BadId, derived_event_id, run_address
from schemas.run_fold import NEW_RUN, Ending, RunState, fold
from schemas.vocabulary import EndCause, EndWriter

EARLY_RUNS_MAX: Final = 10_000
ENDED_RUNS_MAX: Final = 20_000
# Deadlines of ended runs that are kept beyond twice the open ones, until they are swept.
DUE_SLACK: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A record of the partition. `appended_ms` is the broker's append time."""

    offset: int
    appended_ms: int
    event_id: str
    event: TokenEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Concluded:
    """A queued run ended: write both, then report them with `Partition.acknowledged` (C2)."""

    run_id: str
    outcome: RunConcluded
    outcome_id: str
    usage: UsageMeasured
    usage_id: str
    cause_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    """Read the partition's records from `mint_offset` through `through` and give them to `Partition.replace` (C1)."""

    run_id: str
    mint_offset: int
    through: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Overdue:
    """Write this terminal into the run's own stream (C4)."""

    ended: RunEnded
    event_id: str
    cause_id: str


@dataclass(slots=True, kw_only=True)
class _Open:
    state: RunState
    mint_offset: int
    queued_ms: int
    queued_event_id: str


def misplaced(partition: int, seen: Seen) -> str | None:
    """Why no reader could fold this record (C6), or None. The reason holds no content."""
    if isinstance(seen.event, PartitionTick):
        return None
    kind = type(seen.event).__name__
    try:
        address = run_address(seen.event.run_id)
    except BadId:
        return f"{kind}: the run id is no run id"
    if address.partition != partition:
        return f"{kind}: the run belongs to another partition"
    if address.mint_offset > seen.offset:
        return f"{kind}: the run was minted beyond this record"
    return None


class Partition:
    """The runs of one partition, folded from `start` on. Give it every record in order, but those that are malformed."""

    def __init__(self, start: int) -> None:
        self._start = start
        self.position = start
        self.newest_ms = 0
        self._early: OrderedDict[str, RunState] = OrderedDict()
        self._open: dict[str, _Open] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._unacknowledged: dict[str, int] = {}
        self._due: list[tuple[int, str]] = []
        # The highest mint offset of a run that was forgotten (C5).
        self._forgotten_mint = -1

    @property
    def open_runs(self) -> int:
        """Runs that are queued and not ended."""
        return len(self._open)

    def passed(self, offset: int, appended_ms: int) -> None:
        """A record was read, whatever it held: the partition's position and time move."""
        self.position = offset + 1
        self.newest_ms = max(self.newest_ms, appended_ms)

    def take(self, seen: Seen) -> Concluded | ReadBack | None:
        """Fold one record. After ReadBack, the record counts when `replace` was called."""
        self.passed(seen.offset, seen.appended_ms)
        event = seen.event
        match event:
            case PartitionTick():
                return None
            case RunQueued():
                return self._queued(event, seen)
            case _:
                held = self._open.get(event.run_id)
                if held is not None:
                    return self._goes_on(held, event, seen)
                self._before_queued(event)
                return None

    def _queued(self, event: RunQueued, seen: Seen) -> Concluded | ReadBack | None:
        run_id = event.run_id
        if run_id in self._open or run_id in self._ended:
            return None  # A duplicate: both are known from the whole run.
        mint = run_address(run_id).mint_offset
        early = self._early.get(run_id)
        complete = mint >= self._start and (early is not None or mint > self._forgotten_mint)
        if not complete:
            return ReadBack(run_id=run_id, mint_offset=mint, through=seen.offset)  # C1
        self._early.pop(run_id, None)
        state, accepted = fold(early or NEW_RUN, event)
        assert accepted, "C1: a run that is neither open nor ended accepts RunQueued"
        return self._hold(run_id, state, queued=seen, last=seen)

    def replace(self, asked: ReadBack, records: Iterable[Seen]) -> Concluded | None:
        """The truth about one run: its records from the mint offset through `asked.through`, in order; others are left out (C1)."""
        state, queued, last = NEW_RUN, None, None
        for seen in records:
            event = seen.event
            if (
                isinstance(event, PartitionTick)
                or event.run_id != asked.run_id
                or seen.offset > asked.through
            ):
                continue
            state, accepted = fold(state, event)
            if accepted:
                last = seen
                queued = seen if isinstance(event, RunQueued) else queued
        self._early.pop(asked.run_id, None)
        if queued is None or last is None:
            # Its stream said before that it was refused or redirected; RunQueued did not count.
            self._remember_ended(asked.run_id)
            return None
        return self._hold(asked.run_id, state, queued=queued, last=last)

    def _hold(self, run_id: str, state: RunState, *, queued: Seen, last: Seen) -> Concluded | None:
        held = _Open(
            state=state,
            mint_offset=run_address(run_id).mint_offset,
            queued_ms=queued.appended_ms,
            queued_event_id=queued.event_id,
        )
        if state.ended:
            return self._conclude(run_id, held, last)
        assert state.queued is not None, "C1: held runs are queued"
        self._open[run_id] = held
        heapq.heappush(self._due, (queued.appended_ms + state.queued.deadline_ms, run_id))
        if len(self._due) > 2 * len(self._open) + DUE_SLACK:
            self._due = [entry for entry in self._due if entry[1] in self._open]
            heapq.heapify(self._due)
        return None

    def _goes_on(self, held: _Open, event: RunEvent, seen: Seen) -> Concluded | None:
        held.state, accepted = fold(held.state, event)
        if not (accepted and held.state.ended):
            return None
        return self._conclude(event.run_id, held, seen)

    def _before_queued(self, event: RunEvent) -> None:
        """A record of a run that is not open. Only an early cancel, a refusal or a redirect says anything of it."""
        run_id = event.run_id
        if run_id in self._ended:
            return
        early = self._early.get(run_id)
        if early is None and run_address(run_id).mint_offset <= self._forgotten_mint:
            return  # C5: its beginning may be forgotten, so this is no beginning.
        state, accepted = fold(early or NEW_RUN, event)
        if not accepted:
            return
        if state.ended:
            self._early.pop(run_id, None)
            self._remember_ended(run_id)
            return
        self._early[run_id] = state
        if len(self._early) > EARLY_RUNS_MAX:
            self._forget(self._early.popitem(last=False)[0])

    def _conclude(self, run_id: str, held: _Open, terminal: Seen) -> Concluded | None:
        self._open.pop(run_id, None)
        self._remember_ended(run_id)
        if held.state.ending is not Ending.FINISHED:
            return None
        self._unacknowledged[run_id] = held.mint_offset
        return concluded(held.state, terminal)

    def _remember_ended(self, run_id: str) -> None:
        self._ended[run_id] = None
        if len(self._ended) > ENDED_RUNS_MAX:
            self._forget(self._ended.popitem(last=False)[0])

    def _forget(self, run_id: str) -> None:
        self._forgotten_mint = max(self._forgotten_mint, run_address(run_id).mint_offset)

    def acknowledged(self, run_id: str) -> None:
        """Both outputs of this run are on the log (C3)."""
        self._unacknowledged.pop(run_id, None)

    def commit_offset(self) -> int:
        """Where a successor has to begin (C3)."""
        needed = [held.mint_offset for held in self._open.values()]
        return min([self.position, *needed, *self._unacknowledged.values()])

    def overdue(self) -> list[Overdue]:
        """Terminals for runs that are past their deadline now; each run once (C4)."""
        found = []
        while self._due and self._due[0][0] <= self.newest_ms:
            _, run_id = heapq.heappop(self._due)
            held = self._open.get(run_id)
            if held is not None:
                found.append(_overdue(run_id, held))
        return found


def _overdue(run_id: str, held: _Open) -> Overdue:
    return Overdue(
        ended=RunEnded(run_id=run_id, cause=EndCause.DEADLINE, writer=EndWriter.RECORDER),
        event_id=derived_event_id(run_id, "RunEnded.deadline"),
        cause_id=held.queued_event_id,
    )


def concluded(state: RunState, terminal: Seen) -> Concluded:
    """The outputs of a queued run whose accepted terminal is `terminal` (C2)."""
    queued, finish = state.queued, state.finish_reason
    assert queued is not None, "C2: only queued runs conclude"
    assert finish is not None, "C2: a finished run has a reason"
    input_tokens = state.input_tokens or 0
    return Concluded(
        run_id=queued.run_id,
        outcome=RunConcluded(
            run_id=queued.run_id,
            account_id=queued.account_id,
            chat_id=queued.chat_id,
            user_message_id=queued.user_message_id,
            assistant_message_id=queued.assistant_message_id,
            tier=queued.tier,
            model=queued.model,
            text=state.text,
            input_tokens=input_tokens,
            output_tokens=state.n,
            finish_reason=finish,
            attempts=state.attempt,
            end_offset=terminal.offset,
        ),
        outcome_id=derived_event_id(queued.run_id, "RunConcluded"),
        usage=UsageMeasured(
            run_id=queued.run_id,
            account_id=queued.account_id,
            input_tokens=input_tokens,
            output_tokens=state.n,
            finish_reason=finish,
        ),
        usage_id=derived_event_id(queued.run_id, "UsageMeasured"),
        cause_id=terminal.event_id,
    )
