"""Every refusal of admission, from the prompt that earns it to the HTTP answer: status, headers and body as the contract says.

The account fold decides and the edge answers; what lies between is the log. So a pure case is the whole way but for the wire.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from edge.decisions.problems import Problem
from edge.decisions.quota_view import quota_view
from edge.decisions.refusals import FLOOD, refusal_problem
from processors.decisions.account import judge
from processors.decisions.account_state import AccountState, snapshot
from processors.decisions.known_ids import Facts
from schemas.events.accounts import (
    Ladder,
    LadderLevel,
    LaneLimits,
    LaneWait,
    LimitsChanged,
    LoadView,
    PromptSubmitted,
)
from schemas.events.tokens import Refusal, RunEnded
from schemas.vocabulary import Lane, OnBusy, RefusalReason, Tier
from tests.decisions.account_samples import ACCOUNT, MODEL, NOON_MS, command, limits, listed, prompt

ROOMY = {"tokens_per_window": 1_000_000, "open_runs_max": 50}


def waiting(wait_ms: int = 4_200, requests: int = 0, tokens: int = 0) -> LoadView:
    return LoadView(
        waits=(
            LaneWait(
                model=MODEL,
                lane="free",
                wait_ms=wait_ms,
                queued_requests=requests,
                queued_tokens=tokens,
            ),
        )
    )


def bounded() -> LimitsChanged:
    lanes = {Lane.FREE: LaneLimits(queued_requests_max=5, queued_tokens_max=50)}
    return msgspec.structs.replace(limits(**ROOMY), lanes=lanes)


def shedding() -> LimitsChanged:
    level = LadderLevel(enter_ms=10, leave_ms=5, shed_free=True)
    return msgspec.structs.replace(limits(**ROOMY), ladder=Ladder(levels=(level,)))


def refused(limits_: LimitsChanged, *prompts: PromptSubmitted, level: int = 0) -> Problem:
    """The answer to the last of the prompts; those before it are admitted."""
    state = AccountState(account_id=ACCOUNT)
    for offset, event in enumerate(prompts):
        state, outputs = judge(state, command(event, offset=offset), Facts(), limits_, level)
        ended = [output for output in outputs if isinstance(output, RunEnded)]
        assert bool(ended) is (offset == len(prompts) - 1), (offset, outputs)
        if ended:
            assert ended[0].refusal is not None
            view = quota_view(snapshot(state), limits_.tiers[Tier.FREE], now_ms=NOON_MS)
            problem = refusal_problem(ended[0].refusal)
            return as_answered(problem, {**view.headers(NOON_MS), **problem.headers})
    raise AssertionError("the last one is refused")


def as_answered(problem: Problem, headers: dict[str, str]) -> Problem:
    """The problem as the route answers it: with the account's limits beside its own headers."""
    return Problem(
        status=problem.status,
        type=problem.type,
        code=problem.code,
        message=problem.message,
        param=problem.param,
        headers=headers,
        extra=problem.extra,
    )


def second(**changes: object) -> tuple[PromptSubmitted, PromptSubmitted]:
    return prompt("r1", chat="c", seat_id="a"), prompt("r2", **changes)  # type: ignore[arg-type]


CASES: dict[str, tuple[Callable[[], Problem], int, str, str | None, str | None]] = {
    "run_in_progress": (
        lambda: refused(limits(**ROOMY), *second(chat="c")),
        409,
        "run_in_progress",
        None,
        None,
    ),
    "enqueued": (
        lambda: refused(
            limits(enqueued_runs_max=0, **ROOMY), *second(chat="c", on_busy=OnBusy.ENQUEUE)
        ),
        429,
        "too_many_runs",
        "enqueued_runs_max",
        "2",
    ),
    "requests": (
        lambda: refused(limits(requests_per_minute=20, requests_burst=1, **ROOMY), *second()),
        429,
        "rate_limited",
        "requests_per_minute",
        "3",
    ),
    "tokens": (
        lambda: refused(limits(tokens_per_minute=400, **ROOMY), *second()),
        429,
        "rate_limited",
        "tokens_per_minute",
        "2",
    ),
    "open runs": (
        lambda: refused(limits(tokens_per_window=10**6, open_runs_max=1), *second()),
        429,
        "too_many_runs",
        "open_runs_max",
        "2",
    ),
    "a seat's open runs": (
        lambda: refused(limits(seat_open_runs_max=1, **ROOMY), *second(seat_id="a")),
        429,
        "too_many_runs",
        "seat_open_runs_max",
        "2",
    ),
    "seats": (
        lambda: refused(limits(seats_max=1, **ROOMY), *second(seat_id="b")),
        429,
        "quota_exhausted",
        "seats_max",
        None,
    ),
    "quota": (
        lambda: refused(limits(tokens_per_window=10), prompt("r")),
        429,
        "quota_exhausted",
        "tokens_per_window",
        None,
    ),
    "a seat's quota": (
        lambda: refused(limits(seat_tokens_per_window=400, **ROOMY), *second(seat_id="a")),
        429,
        "quota_exhausted",
        "seat_tokens_per_window",
        None,
    ),
    "the wait": (
        lambda: refused(limits(**ROOMY), prompt("r", load=waiting(5_001))),
        503,
        "overloaded",
        "queue_wait_ms_max",
        "6",
    ),
    "the lane's requests": (
        lambda: refused(bounded(), prompt("r", load=waiting(requests=5))),
        503,
        "overloaded",
        "queued_requests_max",
        "5",
    ),
    "the lane's tokens": (
        lambda: refused(bounded(), prompt("r", load=waiting(tokens=50))),
        503,
        "overloaded",
        "queued_tokens_max",
        "5",
    ),
    "the ladder": (
        lambda: refused(shedding(), prompt("r", load=waiting()), level=1),
        503,
        "overloaded",
        "ladder",
        "5",
    ),
    "the model": (
        lambda: refused(limits(**ROOMY), prompt("r", model="other")),
        422,
        "model_not_allowed",
        None,
        None,
    ),
    "the text": (
        lambda: refused(listed("bad word"), prompt("r", content="No BAD words. A bad\nWord.")),
        400,
        "content_blocked",
        None,
        None,
    ),
    "the length": (
        lambda: refused(limits(**ROOMY), prompt("r", needed=301)),
        422,
        "context_too_long",
        None,
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_refusal_has_its_status_code_limit_and_time_to_come_back(case: str) -> None:
    answer, status, code, limit, retry_after = CASES[case]
    problem = answer()
    error = problem.body()["error"]
    assert isinstance(error, dict)
    assert {"message", "type", "param", "code"} <= set(error)
    assert (problem.status, error["code"], error.get("limit")) == (status, code, limit)
    assert problem.headers.get("retry-after") == retry_after
    if retry_after is None:
        assert problem.headers["x-should-retry"] == "false"
    else:
        assert problem.headers["retry-after-ms"] == f"{int(retry_after) * 1_000}"
        assert "x-should-retry" not in problem.headers
    for kind in ("requests", "tokens"):
        for name in ("limit", "remaining", "reset"):
            assert f"x-ratelimit-{name}-{kind}" in problem.headers
    if code == "quota_exhausted":
        assert str(error["window_ends_at"]).endswith("T00:00:00.000Z")
    if code == "overloaded":
        assert error["wait_ms"] >= 4_200


def test_every_reason_that_admission_gives_has_a_case() -> None:
    assert {code for _, _, code, _, _ in CASES.values()} == {
        reason.value for reason in RefusalReason
    }


@pytest.mark.parametrize(
    ("wait_ms", "retry_after"), [(0, "1"), (400, "1"), (59_001, "60"), (3_600_000, "60")]
)
def test_the_wait_is_told_as_it_was_estimated_whatever_the_time_to_come_back(
    wait_ms: int, retry_after: str
) -> None:
    problem = refused(bounded(), prompt("r", load=waiting(wait_ms, requests=5)))
    assert (problem.extra["wait_ms"], problem.headers["retry-after"]) == (wait_ms, retry_after)


@pytest.mark.parametrize(("case", "kind"), [("requests", "requests"), ("tokens", "tokens")])
def test_a_spent_rate_shows_nothing_left_until_the_time_to_come_back(case: str, kind: str) -> None:
    problem = CASES[case][0]()
    assert problem.headers[f"x-ratelimit-remaining-{kind}"] == "0"
    assert problem.headers[f"x-ratelimit-reset-{kind}"] == f"{problem.headers['retry-after']}s"


def test_who_floods_is_told_when_to_come_back_as_where_the_rate_of_requests_is_spent() -> None:
    problem = refusal_problem(
        Refusal(reason=RefusalReason.RATE_LIMITED, retry_after_ms=92, limit=FLOOD)
    )
    assert (problem.status, problem.code, problem.extra) == (429, "rate_limited", {"limit": FLOOD})
    assert problem.headers == {
        "retry-after": "1",
        "retry-after-ms": "1000",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1s",
    }


def test_the_headers_tell_the_rates_and_of_rate_and_quota_the_one_that_leaves_less() -> None:
    state = AccountState(account_id=ACCOUNT)
    rated = limits(requests_per_minute=60, tokens_per_minute=6_000, tokens_per_window=5_000)
    before = quota_view(None, rated.tiers[Tier.FREE], now_ms=NOON_MS).headers(NOON_MS)
    assert (before["x-ratelimit-limit-requests"], before["x-ratelimit-remaining-requests"]) == (
        "60",
        "60",
    )
    assert before["x-ratelimit-limit-tokens"] == "5000", "the quota leaves less"
    state, _ = judge(state, command(prompt("r1")), Facts(), rated)
    roomy = limits(requests_per_minute=60, tokens_per_minute=6_000, tokens_per_window=10**6)
    after = quota_view(snapshot(state), roomy.tiers[Tier.FREE], now_ms=NOON_MS).headers(NOON_MS)
    assert after["x-ratelimit-remaining-requests"] == "59"
    assert after["x-ratelimit-reset-requests"] == "1s"
    assert (after["x-ratelimit-limit-tokens"], after["x-ratelimit-remaining-tokens"]) == (
        "6000",
        "5600",
    )
    assert after["x-ratelimit-reset-tokens"] == "4s"
    later = quota_view(snapshot(state), roomy.tiers[Tier.FREE], now_ms=NOON_MS + 4_000)
    assert later.headers(NOON_MS + 4_000)["x-ratelimit-remaining-tokens"] == "6000"


def test_a_run_that_waits_for_another_takes_no_place() -> None:
    state = AccountState(account_id=ACCOUNT)
    events = (prompt("r1", chat="c"), prompt("r2", chat="c", on_busy=OnBusy.ENQUEUE))
    for offset, event in enumerate(events):
        state, _ = judge(state, command(event, offset=offset), Facts(), limits(**ROOMY))
    view = quota_view(snapshot(state), limits(**ROOMY).tiers[Tier.FREE], now_ms=NOON_MS)
    assert view.open_runs == 1
