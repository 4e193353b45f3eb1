"""One person watching one run, through any number of connections."""

from __future__ import annotations

from edge.decisions.token_cursor import START, read_cursor, run_digest, write_cursor
from edge.decisions.viewer import DeltaShown, EndedShown, QueuedShown, Shown, StartedShown
from tests.simulation.world import World


class Viewer:
    """Keeps what it was shown, and the id of the last event. Complaints are violations of I4 and I15."""

    def __init__(self, world: World, run_id: str) -> None:
        self.world = world
        self.run_id = run_id
        self.edge: str | None = None
        self.text = ""
        self.tokens = 0
        self.ended: EndedShown | None = None
        self.complaints: list[str] = []
        self._digest = run_digest(run_id)
        self._cursor: str | None = None

    @property
    def position(self) -> int:
        """Where it resumes, read from the event id that it holds."""
        return START if self._cursor is None else read_cursor(self._cursor, self.run_id)

    @property
    def over(self) -> bool:
        """It has seen the end."""
        return self.ended is not None

    def receive(self, shown: tuple[Shown, ...]) -> bool:
        """Take events in order. False: the connection broke, perhaps in the midst of them."""
        breaks = 0.0 if self.world.draining else 0.15
        for one in shown:
            if breaks and self.world.chance(breaks):
                self.edge = None
                return False
            self._take(one)
        return True

    def _take(self, one: Shown) -> None:
        if one.position <= self.position:
            self.complaints.append(f"event {one.position} after {self.position}")
        if self.ended is not None:
            self.complaints.append("an event after the end")
        match one:
            case DeltaShown():
                if one.index != self.tokens:
                    self.complaints.append(f"token {one.index} after {self.tokens} tokens")
                if self.text and self.edge is None:
                    self.world.sometimes["resumed in mid-answer"] += 1
                self.text += one.text
                self.tokens += one.count
            case EndedShown():
                self.ended = one
            case QueuedShown():
                if self._cursor is not None:
                    self.complaints.append("the run was queued again")
            case StartedShown():
                pass
            case _:
                self.complaints.append(f"unasked {type(one).__name__}")
        self._cursor = write_cursor(self._digest, one.position)
