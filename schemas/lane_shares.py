"""How lanes share a worker: in which order, by which weights, with which floors. Workers schedule by it, edges estimate waits by it.

A lane's share, while it waits, is its floor plus its weight's part of what the floors of all waiting lanes leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from schemas.events.accounts import LaneLimits
from schemas.vocabulary import Lane

LANES_IN_ORDER: Final = (Lane.TEAM, Lane.PLUS, Lane.FREE, Lane.BACKGROUND)
"""Who goes first among equals."""

DEFAULT_SHARES: Final[Mapping[Lane, LaneLimits]] = MappingProxyType(
    {
        Lane.TEAM: LaneLimits(weight=8),
        Lane.PLUS: LaneLimits(weight=4),
        Lane.FREE: LaneLimits(weight=1, floor_percent=12),
        Lane.BACKGROUND: LaneLimits(weight=0),
    }
)
"""Until the log says any."""


def weight_of(lane: Lane, shares: Mapping[Lane, LaneLimits]) -> int:
    """0: only where nobody else waits. The background lane is always so."""
    share = shares.get(lane)
    return share.weight if share is not None and lane is not Lane.BACKGROUND else 0


def floors_of(shares: Mapping[Lane, LaneLimits]) -> dict[Lane, float]:
    """The lanes with a floor, and it, 0 to 1."""
    percents = {lane: shares[lane].floor_percent for lane in LANES_IN_ORDER if lane in shares}
    return {lane: percent / 100 for lane, percent in percents.items() if percent > 0}


def paces(
    wanted: Mapping[Lane, float], *, rate: float, shares: Mapping[Lane, LaneLimits]
) -> dict[Lane, float]:
    """What each lane gets of `rate`, where it wants so much (inf: it has a backlog), in the same unit.

    A lane that wants less than its share leaves the rest to the others.
    """
    floors = floors_of(shares)
    given = {lane: min(want, floors.get(lane, 0.0) * rate) for lane, want in wanted.items()}
    left = max(0.0, rate - sum(given.values()))
    rest = {lane: want - given[lane] for lane, want in wanted.items() if want > given[lane]}
    by_weight = {lane: weight_of(lane, shares) for lane in rest if weight_of(lane, shares)}
    while by_weight and left > 0:
        total = sum(by_weight.values())
        part = {lane: left * weight / total for lane, weight in by_weight.items()}
        modest = [lane for lane in by_weight if rest[lane] <= part[lane]]
        for lane in modest or by_weight:
            given[lane] += min(rest[lane], part[lane])
        if not modest:
            return given
        left -= sum(rest[lane] for lane in modest)
        by_weight = {lane: weight for lane, weight in by_weight.items() if lane not in modest}
    for lane in LANES_IN_ORDER:
        if lane in rest and not weight_of(lane, shares):
            more = min(rest[lane], max(0.0, left))
            given[lane] += more
            left -= more
    return given


assert set(LANES_IN_ORDER) == set(Lane), "every lane has a place"
