"""How hard the fleet is pressed, in levels that do not flicker: what an edge tells admission beside the waits.

Rule, numbered on from those of the load view:
  V7  Pressure follows saturation upward at once, and downward one level at a time, after PRESSURE_HOLD_MS and below
      PRESSURE_LEAVE_SHARE of the level's step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PRESSURE_STEPS_MS: Final = (2_000, 10_000, 30_000, 120_000)
PRESSURE_LEAVE_SHARE: Final = 0.5
PRESSURE_HOLD_MS: Final = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """0 (calm) to 4 (shed), since when (broker's clock)."""

    level: int = 0
    since_ms: int = 0


def pressed(pressure: Pressure, *, saturation_ms: int, now_ms: int) -> Pressure:
    """V7. `saturation_ms` by the load view (V6), `now_ms` by the broker's clock."""
    reached = sum(1 for step in PRESSURE_STEPS_MS if saturation_ms >= step)
    if reached > pressure.level:
        return Pressure(level=reached, since_ms=now_ms)
    if reached == pressure.level or now_ms - pressure.since_ms < PRESSURE_HOLD_MS:
        return pressure
    if saturation_ms < PRESSURE_LEAVE_SHARE * PRESSURE_STEPS_MS[pressure.level - 1]:
        return Pressure(level=pressure.level - 1, since_ms=now_ms)
    return pressure
