"""Which open runs have to go when the limits were lowered below them (Q16 of the account fold).

The newest first, until what is left fits the limits of its tier: tokens of its window, runs at once, and both for its seat. A run that
has ended holds its whole reservation until it is measured, so it counts as tokens but not as a run.
"""

from __future__ import annotations

from processors.decisions.account_state import AccountState, held_tokens, may_generate
from schemas.events.account_snapshots import OpenReservation
from schemas.events.accounts import LimitsChanged, TierLimits
from schemas.vocabulary import Tier


class _InUse:
    """What the account would use without the runs that have to go."""

    def __init__(self, account: AccountState) -> None:
        self.live = [run for run in account.open if not run.ended]
        self._window_of_seats = account.seats.window
        self._tokens = {use.window: use.settled + use.reserved for use in account.windows}
        self._of_seats = {use.seat: use.settled + use.reserved for use in account.seats.uses}
        self._at_once: int | None = None
        self._at_once_of: dict[str, int] = {}

    def exceeds(self, run: OpenReservation, tier: TierLimits) -> bool:
        """Whether what this run is part of is more than its tier may use."""
        seat = run.seat
        return (
            self._tokens[run.window] > tier.tokens_per_window
            or self.at_once() > tier.open_runs_max
            or (
                tier.seat_open_runs_max is not None
                and self.at_once_of(seat) > tier.seat_open_runs_max
            )
            or (
                tier.seat_tokens_per_window is not None
                and self._counts_for_seat(run)
                and self._of_seats[seat] > tier.seat_tokens_per_window
            )
        )

    def at_once(self) -> int:
        """Runs that may generate at once."""
        if self._at_once is None:
            self._at_once = may_generate(self.live)
        return self._at_once

    def at_once_of(self, seat: str) -> int:
        """The same for one seat."""
        if seat not in self._at_once_of:
            of_seat = [run for run in self.live if run.seat == seat]
            self._at_once_of[seat] = may_generate(of_seat)
        return self._at_once_of[seat]

    def drop(self, run: OpenReservation) -> None:
        """The run goes, and gives back what it holds."""
        self.live = [each for each in self.live if each is not run]
        self._tokens[run.window] -= held_tokens(run)
        if self._counts_for_seat(run):
            self._of_seats[run.seat] -= held_tokens(run)
        self._at_once = None
        self._at_once_of.clear()

    def _counts_for_seat(self, run: OpenReservation) -> bool:
        return run.seat_counted and run.window == self._window_of_seats


def beyond(account: AccountState, limits: LimitsChanged) -> list[OpenReservation]:
    """The runs to cancel, in order of cancelling."""
    in_use = _InUse(account)
    gone: list[OpenReservation] = []
    for run in reversed(in_use.live):
        tier = limits.tiers.get(Tier(run.tier))
        if tier is not None and in_use.exceeds(run, tier):
            gone.append(run)
            in_use.drop(run)
    return gone
