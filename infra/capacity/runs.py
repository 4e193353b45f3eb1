"""The token log in memory: one stream of records for each run, judged by the run fold that every reader uses.

Deltas lie there in bulk: one record says what many would. Readers see a record TAIL_MS after it was appended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from infra.capacity.clock import Timeline
from infra.capacity.people import Ask
from processors.decisions.recorder import Seen
from schemas.events.tokens import RunCancelled, RunEnded, RunEvent
from schemas.run_fold import NEW_RUN, RunState, fold
from schemas.vocabulary import EndWriter

TAIL_MS: Final = 8.0
"""From an append to a reader that has the record."""


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """A run as the simulator knows it: more than any process does. Times in ms since the start; None: not yet."""

    run_id: str
    ask: Ask
    partition: int
    edge: int
    submitted_ms: float
    state: RunState = NEW_RUN
    model: str = ""
    queued_ms: float | None = None
    started_ms: float | None = None
    released_ms: float | None = None
    """It waits for no other run any more."""
    input_tokens: int = 0
    grant: int = 0
    contested: bool = False
    """It was started while the free lane waited there, too."""

    @property
    def length(self) -> int:
        """Tokens that the answer will have if nobody ends it."""
        return min(self.ask.output, self.grant)


Reader = Callable[[Run, Seen, bool], None]


class TokenLog:
    """All partitions. Watchers are told at once, which no process could be: they measure and check. Readers are told later."""

    def __init__(self, timeline: Timeline, partitions: int) -> None:
        self.ends = [0] * partitions
        self.runs: dict[str, Run] = {}
        self.before_end: Callable[[Run], None] = lambda run: None
        """Has what was made of the run by now appended: deltas lie there in bulk, an end in mid-answer must lie behind them."""
        self._timeline = timeline
        self._watchers: list[Reader] = []
        self._readers: list[Reader] = []

    def watch(self, watcher: Reader) -> None:
        self._watchers.append(watcher)

    def read(self, reader: Reader) -> None:
        self._readers.append(reader)

    def append(self, run: Run, event: RunEvent, *, event_id: str = "") -> bool:
        """Whether the record counts."""
        if isinstance(event, RunCancelled) or (
            isinstance(event, RunEnded) and event.writer is EndWriter.RECORDER
        ):
            self.before_end(run)
        offset = self.ends[run.partition]
        self.ends[run.partition] = offset + 1
        run.state, counts = fold(run.state, event)
        seen = Seen(
            offset=offset, appended_ms=self._timeline.broker_ms, event_id=event_id, event=event
        )
        for watcher in self._watchers:
            watcher(run, seen, counts)
        self._timeline.after(TAIL_MS, self._deliver, run, seen, counts)
        return counts

    def _deliver(self, run: Run, seen: Seen, counts: bool) -> None:
        for reader in self._readers:
            reader(run, seen, counts)
        if run.state.ended and not run.state.queued:
            self.runs.pop(run.run_id, None)  # Refused or redirected: nobody asks for it again.
