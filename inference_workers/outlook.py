"""What a worker says of what is to come: when slots are free, and what starts before whom.

An edge tells it to clients as their wait. Nobody's turn depends on it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from inference_workers.decisions.lanes import Claim, FairLanes
from inference_workers.decisions.turns import Asked, Draw, Flow, Habits, Held, turns
from inference_workers.load_report import LaneUse, lane_load
from schemas.events.workers import LaneLoad
from schemas.vocabulary import Lane

HELD_SAMPLES_MAX: Final = 64
FREE_SLOTS_MAX: Final = 16
"""Of more slots one or the other is free again at the worker's pace, whatever runs."""


class SlotTimes:
    """For how long requests held their slots lately: from it, when those that run are likely to leave theirs.

    Where the pace of the full worker is known, times are stretched to fit it: among the first that end there are too many short ones,
    and while few run each of them is quicker.
    """

    def __init__(self) -> None:
        self._ended: deque[tuple[int, int]] = deque(maxlen=HELD_SAMPLES_MAX)

    def freed(self, held_ms: int, *, used_tokens: int) -> None:
        """A slot is free again that was held for so long by a request that used so much."""
        self._ended.append((held_ms, used_tokens))

    def held_ms(self, *, slots: int, full_tokens_per_s: float) -> list[int]:
        """Sorted. The pace is that of the full worker; 0: not known."""
        held_ms = sum(held for held, _ in self._ended)
        used = sum(used for _, used in self._ended)
        stretch = 1.0
        if full_tokens_per_s > 0 and held_ms > 0:
            stretch = 1000 * slots * used / held_ms / full_tokens_per_s
        return sorted(max(1, round(stretch * held)) for held, _ in self._ended)


def free_ms(ages_ms: Sequence[int], *, slots: int, held_ms: Sequence[int]) -> tuple[int, ...]:
    """When 1, 2, 4 … slots are free, up to half of all, if requests run since `ages_ms`. Nobody takes one in between.

    It is when as many are expected to be free, less a third: the median, where ends come at random. Empty: not known.
    """
    if not held_ms or slots > FREE_SLOTS_MAX:
        return ()
    ends = sorted(_ends(ages_ms, held_ms))
    counts = [2**power for power in range(slots.bit_length()) if 2 ** (power + 1) <= slots]
    found: list[int] = []
    free, taken = float(slots - len(ages_ms)), 0
    for count in counts or [1]:
        enough = min(count - 1 / 3, slots / 2)
        while free < enough - 1e-9 and taken < len(ends):
            free += ends[taken][1]
            taken += 1
        found.append(ends[taken - 1][0] if taken else 0)
    return tuple(found)


def _ends(ages_ms: Sequence[int], held_ms: Sequence[int]) -> Iterator[tuple[int, float]]:
    """When each may end, with the probability: what has run for so long lasts as others did that lasted longer."""
    for age_ms in ages_ms:
        longer = held_ms[bisect_right(held_ms, age_ms) :]
        if not longer:
            yield max(1, age_ms // 2), 1.0  # It is the longest: nobody knows.
        for one_ms in longer:
            yield one_ms - age_ms, 1 / len(longer)


def lane_loads(
    lanes: FairLanes,
    *,
    running: Sequence[Held],
    slots: int,
    outside: Iterable[Claim],
    use: LaneUse,
    held_ms: Sequence[int],
    draw: Draw,
) -> tuple[LaneLoad, ...]:
    """What waits in each lane, and what starts before a newcomer of it and before the accounts that have most.

    `outside` wait for something else before they may wait for a slot. May take some milliseconds.
    """
    shares = {lane: use.share(lane) or 1.0 for lane in Lane}
    lines = {lane: lanes.lines(lane, used_share=shares[lane]) for lane in Lane}
    waiting = list(outside)
    found: dict[Asked, int] = {}
    if len(running) >= slots and held_ms:
        found = turns(
            lanes,
            running,
            habits=Habits(held_ms=held_ms, used_shares=shares, flows=_flows(use)),
            asked=[
                *((lane, None) for lane in Lane),
                *((lane, line.account_id) for lane in Lane for line in lines[lane]),
            ],
            draw=draw,
        )
    return tuple(
        lane_load(
            lane,
            lanes.queue(lane),
            others=[claim.tokens for claim in waiting if claim.lane is lane],
            use=use,
            lines=lines[lane],
            turns=found,
        )
        for lane in Lane
    )


def _flows(use: LaneUse) -> dict[Lane, Flow]:
    """Those who are likely to come: such as came lately."""
    return {
        lane: Flow(
            recent=tuple(recent),
            gap_ms=1000 * sum(tokens for _, tokens in recent) / len(recent) / use.coming[lane],
        )
        for lane, recent in use.recent.items()
        if use.coming.get(lane, 0.0) > 0
    }
