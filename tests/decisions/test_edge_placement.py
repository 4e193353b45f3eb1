"""Where a run goes (P1 to P3), what admission is told of the load, and what an account is told of its quota."""

from __future__ import annotations

import pytest

from edge.decisions.load_view import WorkerSeen, fleet_of
from edge.decisions.placement import choose_partition
from edge.decisions.quota_view import quota_view
from edge.decisions.refusals import refusal_problem
from schemas.events.account_snapshots import AccountSnapshot, OpenReservation, WindowUse
from schemas.events.accounts import TierLimits
from schemas.events.tokens import Refusal
from schemas.events.workers import WorkerLoadReported
from schemas.ids import partition_for_key
from schemas.lane_shares import DEFAULT_SHARES
from schemas.vocabulary import Lane, RefusalReason

CHAT = "chat_x"
HOME = partition_for_key(CHAT, 12)
NOON = 1_767_268_800_000  # 2026-01-01T12:00:00Z


def worker(name: str, partitions: tuple[int, ...], *, busy: int = 0, queued: int = 0) -> WorkerSeen:
    report = WorkerLoadReported(
        worker_id=name,
        model="m",
        epoch=1,
        slots=4,
        busy=busy,
        queued_requests=queued,
        queued_tokens=queued * 1_000,
        prefill_tokens_per_s=1000,
        decode_tokens_per_s=100,
        partitions=partitions,
    )
    return WorkerSeen(report=report, appended_ms=NOON)


def chosen(*workers: WorkerSeen, draws: tuple[int, int] = (0, 1)) -> int:
    return choose_partition(
        CHAT,
        partitions=12,
        models=["m"],
        lane=Lane.FREE,
        fleet=fleet_of(workers, [], now_ms=NOON),
        shares=DEFAULT_SHARES,
        draws=draws,
    )


def test_a_chat_goes_to_its_own_partition_while_its_worker_has_room() -> None:
    everything = tuple(range(12))
    assert chosen(worker("a", everything)) == HOME
    assert chosen(worker("a", everything, busy=4)) == HOME


def test_without_any_live_worker_the_hash_decides() -> None:
    assert chosen() == HOME


def test_an_overloaded_owner_is_avoided_for_the_less_loaded_of_two_others() -> None:
    others = [p for p in range(12) if p != HOME]
    slow = worker("a", (HOME,), busy=4, queued=50)
    middle = worker("b", tuple(others[:5]), busy=4, queued=1)
    idle = worker("c", tuple(others[5:]))
    assert chosen(slow, middle, idle, draws=(0, 7)) == others[7]
    assert chosen(slow, middle, idle, draws=(7, 0)) == others[7]


def test_an_unowned_home_is_left_for_a_partition_that_somebody_serves() -> None:
    others = tuple(p for p in range(12) if p != HOME)
    assert chosen(worker("a", others)) in others


def test_nothing_is_gained_by_leaving_where_all_are_overloaded() -> None:
    others = tuple(p for p in range(12) if p != HOME)
    slow = worker("a", (HOME,), busy=4, queued=50)
    slower = worker("b", others, busy=4, queued=90)
    assert chosen(slow, slower) == HOME


LIMITS = TierLimits(
    tokens_per_window=1000,
    window="day",
    open_runs_max=3,
    models=("m",),
    input_tokens_max=100,
    output_tokens_max=100,
    run_deadline_ms=1000,
    queue_wait_ms_max=1000,
)


def test_the_quota_is_that_of_the_window_of_now() -> None:
    row = AccountSnapshot(
        account_id="a",
        applied_offset=3,
        windows=(
            WindowUse(window="2025-12-31", settled=900, reserved=0),
            WindowUse(window="2026-01-01", settled=100, reserved=50),
        ),
        open=tuple(
            OpenReservation(
                run_id=f"run_{i}",
                chat_id="c",
                window="2026-01-01",
                model="m",
                tier="plus",
                input_tokens=1,
                output_tokens=1,
                ended=i == 0,
            )
            for i in range(2)
        ),
    )
    view = quota_view(row, LIMITS, now_ms=NOON)
    assert view.body() == {
        "limit": 1000,
        "settled": 100,
        "reserved": 50,
        "remaining": 850,
        "window_ends_at": "2026-01-02T00:00:00.000Z",
        "open_runs": 1,
        "open_runs_max": 3,
    }
    headers = view.headers(NOON)
    assert headers["x-ratelimit-remaining-tokens"] == "850"
    assert headers["x-ratelimit-reset-tokens"] == "43200s"
    assert headers["x-ratelimit-remaining-requests"] == "2"
    assert quota_view(row, LIMITS, now_ms=NOON + 86_400_000).settled == 0
    assert quota_view(None, LIMITS, now_ms=NOON).remaining == 1000


@pytest.mark.parametrize(
    ("refusal", "status", "retry_after", "should_retry"),
    [
        (Refusal(reason=RefusalReason.RUN_IN_PROGRESS), 409, None, "false"),
        (Refusal(reason=RefusalReason.RATE_LIMITED, retry_after_ms=1500), 429, "2", None),
        (Refusal(reason=RefusalReason.TOO_MANY_RUNS, retry_after_ms=2000), 429, "2", None),
        (Refusal(reason=RefusalReason.QUOTA_EXHAUSTED, window_ends_ms=NOON), 429, None, "false"),
        (Refusal(reason=RefusalReason.OVERLOADED, wait_ms=4200), 503, "5", None),
        (Refusal(reason=RefusalReason.CONTENT_BLOCKED), 400, None, "false"),
        (Refusal(reason=RefusalReason.MODEL_NOT_ALLOWED), 422, None, "false"),
        (Refusal(reason=RefusalReason.CONTEXT_TOO_LONG), 422, None, "false"),
    ],
)
def test_each_refusal_has_its_status_and_says_how_to_come_back(
    refusal: Refusal, status: int, retry_after: str | None, should_retry: str | None
) -> None:
    problem = refusal_problem(refusal)
    assert problem.status == status
    assert problem.code == refusal.reason.value
    assert problem.headers.get("retry-after") == retry_after
    assert problem.headers.get("x-should-retry") == should_retry


def test_a_quota_refusal_names_the_windows_end_and_an_overload_its_wait() -> None:
    quota = refusal_problem(Refusal(reason=RefusalReason.QUOTA_EXHAUSTED, window_ends_ms=NOON))
    assert quota.extra["window_ends_at"] == "2026-01-01T12:00:00.000Z"
    overload = refusal_problem(Refusal(reason=RefusalReason.OVERLOADED, wait_ms=4200))
    assert overload.extra["wait_ms"] == 4200
