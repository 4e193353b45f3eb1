"""Who starts next at a worker: laws K1 to K8, over whatever comes, ends, is lost and comes back."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inference_workers.decisions.lanes import (
    FLOOR_SLACK_CLAIMS,
    Claim,
    FairLanes,
)
from schemas.events.accounts import LaneLimits
from schemas.lane_shares import DEFAULT_SHARES, LANES_IN_ORDER
from schemas.vocabulary import Lane

CLAIM_MAX = 2_000
ROOM = 10**9
LANES = st.sampled_from(LANES_IN_ORDER)


def jain(shares: list[float]) -> float:
    """1 where all are equal, 1/n where one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def claim(number: int, lane: Lane = Lane.FREE, *, account: str = "a", tokens: int = 100) -> Claim:
    return Claim(run_id=f"run-{number}", account_id=account, lane=lane, tokens=tokens)


class Anything(RuleBasedStateMachine):
    """Whatever is done in whatever order, K1, K2, K7 and the order within an account hold, and nothing is left behind."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = {
            **DEFAULT_SHARES,
            Lane.FREE: LaneLimits(weight=1, floor_percent=12, look_ahead_requests=3),
        }
        self.lanes = FairLanes(self.shares)
        self.number = 0
        self.waiting: dict[str, Claim] = {}
        self.resumed: dict[str, int] = {}
        self.arrival: dict[str, int] = {}
        self.held: dict[str, Claim] = {}

    @rule(
        lane=LANES,
        account=st.sampled_from("abc"),
        tokens=st.integers(1, CLAIM_MAX),
        old=st.booleans(),
    )
    def comes(self, lane: Lane, account: str, tokens: int, old: bool) -> None:
        self.number += 1
        one = Claim(
            run_id=f"run-{self.number}",
            account_id=f"{lane}-{account}",
            lane=lane,
            tokens=tokens,
            resumed=old,
        )
        self.lanes.wait(one)
        self.waiting[one.run_id] = one
        self.arrival[one.run_id] = self.number
        if old:
            self.resumed[one.run_id] = self.number

    @rule()
    def a_slot_is_free(self) -> None:
        taken = self.lanes.take(room_tokens=ROOM)
        if not self.waiting:
            assert taken is None
            return
        assert taken is not None, "K1"
        one = self.waiting.pop(taken)
        if self.resumed:
            oldest = min(self.resumed, key=self.resumed.__getitem__)
            assert taken == oldest, "K2"
            del self.resumed[taken]
        else:
            before = [
                other
                for other in self.waiting.values()
                if other.lane is one.lane and self.arrival[other.run_id] < self.arrival[taken]
            ]
            assert len(before) < self.shares[one.lane].look_ahead_requests, "K7"
            assert one.account_id not in {other.account_id for other in before}, "K5: in order"
        self.held[taken] = one

    @precondition(lambda self: self.held)
    @rule(data=st.data(), share=st.floats(0, 1))
    def one_ends(self, data: st.DataObject, share: float) -> None:
        run_id = data.draw(st.sampled_from(sorted(self.held)))
        one = self.held.pop(run_id)
        self.lanes.finish(run_id, used_tokens=int(share * one.tokens))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def one_is_lost_and_comes_back(self, data: st.DataObject) -> None:
        run_id = data.draw(st.sampled_from(sorted(self.held)))
        self.waiting[run_id] = self.held.pop(run_id)
        self.resumed[run_id] = self.arrival[run_id]
        self.lanes.put_back(run_id)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def one_is_cancelled(self, data: st.DataObject) -> None:
        run_id = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[run_id]
        self.resumed.pop(run_id, None)
        self.lanes.withdraw(run_id)
        self.lanes.withdraw("run-never")

    @rule(look_ahead=st.integers(1, 5))
    def the_policy_changes(self, look_ahead: int) -> None:
        self.shares[Lane.PLUS] = LaneLimits(weight=3, look_ahead_requests=64)
        self.shares[Lane.BACKGROUND] = LaneLimits(weight=look_ahead, floor_percent=look_ahead)
        self.lanes.change_shares(self.shares)

    @invariant()
    def what_waits_is_counted(self) -> None:
        assert {one.run_id for one in self.lanes} == set(self.waiting)
        for lane in Lane:
            queue = self.lanes.queue(lane)
            of_lane = [one for one in self.waiting.values() if one.lane is lane]
            assert queue.requests == len(of_lane) >= queue.ahead_requests
            assert queue.tokens == sum(one.tokens for one in of_lane) >= queue.ahead_tokens

    def teardown(self) -> None:
        while (taken := self.lanes.take(room_tokens=ROOM)) is not None:
            self.lanes.finish(taken, used_tokens=1)
        for run_id in self.held:
            self.lanes.finish(run_id, used_tokens=1)
        for state in self.lanes._lanes.values():
            assert not state.accounts | state.beyond | state.held
            assert state.looked_at == 0
            assert not state.account_tags, "K8"


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class Saturated:
    """A worker with `slots`, all of whose sources always have something waiting; ends are drawn."""

    def __init__(
        self,
        shares: Mapping[Lane, LaneLimits],
        *,
        slots: int,
        rng: Random,
        size: Callable[[str], int],
        used_share: Callable[[], float],
    ) -> None:
        self.lanes = FairLanes(shares)
        self.used: Counter[str] = Counter()
        self.by_lane: Counter[Lane] = Counter()
        self._slots = slots
        self._rng = rng
        self._size = size
        self._used_share = used_share
        self._number = 0
        self.held: dict[str, Claim] = {}
        self._claims: dict[str, Claim] = {}

    def source(self, lane: Lane, account: str) -> None:
        self._number += 1
        one = claim(self._number, lane, account=account, tokens=self._size(account))
        self._claims[one.run_id] = one
        self.lanes.wait(one)

    def run(self, starts: int) -> None:
        for _ in range(starts):
            if len(self.held) == self._slots:
                run_id = self._rng.choice(sorted(self.held))
                one = self.held.pop(run_id)
                used = max(1, int(self._used_share() * one.tokens))
                self.used[one.account_id] += used
                self.by_lane[one.lane] += used
                self.lanes.finish(run_id, used_tokens=used)
            taken = self.lanes.take(room_tokens=ROOM)
            assert taken is not None, "K1"
            one = self._claims.pop(taken)
            self.held[taken] = one
            self.source(one.lane, one.account_id)

    def claimed(self) -> Counter[str]:
        """What each account had, what is in flight counted as claimed."""
        return self.used + self._in_flight()

    def _in_flight(self) -> Counter[str]:
        flight: Counter[str] = Counter()
        for one in self.held.values():
            flight[one.account_id] += one.tokens
        return flight


@given(
    seed=st.integers(0, 10_000),
    slots=st.integers(1, 8),
    floor=st.integers(1, 40),
    share=st.sampled_from([1.0, 0.3]),
)
@settings(max_examples=40, deadline=None)
def test_k3_a_lane_that_always_waits_gets_its_floor_and_more_by_weight(
    seed: int, slots: int, floor: int, share: float
) -> None:
    rng = Random(seed)
    shares = {**DEFAULT_SHARES, Lane.FREE: LaneLimits(weight=0, floor_percent=floor)}
    worker = Saturated(
        shares,
        slots=slots,
        rng=rng,
        size=lambda account: rng.randint(1, CLAIM_MAX),
        used_share=lambda: rng.uniform(share, 1),
    )
    for lane in (Lane.TEAM, Lane.PLUS, Lane.FREE):
        for account in range(3):
            worker.source(lane, f"{lane}-{account}")
    worker.run(600)
    total = sum(worker.by_lane.values())
    slack = (FLOOR_SLACK_CLAIMS + slots) * CLAIM_MAX
    assert worker.by_lane[Lane.FREE] >= floor / 100 * total - slack
    assert worker.by_lane[Lane.FREE] <= floor / 100 * total + slack, "no weight, no more"


@given(seed=st.integers(0, 10_000), slots=st.integers(1, 8), share=st.sampled_from([1.0, 0.3]))
@settings(max_examples=40, deadline=None)
def test_k4_what_floors_leave_is_shared_by_weight(seed: int, slots: int, share: float) -> None:
    rng = Random(seed)
    shares = {
        Lane.TEAM: LaneLimits(weight=5),
        Lane.PLUS: LaneLimits(weight=2),
        Lane.FREE: LaneLimits(weight=1, floor_percent=20),
        Lane.BACKGROUND: LaneLimits(weight=9),
    }
    worker = Saturated(
        shares,
        slots=slots,
        rng=rng,
        size=lambda account: rng.randint(1, CLAIM_MAX),
        used_share=lambda: rng.uniform(share, 1),
    )
    for lane in Lane:
        for _ in range(2):
            worker.source(lane, str(lane))
    worker.run(800)
    total = sum(worker.by_lane.values())
    slack = (FLOOR_SLACK_CLAIMS + slots) * CLAIM_MAX
    expected = {Lane.TEAM: 0.5, Lane.PLUS: 0.2, Lane.FREE: 0.3, Lane.BACKGROUND: 0.0}
    for lane, part in expected.items():
        assert abs(worker.by_lane[lane] - part * total) <= slack, lane


@given(
    seed=st.integers(0, 10_000),
    slots=st.integers(1, 8),
    accounts=st.integers(2, 12),
    exact=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_k5_accounts_that_always_wait_have_the_same_however_they_cut_it(
    seed: int, slots: int, accounts: int, exact: bool
) -> None:
    rng = Random(seed)
    largest = {f"a{number}": rng.choice([10, 100, 1_000, 30_000]) for number in range(accounts)}
    worker = Saturated(
        DEFAULT_SHARES,
        slots=slots,
        rng=rng,
        size=lambda account: rng.randint(largest[account] // 2, largest[account]),
        used_share=lambda: 1.0 if exact else rng.uniform(0.1, 1),
    )
    for account in largest:
        for _ in range(3):
            worker.source(Lane.FREE, account)
    worker.run(500)
    had = worker.claimed()
    for one, claim_max in largest.items():
        assert had[one] - min(had[a] for a in largest) <= claim_max, "K5: its largest claim ahead"


def test_k5_a_request_of_30000_tokens_and_a_hundred_small_ones_share_by_tokens() -> None:
    rng = Random(1)
    worker = Saturated(
        DEFAULT_SHARES,
        slots=4,
        rng=rng,
        size=lambda account: 30_000 if account == "heavy" else 300,
        used_share=lambda: 1.0,
    )
    for account in ("heavy", *(f"light-{number}" for number in range(20))):
        worker.source(Lane.FREE, account)
    worker.run(20_000)
    assert jain([float(tokens) for tokens in worker.used.values()]) >= 0.95
    assert len(worker.used) == 21


@given(seed=st.integers(0, 10_000), accounts=st.integers(2, 40))
@settings(max_examples=20, deadline=None)
def test_tokens_inside_a_saturated_lane_have_a_jain_index_of_at_least_95_percent(
    seed: int, accounts: int
) -> None:
    """Accounts ask in their own sizes and number, and use less than they claim, each in its own way."""
    rng = Random(seed)
    size = {f"a{number}": rng.choice([50, 200, 1_000, 4_000]) for number in range(accounts)}
    worker = Saturated(
        DEFAULT_SHARES,
        slots=8,
        rng=rng,
        size=lambda account: size[account],
        used_share=lambda: rng.uniform(0.2, 1),
    )
    for account in size:
        for _ in range(1 if accounts > 20 else 3):
            worker.source(Lane.TEAM, account)
    worker.run(accounts * 150)
    assert jain([float(worker.used[account]) for account in size]) >= 0.95


def test_k3_a_floor_that_was_not_claimed_is_not_saved_up() -> None:
    lanes = FairLanes(DEFAULT_SHARES)
    for number in range(100):
        lanes.wait(claim(number, Lane.TEAM, account="t"))
        assert lanes.take(room_tokens=ROOM) == f"run-{number}"
        lanes.finish(f"run-{number}", used_tokens=100)
    for number in range(100, 120):
        lanes.wait(claim(number, Lane.TEAM, account="t"))
        lanes.wait(claim(1_000 + number, Lane.FREE, account="f"))
    first = [lanes.take(room_tokens=ROOM) for _ in range(10)]
    free = [run for run in first if run is not None and run.startswith("run-1") and len(run) == 8]
    assert 1 <= len(free) <= 3, "its share from now on, and nothing for the time before"


def test_k6_an_account_that_had_much_is_served_though_new_accounts_come_for_ever() -> None:
    lanes = FairLanes(DEFAULT_SHARES)
    lanes.wait(claim(0, account="heavy", tokens=30_000))
    for number in range(1, 11):
        lanes.wait(claim(number, account=f"new-{number}"))
    assert lanes.take(room_tokens=ROOM) == "run-0"
    lanes.finish("run-0", used_tokens=30_000)
    lanes.wait(claim(999_999, account="heavy", tokens=30_000))
    for number in range(11, 20_000):
        lanes.wait(claim(number, account=f"new-{number}"))
        taken = lanes.take(room_tokens=ROOM)
        assert taken is not None
        if taken == "run-999999":
            break
        lanes.finish(taken, used_tokens=100)
    else:
        pytest.fail("K6: starved")
    # Eleven accounts waited at a time: each had as much before the heavy one was served again.
    assert 2_500 <= number <= 3_700


def test_k2_a_request_that_lost_its_slot_is_the_next_and_is_charged_once() -> None:
    lanes = FairLanes(DEFAULT_SHARES)
    lanes.wait(claim(1, account="a", tokens=500))
    lanes.wait(claim(2, account="b", tokens=500))
    assert lanes.take(room_tokens=ROOM) == "run-1"
    lanes.put_back("run-1")
    assert lanes.take(room_tokens=ROOM) == "run-1"
    lanes.finish("run-1", used_tokens=500)
    lanes.wait(claim(3, account="a", tokens=500))
    lanes.wait(claim(4, account="c", tokens=500))
    order = [lanes.take(room_tokens=ROOM) for _ in range(3)]
    assert order[0] == "run-2"
    had = lanes._lanes[Lane.FREE].account_tags
    assert had["a"] - 500 <= 500, "charged for two requests, not for three attempts"


def test_k4_background_goes_only_where_nobody_else_waits() -> None:
    lanes = FairLanes(DEFAULT_SHARES)
    lanes.wait(claim(1, Lane.BACKGROUND))
    lanes.wait(claim(2, Lane.FREE))
    lanes.wait(claim(3, Lane.TEAM))
    taken = [lanes.take(room_tokens=ROOM) for _ in range(4)]
    assert taken[2:] == ["run-1", None]


def test_a_newcomer_is_told_of_those_who_go_first_and_of_no_heavy_accounts_backlog() -> None:
    lanes = FairLanes(DEFAULT_SHARES)
    for number in range(10):
        lanes.wait(claim(number, account="heavy", tokens=1_000))
    lanes.wait(claim(10, account="light", tokens=50))
    queue = lanes.queue(Lane.FREE)
    assert (queue.requests, queue.tokens, queue.accounts) == (11, 10_050, 2)
    assert (queue.ahead_requests, queue.ahead_tokens) == (2, 1_050)


def test_each_of_as_many_accounts_as_meet_at_a_worker_is_told_that_it_waits_for_more_than_a_newcomer() -> (
    None
):
    lanes, teams = FairLanes(), [f"team-{number}" for number in range(28)]
    for account_id in teams:
        for number in range(2):
            run_id = f"{account_id}-{number}"
            lanes.wait(Claim(run_id=run_id, account_id=account_id, lane=Lane.TEAM, tokens=100))
    told = lanes.lines(Lane.TEAM, used_share=0.5)
    assert {line.account_id for line in told} == set(teams)
    assert all(line.ahead_tokens > 0 for line in told)


def test_k7_an_account_behind_anothers_flood_comes_into_sight_as_the_flood_is_served() -> None:
    shares = {**DEFAULT_SHARES, Lane.FREE: LaneLimits(look_ahead_requests=4)}
    lanes = FairLanes(shares)
    for number in range(20):
        lanes.wait(claim(number, account="flood"))
    lanes.wait(claim(99, account="light"))
    order: list[str] = []
    while (taken := lanes.take(room_tokens=ROOM)) is not None:
        order.append(taken)
    place = defaultdict(int, {run: at for at, run in enumerate(order)})["run-99"]
    assert place == 17, "as soon as it is among the first four that wait"


def test_k1_who_is_next_and_does_not_fit_is_waited_for_and_not_slipped_by() -> None:
    lanes = FairLanes(DEFAULT_SHARES)
    lanes.wait(claim(1, account="a", tokens=900))
    lanes.wait(claim(2, account="b", tokens=10))
    assert lanes.take(room_tokens=899) is None
    assert lanes.take(room_tokens=900) == "run-1"
    lanes.put_back("run-1")
    assert lanes.take(room_tokens=899) is None
    assert lanes.take(room_tokens=900) == "run-1"
    assert lanes.take(room_tokens=10) == "run-2"
