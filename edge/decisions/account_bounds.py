"""How much one account may put on the log at one edge before anybody has decided it.

Rates are judged behind the account log, one record after the other. So a flood delays every account of its partition, although all of it is
refused. This bound lies before the log. It leaves to admission whatever it might admit, and passes only so much of what is refused.

Rules (cited by assertions and tests):
  E1  An account's bucket holds *tries*. It begins full, and holds at most what admission could admit at once: the burst of the rate of
      requests, or, where the tier has no rate, as many runs as may be open or wait behind others; and SPARE_TRIES beside it.
  E2  It fills by the rate of requests and SPARE_PER_MINUTE beside it. So who sends no more than his rate in all passes always, whatever
      becomes of it; the spare ones are for what the rate does not count: repeats of a key, and what other limits refuse.
  E3  A prompt takes a try. One that is admitted gives it back, but for one of ADMITTED_A_TRY parts: what is admitted is bounded by its own
      limits, and here only by what one account key can do.
  E4  A change of a chat, which nobody refuses, takes such a part.
  E5  Who finds too little is told the first millisecond at which the same would pass, if nothing else came. It takes nothing.
  E6  Under other limits than it was last asked with, a bucket begins full again. Limits that are not known are those of an account that may
      have as many runs open as any. A tier's bucket is its own.
  E7  At most ACCOUNTS_MAX accounts are kept. Who has not asked for longest is forgotten, and begins full again; who floods has just asked.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Final

from schemas.events.account_snapshots import OPEN_RESERVATIONS_MAX
from schemas.events.accounts import TierLimits
from schemas.rates import SCALE, burst
from schemas.vocabulary import Tier

SPARE_TRIES: Final = 64
SPARE_PER_MINUTE: Final = 600
ADMITTED_A_TRY: Final = 30
"""With SPARE_PER_MINUTE these are 300 admitted prompts a second, what one account key holds (infra/benchmarks)."""
ACCOUNTS_MAX: Final = 50_000

PART_UNITS: Final = SCALE
TRY_UNITS: Final = ADMITTED_A_TRY * PART_UNITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The most tries that a bucket holds, and how many flow into it a minute."""

    tries: int
    per_minute: int

    @property
    def units(self) -> int:
        """What a full bucket holds."""
        return self.tries * TRY_UNITS

    @property
    def units_a_ms(self) -> int:
        """What flows into it."""
        return self.per_minute * ADMITTED_A_TRY


def bound_of(limits: TierLimits | None) -> Bound:
    """E1, E2, E6. The bound of an account with these limits; None: not known."""
    if limits is None:
        return Bound(tries=OPEN_RESERVATIONS_MAX + SPARE_TRIES, per_minute=SPARE_PER_MINUTE)
    rate = limits.requests_per_minute
    if rate is not None:
        return Bound(
            tries=burst(rate, limits.requests_burst) + SPARE_TRIES,
            per_minute=rate + SPARE_PER_MINUTE,
        )
    at_once = min(OPEN_RESERVATIONS_MAX, limits.open_runs_max * (1 + limits.enqueued_runs_max))
    return Bound(tries=at_once + SPARE_TRIES, per_minute=SPARE_PER_MINUTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """What is missing in a bucket at `at_ms`, in units."""

    bound: Bound
    units: int
    at_ms: int


class AccountBounds:
    """The buckets of the accounts that asked last. `now_ms` is of one steady clock of this process."""

    def __init__(self, accounts_max: int = ACCOUNTS_MAX) -> None:
        self._accounts_max = accounts_max
        self._taken: OrderedDict[tuple[str, Tier], _Taken] = OrderedDict()

    def __len__(self) -> int:
        return len(self._taken)

    def prompt(self, account_id: str, tier: Tier, limits: TierLimits | None, *, now_ms: int) -> int:
        """E3. Take a try; or how long (ms) until there is one. `limits` are the tier's; None: not known."""
        return self._take((account_id, tier), bound_of(limits), TRY_UNITS, now_ms)

    def change(self, account_id: str, tier: Tier, limits: TierLimits | None, *, now_ms: int) -> int:
        """E4. As `prompt`, for a change of a chat."""
        return self._take((account_id, tier), bound_of(limits), PART_UNITS, now_ms)

    def admitted(self, account_id: str, tier: Tier) -> None:
        """E3. A prompt that took a try was admitted."""
        taken = self._taken.get((account_id, tier))
        if taken is not None:
            units = max(0, taken.units - (TRY_UNITS - PART_UNITS))
            self._taken[account_id, tier] = replace(taken, units=units)

    def _take(self, whose: tuple[str, Tier], bound: Bound, units: int, now_ms: int) -> int:
        before = self._taken.get(whose)
        if before is None or before.bound != bound:  # E6
            before = _Taken(bound=bound, units=0, at_ms=now_ms)
        at_ms = max(before.at_ms, now_ms)
        still = max(0, before.units - bound.units_a_ms * (at_ms - before.at_ms))
        wait_ms = max(0, -(-(still + units - bound.units) // bound.units_a_ms))
        taken = still if wait_ms else still + units
        self._taken[whose] = _Taken(bound=bound, units=taken, at_ms=at_ms)
        self._taken.move_to_end(whose)
        if len(self._taken) > self._accounts_max:  # E7
            self._taken.popitem(last=False)
        return wait_ms
