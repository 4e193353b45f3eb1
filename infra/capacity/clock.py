"""Virtual time: what happens next, in order. Nothing here waits."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Final

START_MS: Final = 1_772_755_200_000
"""2026-03-06 00:00:00 UTC: where the broker's stamps begin, far from the end of a quota window."""


class Timeline:
    """Calls by the millisecond (a float since the start) at which they are due; those of one moment in the order of their booking."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._booked = 0

    def at(self, due: float, call: Callable[..., None], *args: Any) -> None:
        """Call it then; at once where that is over."""
        self._booked += 1
        heapq.heappush(self._due, (max(due, self.now), self._booked, call, args))

    def after(self, ms: float, call: Callable[..., None], *args: Any) -> None:
        """Call it so much later."""
        self.at(self.now + ms, call, *args)

    def run_until(self, end: float) -> None:
        """Everything that is due by then."""
        due, pop = self._due, heapq.heappop
        while due and due[0][0] <= end:
            self.now, _, call, args = pop(due)
            call(*args)
        self.now = max(self.now, end)

    @property
    def broker_ms(self) -> int:
        """The broker's stamp of a record that is appended now."""
        return START_MS + int(self.now)
