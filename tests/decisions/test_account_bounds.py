"""The bound before the log (E1 to E7): never in the way of who stays within limits, and never more than it says for who does not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)

from edge.decisions.account_bounds import (
    ADMITTED_A_TRY,
    SPARE_PER_MINUTE,
    SPARE_TRIES,
    AccountBounds,
    Bound,
    bound_of,
)
from schemas.events.account_snapshots import OPEN_RESERVATIONS_MAX, RateBucket
from schemas.events.accounts import TierLimits
from schemas.rates import burst, filled, taken, wait_ms
from schemas.vocabulary import Tier
from tests.decisions.account_samples import limits

EDGES = 3
TEAM_RUNS = 20
MINUTE_MS = 60_000


def tier(**changes: Any) -> TierLimits:
    return limits(**changes).tiers[Tier.FREE]


RATED = st.builds(
    lambda rate, most: tier(requests_per_minute=rate, requests_burst=most),
    st.integers(1, 2_000),
    st.none() | st.integers(1, 200),
)


class Meter:
    """What passed at one edge beyond what flowed meanwhile, in 60,000ths of a part: of the window that ends now and has most of it."""

    def __init__(self) -> None:
        self.worst = self.at_ms = self.prompts = 0

    def passed(self, bound: Bound, parts: int, *, now_ms: int) -> None:
        flowed = (now_ms - self.at_ms) * bound.per_minute * ADMITTED_A_TRY
        self.worst = max(0, self.worst - flowed) + parts * MINUTE_MS
        self.at_ms = now_ms
        self.prompts += parts == ADMITTED_A_TRY
        assert self.worst <= bound.tries * ADMITTED_A_TRY * MINUTE_MS, "E1, E2, E3, E4"


class Senders(RuleBasedStateMachine):
    """Several edges. `honest` sends within its rate, whatever becomes of it. `team` has no rate: it sends what is admitted, in the end.
    `flood` sends whatever it likes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.edges = [AccountBounds() for _ in range(EDGES)]
        self.now_ms = 1_000
        self.rated = tier(requests_per_minute=60)
        self.pooled = tier(open_runs_max=TEAM_RUNS, enqueued_runs_max=0)
        self.rate: RateBucket | None = None
        self.undecided: list[tuple[str, int]] = []
        self.key: RateBucket | None = None
        self.meters = [Meter() for _ in range(EDGES)]
        self.held: set[Bound] = set()

    @initialize(limits=RATED)
    def begin(self, limits: TierLimits) -> None:
        self.rated = limits
        self.held = {bound_of(limits)}

    @rule(ms=st.integers(0, 200) | st.integers(0, 3 * MINUTE_MS))
    def time_goes_on(self, ms: int) -> None:
        self.now_ms += ms

    @rule(limits=RATED)
    def the_limits_change(self, limits: TierLimits) -> None:
        """To some that never held before: an edge that nobody asks meanwhile does not tell them from the old ones."""
        if bound_of(limits) not in self.held:
            self.held.add(bound_of(limits))
            self.rated = limits
            self.meters = [Meter() for _ in range(EDGES)]

    @rule(edge=st.integers(0, EDGES - 1), count=st.integers(1, 100))
    def honest_sends(self, edge: int, count: int) -> None:
        per_minute = self.rated.requests_per_minute
        assert per_minute is not None
        most = burst(per_minute, self.rated.requests_burst)
        for _ in range(count):
            now = filled(self.rate, per_minute=per_minute, most=most, appended_ms=self.now_ms)
            if wait_ms(now, per_minute=per_minute, most=most, amount=1):
                break
            self.rate = taken(now, 1)
            self.passes("honest", self.rated, edge)
            self.undecided.append(("honest", edge))

    @rule(edge=st.integers(0, EDGES - 1), count=st.integers(1, TEAM_RUNS))
    def team_sends(self, edge: int, count: int) -> None:
        most, per_minute = SPARE_TRIES * ADMITTED_A_TRY, SPARE_PER_MINUTE * ADMITTED_A_TRY
        for _ in range(count):
            if sum(who == "team" for who, _ in self.undecided) >= TEAM_RUNS:
                break
            now = filled(self.key, per_minute=per_minute, most=most, appended_ms=self.now_ms)
            self.key = taken(now, 1)
            self.passes("team", self.pooled, edge)
            self.undecided.append(("team", edge))

    def passes(self, who: str, limits: TierLimits, edge: int) -> None:
        waits = self.edges[edge].prompt(who, Tier.TEAM, limits, now_ms=self.now_ms)
        assert waits == 0, f"E1, E2, E3: {who} stays within its limits"

    @precondition(lambda self: self.undecided)
    @rule(data=st.data())
    def admission_decides(self, data: st.DataObject) -> None:
        """In any order; of the honest one it refuses some, or never says."""
        who, edge = self.undecided.pop(data.draw(st.integers(0, len(self.undecided) - 1)))
        if who == "team" or data.draw(st.booleans()):
            self.edges[edge].admitted(who, Tier.TEAM)

    @rule(edge=st.integers(0, EDGES - 1), count=st.integers(1, 400), change=st.booleans())
    def flood_sends(self, edge: int, count: int, change: bool) -> None:
        bounds = self.edges[edge]
        send, parts = (bounds.change, 1) if change else (bounds.prompt, ADMITTED_A_TRY)
        for _ in range(count):
            waits = send("flood", Tier.FREE, self.rated, now_ms=self.now_ms)
            if waits:
                self.now_ms += waits - 1
                left = send("flood", Tier.FREE, self.rated, now_ms=self.now_ms)
                assert left == 1, "E5: the first millisecond, and asking takes nothing"
                break
            self.meters[edge].passed(bound_of(self.rated), parts, now_ms=self.now_ms)

    @rule(edge=st.integers(0, EDGES - 1))
    def a_prompt_of_the_flood_is_admitted(self, edge: int) -> None:
        if self.meters[edge].prompts:
            self.edges[edge].admitted("flood", Tier.FREE)
            parts = 1 - ADMITTED_A_TRY
            self.meters[edge].passed(bound_of(self.rated), parts, now_ms=self.now_ms)


TestSenders = Senders.TestCase
TestSenders.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    ("found", "tries", "per_minute"),
    [
        (None, OPEN_RESERVATIONS_MAX, 0),
        (tier(requests_per_minute=60), 60, 60),
        (tier(requests_per_minute=60, requests_burst=5), 5, 60),
        (tier(open_runs_max=64, enqueued_runs_max=4), 64 * 5, 0),
        (tier(open_runs_max=900, enqueued_runs_max=4), OPEN_RESERVATIONS_MAX, 0),
    ],
)
def test_the_bound_follows_from_the_limits_of_the_tier(
    found: TierLimits | None, tries: int, per_minute: int
) -> None:
    assert bound_of(found) == Bound(
        tries=tries + SPARE_TRIES, per_minute=per_minute + SPARE_PER_MINUTE
    )


def flooded(
    bounds: AccountBounds, who: str, *, now_ms: int = 0, rate: int = 60, admitted: bool = False
) -> int:
    """How many prompts pass at once."""
    count, found = 0, tier(requests_per_minute=rate)
    while not bounds.prompt(who, Tier.FREE, found, now_ms=now_ms):
        count += 1
        assert count < 10_000, "nothing bounds it"
        if admitted:
            bounds.admitted(who, Tier.FREE)
    return count


def test_a_flood_takes_nothing_from_anybody_else_and_passes_what_flows_in() -> None:
    bounds = AccountBounds()
    assert flooded(bounds, "flood") == 60 + SPARE_TRIES
    assert flooded(bounds, "flood") == 0
    assert flooded(bounds, "other") == 60 + SPARE_TRIES
    assert flooded(bounds, "flood", now_ms=MINUTE_MS // 10) == (60 + SPARE_PER_MINUTE) // 10


def test_under_other_limits_it_begins_full_again() -> None:
    bounds = AccountBounds()
    for rate in (60, 600, 6):
        assert flooded(bounds, "flood", rate=rate) == rate + SPARE_TRIES, "E6"
        assert flooded(bounds, "flood", rate=rate) == 0


def test_what_is_admitted_takes_a_part_of_a_try() -> None:
    most = (60 + SPARE_TRIES - 1) * ADMITTED_A_TRY + 1
    assert flooded(AccountBounds(), "flood", admitted=True) == most, "E3"


def test_who_is_admitted_is_bounded_by_what_a_key_can_do_only() -> None:
    bounds, found = AccountBounds(), tier(open_runs_max=1, enqueued_runs_max=0)
    for at_ms in range(0, 10 * MINUTE_MS, 10):
        for _ in range(SPARE_PER_MINUTE * ADMITTED_A_TRY * 10 // MINUTE_MS):
            assert bounds.prompt("a", Tier.TEAM, found, now_ms=at_ms) == 0
            bounds.admitted("a", Tier.TEAM)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=300))
def test_memory_is_bounded_and_who_asked_last_is_kept(asked: list[tuple[int, bool]]) -> None:
    bounds = AccountBounds(accounts_max=8)
    flooded(bounds, "flood")
    for number, admitted in asked:
        who = f"account-{number}"
        bounds.prompt(who, Tier.FREE, tier(requests_per_minute=60), now_ms=0)
        if admitted:
            bounds.admitted(who, Tier.FREE)
        assert flooded(bounds, "flood") == 0, "E7"
        assert len(bounds) <= 8
    for number in range(8):
        flooded(bounds, f"other-{number}")
    assert flooded(bounds, "flood") == 60 + SPARE_TRIES, "E7: forgotten, it begins full again"
