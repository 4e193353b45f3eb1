"""The degradation ladder: at which level a prompt is judged, and what the level means for it.

The level belongs to a partition of the account log and follows from the prompts in it, since nothing else may decide: each prompt
carries how saturated its edge saw the workers.

Rules (cited by assertions and tests):
  L1  Upward at once: to the highest level that the saturation enters.
  L2  Downward by hysteresis: only where the saturation lies below the level's `leave_ms`, and the level was held for `hold_ms`. Then to
      the highest level that is not left. So the ladder clears by itself, and one edge that sees less than others moves it rarely.
  L3  The level is a function of the last move and the prompt, so moves, kept by offset, are all that a replay needs.
  L4  Free before paid: at no level is a paying tier cut more, replaced or shed where the free tier is not, but for L5. (The policy file is
      checked.)
  L5  A lane with a floor is shed only while its own wait is as long as the first level's `enter_ms`: what waits there keeps the floor in
      use. Else the free tier would get nothing for as long as those who pay ask for everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from schemas.events.account_snapshots import LadderMoved
from schemas.events.accounts import Ladder, LadderLevel, LimitsChanged, LoadView
from schemas.vocabulary import PAID_TIERS, Lane, Tier

PRESSURE_SHED: Final = 4
"""Where the limits have no ladder, an edge's word alone sheds."""

CALM: Final = LadderMoved(source_offset=-1, level=0, moved_ms=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a level means for one tier."""

    output_percent: int = 100
    downgrade: bool = False
    optional_work: bool = True
    shed: bool = False


def saturation_ms(load: LoadView) -> int:
    """How long the workers need for what is queued, as the edge saw it."""
    if load.saturation_ms is not None:
        return load.saturation_ms
    return max((wait.wait_ms for wait in load.waits), default=0)


def moved(
    ladder: Ladder, before: LadderMoved, *, saturation: int, offset: int, appended_ms: int
) -> LadderMoved:
    """L1, L2. The last move after a prompt with this saturation; `before` itself where the level stays."""
    levels = ladder.levels
    level = min(before.level, len(levels))
    entered = sum(1 for each in levels if saturation >= each.enter_ms)
    kept = min(level, sum(1 for each in levels if saturation >= each.leave_ms))
    if entered > level:
        level = entered
    elif kept < level and appended_ms - before.moved_ms >= ladder.hold_ms:
        level = kept
    if level == before.level:
        return before
    return LadderMoved(source_offset=offset, level=level, moved_ms=appended_ms)


def step(limits: LimitsChanged, level: int, tier: Tier, load: LoadView) -> Step:
    """What the level means for a prompt of this tier."""
    levels = limits.ladder.levels
    if not levels:
        return Step(shed=load.pressure >= PRESSURE_SHED)
    if level == 0:
        return Step()
    at = levels[level - 1]
    return _paid(at) if tier in PAID_TIERS else _free(at)


def keeps_floor(limits: LimitsChanged, lane: Lane, wait_ms: int) -> bool:
    """L5. Whether a request that would wait so long in the lane is needed there, although its tier is shed."""
    share, levels = limits.lanes.get(lane), limits.ladder.levels
    if share is None or not share.floor_percent or not levels:
        return False
    return wait_ms < levels[0].enter_ms


def _paid(at: LadderLevel) -> Step:
    return Step(
        output_percent=at.output_percent_paid,
        downgrade=at.downgrade_paid,
        optional_work=at.optional_work,
        shed=at.shed_paid,
    )


def _free(at: LadderLevel) -> Step:
    return Step(
        output_percent=at.output_percent_free,
        downgrade=at.downgrade_free,
        optional_work=at.optional_work,
        shed=at.shed_free,
    )
