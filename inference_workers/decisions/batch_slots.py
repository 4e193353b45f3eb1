"""Which waiting requests get the engine's free slots.

Rules:
  L1  Never more requests at once than the engine has slots.
  L2  Lanes go by priority: team, plus, free, background.
  L3  A floor keeps the free lane alive under any load of the others (requirement C3): while it holds fewer slots than its floor
      and somebody waits in it, it goes first. The floor is FREE_FLOOR_SHARE of the slots, and one slot where there are at least
      FREE_FLOOR_SLOTS_MIN. A floor that nobody claims is used by the others.
  L4  Within a lane, who came first goes first.

Weights between lanes and fairness between accounts belong here when they come: `next_lane` is the seam.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from schemas.vocabulary import Lane

LANES_BY_PRIORITY: Final = (Lane.TEAM, Lane.PLUS, Lane.FREE, Lane.BACKGROUND)
FREE_FLOOR_SHARE: Final = 1 / 8
FREE_FLOOR_SLOTS_MIN: Final = 2


def free_floor(slots: int) -> int:
    """Slots that the free lane is kept of `slots` (L3)."""
    if slots < FREE_FLOOR_SLOTS_MIN:
        return 0
    return max(1, int(slots * FREE_FLOOR_SHARE))


def next_lane(waiting: Mapping[Lane, int], busy: Mapping[Lane, int], *, slots: int) -> Lane | None:
    """The lane whose first request starts next, or None when nobody waits. `busy` counts the slots that each lane holds."""
    if waiting.get(Lane.FREE, 0) and busy.get(Lane.FREE, 0) < free_floor(slots):
        return Lane.FREE  # L3
    return next((lane for lane in LANES_BY_PRIORITY if waiting.get(lane, 0)), None)  # L2


def choose(
    waiting: Mapping[Lane, Sequence[str]], busy: Mapping[Lane, int], *, slots: int
) -> list[str]:
    """The run ids that start now, in order. `waiting` are those that could start, first come first."""
    left = {lane: list(reversed(runs)) for lane, runs in waiting.items()}
    held = dict(busy)
    started: list[str] = []
    for _ in range(slots - sum(busy.values())):  # L1
        lane = next_lane({lane: len(runs) for lane, runs in left.items()}, held, slots=slots)
        if lane is None:
            break
        started.append(left[lane].pop())  # L4
        held[lane] = held.get(lane, 0) + 1
    return started


assert set(LANES_BY_PRIORITY) == set(Lane), "every lane has a priority"
