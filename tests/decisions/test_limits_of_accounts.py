"""Rates, seats, lanes and the ladder in the judgement of a prompt, and limits that are lowered below what is open."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from processors.decisions.account import judge, lower
from processors.decisions.account_state import (
    AccountOutput,
    AccountState,
    held_tokens,
    may_generate,
    restored,
    snapshot,
)
from processors.decisions.known_ids import Facts
from processors.decisions.quota import headroom
from schemas.events.accounts import (
    Ladder,
    LadderLevel,
    LaneLimits,
    LaneWait,
    LimitsChanged,
    LoadView,
    ModelPolicy,
)
from schemas.events.admissions import PromptAdmitted, PromptRefused
from schemas.events.quotas import QuotaReserved
from schemas.events.tokens import Refusal, RunCancelled, RunEnded, RunQueued
from schemas.vocabulary import CancelReason, Lane, OnBusy, RefusalReason, ServiceTier, Tier
from tests.decisions.account_samples import (
    ACCOUNT,
    DAY_MS,
    MODEL,
    NOON_MS,
    command,
    limits,
    prompt,
    usage,
)

WIDE = {"tokens_per_window": 1_000_000, "open_runs_max": 100}


class Account:
    """An account, its limits, and the level of the ladder."""

    def __init__(self, limits_: LimitsChanged, level: int = 0) -> None:
        self.state = AccountState(account_id=ACCOUNT)
        self.limits = limits_
        self.level = level
        self.offset = -1

    def say(self, run: str, *, at_ms: int = 0, **changes: object) -> list[AccountOutput]:
        self.offset += 1
        at = command(prompt(run, **changes), offset=self.offset, appended_ms=NOON_MS + at_ms)  # type: ignore[arg-type]
        self.state, outputs = judge(self.state, at, Facts(), self.limits, self.level)
        assert restored(snapshot(self.state)) == self.state
        return outputs

    def measure(self, run: str, *, at_ms: int = 0) -> None:
        self.offset += 1
        at = command(usage(run), offset=self.offset, appended_ms=NOON_MS + at_ms)
        self.state, _ = judge(self.state, at, Facts(), self.limits)

    def lower(self, **changes: object) -> list[str]:
        self.offset += 1
        self.limits = limits("lower", **changes)
        self.state, cancels = lower(self.state, self.limits, offset=self.offset)
        assert all(cancel.reason is CancelReason.LIMITS for cancel in cancels)
        return [cancel.run_id for cancel in cancels]


def refusal(outputs: list[AccountOutput]) -> Refusal:
    match outputs:
        case [PromptRefused(reason=reason, limit=limit), RunEnded(refusal=Refusal() as found)]:
            assert (reason, limit) == (found.reason, found.limit)
            return found
        case _:
            raise AssertionError(outputs)


def queued(outputs: list[AccountOutput]) -> RunQueued:
    return next(output for output in outputs if isinstance(output, RunQueued))


# Rates


def test_more_requests_than_the_rate_are_refused_with_the_time_at_which_the_next_one_passes() -> (
    None
):
    account = Account(limits(requests_per_minute=60, requests_burst=2, **WIDE))
    queued(account.say("r1"))
    queued(account.say("r2"))
    found = refusal(account.say("r3", at_ms=200))
    assert (found.reason, found.limit) == (RefusalReason.RATE_LIMITED, "requests_per_minute")
    assert found.retry_after_ms == 800
    queued(account.say("r4", at_ms=1_000))


def test_a_refusal_takes_nothing_from_a_rate() -> None:
    account = Account(limits(requests_per_minute=60, requests_burst=1, **WIDE))
    for run in ("r1", "r2", "r3"):
        account.say(run, model="large")
    queued(account.say("r4"))


def test_tokens_are_taken_from_the_rate_as_reserved_and_given_back_as_measured() -> None:
    account = Account(limits(tokens_per_minute=400, tokens_burst=400, **WIDE))
    queued(account.say("r1"))  # 300 of input budget and 100 of answer.
    found = refusal(account.say("r2"))
    assert (found.reason, found.limit) == (RefusalReason.RATE_LIMITED, "tokens_per_minute")
    assert found.retry_after_ms == 1_650  # 11 tokens at 400 a minute.
    account.measure("r1")  # 15 used, so 385 come back.
    queued(account.say("r3"))
    assert account.state.tokens is not None
    assert account.state.tokens.level == (385 - 400) * 60_000


def test_the_chat_that_is_busy_is_named_before_the_rate_and_the_rate_before_the_open_runs() -> None:
    account = Account(
        limits(requests_per_minute=1, requests_burst=1, tokens_per_window=10**6, open_runs_max=1)
    )
    account.say("r1", chat="c")
    assert refusal(account.say("r2", chat="c")).reason is RefusalReason.RUN_IN_PROGRESS
    assert refusal(account.say("r3")).reason is RefusalReason.RATE_LIMITED
    assert refusal(account.say("r4", at_ms=60_000)).reason is RefusalReason.TOO_MANY_RUNS


# Seats


def team(**changes: object) -> LimitsChanged:
    return limits(**(WIDE | changes))


def test_a_seat_may_run_no_more_at_once_than_its_cap_while_others_may() -> None:
    account = Account(team(seat_open_runs_max=1))
    queued(account.say("r1", seat_id="a"))
    found = refusal(account.say("r2", seat_id="a"))
    assert (found.reason, found.limit) == (RefusalReason.TOO_MANY_RUNS, "seat_open_runs_max")
    queued(account.say("r3", seat_id="b"))
    queued(account.say("r4", seat_id="a", ended_runs=("r1",)))


def test_who_has_no_seat_shares_the_nameless_one() -> None:
    account = Account(team(seat_open_runs_max=1))
    queued(account.say("r1"))
    assert refusal(account.say("r2")).limit == "seat_open_runs_max"


def test_a_seat_is_granted_what_its_cap_leaves_and_refused_when_it_leaves_nothing() -> None:
    account = Account(team(seat_tokens_per_window=420))
    queued(account.say("r1", seat_id="a"))
    cut = queued(account.say("r2", seat_id="a"))
    assert (cut.input_budget_tokens, cut.granted_output_tokens) == (10, 10)
    assert cut.quota_limited
    found = refusal(account.say("r3", seat_id="a"))
    assert (found.reason, found.limit) == (
        RefusalReason.QUOTA_EXHAUSTED,
        "seat_tokens_per_window",
    )
    assert found.window_ends_ms == NOON_MS + DAY_MS // 2
    queued(account.say("r4", seat_id="b"))
    account.measure("r1")
    assert queued(account.say("r5", seat_id="a")).granted_output_tokens == 100


def test_the_account_names_itself_where_it_leaves_less_than_the_seat() -> None:
    account = Account(limits(tokens_per_window=405, seat_tokens_per_window=405))
    account.say("r1", seat_id="a")
    assert refusal(account.say("r2", seat_id="b")).limit == "tokens_per_window"


def test_no_more_seats_than_allowed_use_one_window_and_a_new_window_begins_anew() -> None:
    account = Account(team(seats_max=2))
    queued(account.say("r1", seat_id="a"))
    queued(account.say("r2", seat_id="b"))
    found = refusal(account.say("r3", seat_id="c"))
    assert (found.reason, found.limit) == (RefusalReason.QUOTA_EXHAUSTED, "seats_max")
    queued(account.say("r4", seat_id="a"))
    queued(account.say("r5", seat_id="c", at_ms=DAY_MS))
    account.measure("r1", at_ms=DAY_MS)
    assert [use.seat for use in account.state.seats.uses] == ["c"]


def test_a_stamp_that_steps_back_over_midnight_counts_for_no_seat_and_settles_for_none() -> None:
    account = Account(team(seats_max=9))
    midnight = DAY_MS // 2
    queued(account.say("r1", seat_id="a", at_ms=midnight))
    queued(account.say("r2", seat_id="b", at_ms=midnight - 500))
    assert [use.seat for use in account.state.seats.uses] == ["a"]
    account.measure("r2", at_ms=midnight)
    account.measure("r1", at_ms=midnight)
    (use,) = account.state.seats.uses
    assert (use.settled, use.reserved) == (15, 0)


# Lanes and the ladder


def loaded(**ahead: int) -> LoadView:
    return LoadView(waits=(LaneWait(model=MODEL, lane="free", **({"wait_ms": 7} | ahead)),))


@pytest.mark.parametrize(
    ("ahead", "limit"),
    [
        ({"queued_requests": 9, "queued_tokens": 99}, None),
        ({"queued_requests": 10}, "queued_requests_max"),
        ({"queued_tokens": 100}, "queued_tokens_max"),
        ({"wait_ms": 5_001}, "queue_wait_ms_max"),
    ],
)
def test_a_lane_that_is_full_refuses_with_the_wait(
    ahead: dict[str, int], limit: str | None
) -> None:
    bounded = msgspec.structs.replace(
        limits(), lanes={Lane.FREE: LaneLimits(queued_requests_max=10, queued_tokens_max=100)}
    )
    outputs = Account(bounded).say("r", load=loaded(**ahead))
    if limit is None:
        queued(outputs)
    else:
        found = refusal(outputs)
        assert (found.reason, found.limit) == (RefusalReason.OVERLOADED, limit)
        assert found.wait_ms == ahead.get("wait_ms", 7)
        assert found.retry_after_ms is not None
        assert found.retry_after_ms >= 1_000


LADDER = Ladder(
    levels=(
        LadderLevel(enter_ms=10, leave_ms=5, output_percent_free=25, output_percent_paid=50),
        LadderLevel(
            enter_ms=20,
            leave_ms=15,
            output_percent_free=1,
            downgrade_free=True,
            downgrade_paid=True,
            optional_work=False,
            shed_free=True,
        ),
    )
)
LADDERED = msgspec.structs.replace(
    limits(models=("large", MODEL)),
    models={
        "large": ModelPolicy(context_tokens=900, smaller=MODEL),
        MODEL: ModelPolicy(context_tokens=900),
    },
    ladder=LADDER,
)
BOTH = {MODEL: 10, "large": 12}


@pytest.mark.parametrize(("tier", "granted"), [(Tier.FREE, 25), (Tier.PLUS, 50), (Tier.TEAM, 50)])
def test_a_level_shortens_the_answer_and_says_so_in_every_event(tier: Tier, granted: int) -> None:
    outputs = Account(LADDERED, level=1).say("r", tier=tier, prompt_tokens=BOTH)
    reserved, run, admitted = outputs
    assert isinstance(reserved, QuotaReserved)
    assert isinstance(run, RunQueued)
    assert isinstance(admitted, PromptAdmitted)
    assert (run.model, run.granted_output_tokens) == ("large", granted)
    assert not run.quota_limited
    assert {reserved.ladder_level, run.ladder_level, admitted.ladder_level} == {1}
    assert {run.output_percent, admitted.output_percent} == {granted}
    assert admitted.optional_work


def test_a_level_shortens_what_was_asked_and_leaves_a_token_at_least() -> None:
    account = Account(LADDERED, level=1)
    assert (
        queued(account.say("r", max_output_tokens=8, prompt_tokens=BOTH)).granted_output_tokens == 2
    )
    assert (
        queued(account.say("s", max_output_tokens=1, prompt_tokens=BOTH)).granted_output_tokens == 1
    )


def test_a_level_puts_the_smaller_model_in_the_place_of_the_asked_one_and_counts_its_tokens() -> (
    None
):
    outputs = Account(LADDERED, level=2).say(
        "r", tier=Tier.PLUS, model="large", prompt_tokens={MODEL: 300, "large": 1}
    )
    run, admitted = outputs[1:]
    assert isinstance(run, RunQueued)
    assert isinstance(admitted, PromptAdmitted)
    assert (run.model, run.downgraded_from, run.input_budget_tokens) == (MODEL, "large", 300)
    assert not admitted.optional_work


@pytest.mark.parametrize("counts", [{"large": 12}, {"large": 12, MODEL: 301}])
def test_a_model_keeps_its_place_where_the_smaller_one_was_not_counted_or_is_too_small(
    counts: dict[str, int],
) -> None:
    run = queued(Account(LADDERED, level=2).say("r", tier=Tier.PLUS, prompt_tokens=counts))
    assert (run.model, run.downgraded_from) == ("large", None)


@pytest.mark.parametrize(("small_ms", "model"), [(9, MODEL), (10, MODEL), (11, "large")])
def test_a_model_keeps_its_place_where_the_wait_for_the_smaller_one_is_longer(
    small_ms: int, model: str
) -> None:
    waits = tuple(
        LaneWait(model=name, lane=Lane.PLUS.value, wait_ms=wait_ms)
        for name, wait_ms in ((MODEL, small_ms), ("large", 10))
    )
    run = queued(
        Account(LADDERED, level=2).say(
            "r", tier=Tier.PLUS, prompt_tokens=BOTH, load=LoadView(waits=waits)
        )
    )
    assert run.model == model


def test_a_level_sheds_the_free_tier_while_those_who_pay_are_served() -> None:
    account = Account(LADDERED, level=2)
    found = refusal(account.say("r", prompt_tokens=BOTH))
    assert (found.reason, found.limit, found.ladder_level) == (
        RefusalReason.OVERLOADED,
        "ladder",
        2,
    )
    queued(account.say("s", tier=Tier.PLUS, prompt_tokens=BOTH))


@pytest.mark.parametrize(
    ("wait_ms", "floor", "sheds"), [(9, 12, False), (10, 12, True), (9, 0, True)]
)
def test_a_lane_keeps_its_floor_busy_while_it_is_shed(
    wait_ms: int, floor: int, *, sheds: bool
) -> None:
    lanes = {Lane.FREE: LaneLimits(floor_percent=floor)}
    account = Account(msgspec.structs.replace(LADDERED, lanes=lanes), level=2)
    outputs = account.say("r", prompt_tokens={MODEL: 10}, load=loaded(wait_ms=wait_ms))
    if sheds:
        assert refusal(outputs).limit == "ladder"
    else:
        queued(outputs)


def test_who_names_no_model_gets_the_first_of_the_tier_that_was_counted() -> None:
    assert queued(Account(LADDERED).say("r", prompt_tokens=BOTH)).model == "large"
    assert queued(Account(LADDERED).say("r", prompt_tokens={MODEL: 5})).model == MODEL


# Flex prompts

FLEX = ServiceTier.FLEX


def behind(**background: int) -> LoadView:
    """Nobody waits in the lanes of the tiers; in the background lane these do."""
    return LoadView(
        waits=(
            LaneWait(model=MODEL, lane="free", wait_ms=0),
            LaneWait(model=MODEL, lane="background", **({"wait_ms": 0} | background)),
        )
    )


@pytest.mark.parametrize("tier", list(Tier))
def test_a_flex_prompt_of_any_tier_goes_into_the_background_lane_and_is_told_its_wait(
    tier: Tier,
) -> None:
    outputs = Account(limits()).say("r", tier=tier, service_tier=FLEX, load=behind(wait_ms=4_000))
    _, run, admitted = outputs
    assert isinstance(run, RunQueued)
    assert isinstance(admitted, PromptAdmitted)
    assert {run.lane, admitted.lane} == {Lane.BACKGROUND}
    assert (run.wait_ms, run.deadline_ms) == (4_000, 60_000)


def test_a_level_without_optional_work_refuses_flex_prompts_and_no_others() -> None:
    level = LadderLevel(enter_ms=10, leave_ms=5, optional_work=False)
    account = Account(msgspec.structs.replace(limits(), ladder=Ladder(levels=(level,))), level=1)
    found = refusal(account.say("r1", service_tier=FLEX, load=behind(wait_ms=3_000)))
    assert (found.reason, found.limit, found.ladder_level) == (
        RefusalReason.OVERLOADED,
        "optional_work",
        1,
    )
    assert (found.wait_ms, found.retry_after_ms) == (3_000, 3_000), "that of its own lane"
    assert queued(account.say("r2", load=behind(wait_ms=3_000))).lane is Lane.FREE


def test_a_flex_prompt_is_named_as_optional_also_where_its_tier_is_shed() -> None:
    account = Account(LADDERED, level=2)
    assert refusal(account.say("r", service_tier=FLEX)).limit == "optional_work"
    assert (
        refusal(account.say("s", service_tier=FLEX, tier=Tier.PLUS, prompt_tokens=BOTH)).limit
        == "optional_work"
    )


@pytest.mark.parametrize(
    ("background", "limit"),
    [
        ({"wait_ms": 5_001}, "queue_wait_ms_max"),
        ({"queued_requests": 3}, "queued_requests_max"),
        ({"queued_tokens": 900}, "queued_tokens_max"),
    ],
)
def test_a_flex_prompt_is_refused_by_the_bounds_of_its_lane_while_others_of_the_account_go_on(
    background: dict[str, int], limit: str
) -> None:
    lanes = {Lane.BACKGROUND: LaneLimits(queued_requests_max=3, queued_tokens_max=900)}
    account = Account(msgspec.structs.replace(limits(), lanes=lanes))
    found = refusal(account.say("r1", service_tier=FLEX, load=behind(**background)))
    assert (found.reason, found.limit) == (RefusalReason.OVERLOADED, limit)
    queued(account.say("r2", load=behind(**background)))


# Limits that are lowered


def three_runs(**changes: object) -> Account:
    account = Account(limits(**(WIDE | changes)))
    for run in ("r1", "r2", "r3"):
        queued(account.say(run, seat_id="a" if run != "r2" else "b"))
    return account


def test_lowered_tokens_cancel_the_newest_runs_until_what_is_left_fits() -> None:
    account = three_runs()
    assert account.lower(**(WIDE | {"tokens_per_window": 800})) == ["r3"]
    assert [run.ended for run in account.state.open] == [False, False, True]
    assert account.state.windows[0].reserved == 1_200, "until it is measured"


def test_a_run_that_has_ended_counts_with_its_whole_reservation() -> None:
    account = three_runs()
    account.say("x", model="none", ended_runs=("r1",))
    assert account.lower(**(WIDE | {"tokens_per_window": 800})) == ["r3"]


def test_lowered_runs_at_once_cancel_the_newest_and_leave_what_fits() -> None:
    assert three_runs().lower(**(WIDE | {"open_runs_max": 2})) == ["r3"]
    assert three_runs().lower(**(WIDE | {"open_runs_max": 1})) == ["r3", "r2"]


def test_runs_that_wait_for_others_are_no_reason_to_cancel() -> None:
    account = Account(limits(**WIDE))
    account.say("r1", chat="c")
    account.say("r2", chat="c", on_busy=OnBusy.ENQUEUE)
    assert account.lower(**(WIDE | {"open_runs_max": 1})) == []


def test_a_seats_lowered_caps_cancel_its_own_runs_alone() -> None:
    assert three_runs().lower(**(WIDE | {"seat_open_runs_max": 1})) == ["r3"]
    account = three_runs(seat_tokens_per_window=10_000)
    assert account.lower(**(WIDE | {"seat_tokens_per_window": 400})) == ["r3"]


def test_limits_that_everything_fits_cancel_nothing_and_leave_the_account_as_it_was() -> None:
    account = three_runs()
    before = account.state
    assert account.lower(**WIDE) == []
    assert account.state == before


def test_limits_below_the_applied_offset_were_held_against_the_account_before() -> None:
    account = three_runs()
    after, cancels = lower(account.state, limits(open_runs_max=1), offset=account.offset)
    assert (after, cancels) == (account.state, [])


@given(
    data=st.data(),
    runs=st.integers(1, 8),
    tokens=st.integers(1, 4_000),
    at_once=st.integers(1, 8),
    seat_tokens=st.none() | st.integers(1, 2_000),
    seat_at_once=st.none() | st.integers(1, 4),
)
def test_whatever_is_lowered_what_is_left_fits_or_nothing_is_left(
    *,
    data: st.DataObject,
    runs: int,
    tokens: int,
    at_once: int,
    seat_tokens: int | None,
    seat_at_once: int | None,
) -> None:
    account = Account(limits(seat_tokens_per_window=10**6, **WIDE))
    for number in range(runs):
        account.say(
            f"r{number}",
            chat=data.draw(st.sampled_from(("c1", "c2", "c3"))),
            seat_id=data.draw(st.sampled_from((None, "a", "b"))),
            on_busy=data.draw(st.sampled_from((OnBusy.ENQUEUE, OnBusy.INTERRUPT))),
            ended_runs=data.draw(st.sampled_from(((), ("r0",), ("r1",)))),
        )
    cancelled = account.lower(
        tokens_per_window=tokens,
        open_runs_max=at_once,
        seat_tokens_per_window=seat_tokens,
        seat_open_runs_max=seat_at_once,
    )
    state = account.state
    given_back = sum(held_tokens(run) for run in state.open if run.run_id in cancelled)
    live = [run for run in state.open if not run.ended]
    if live:
        assert headroom(state.windows, live[0].window, tokens) + given_back >= 0
        assert may_generate(live) <= at_once
    order = [run.run_id for run in state.open]
    assert cancelled == sorted(cancelled, key=order.index, reverse=True), "newest first"
    again, more = lower(state, account.limits, offset=account.offset + 1)
    assert {cancel.run_id for cancel in more} <= {run.run_id for run in live}
    assert isinstance(again, AccountState)
    assert all(isinstance(cancel, RunCancelled) for cancel in more)
