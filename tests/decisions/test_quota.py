"""Tokens: windows, grants and settlements."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processors.decisions.quota import grant, headroom, reserved, settled, window_at
from schemas.events.account_snapshots import WindowUse
from tests.decisions.account_samples import DAY_MS, NOON_MS, TIER


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


@pytest.mark.parametrize(
    ("at", "day", "month", "month_ends"),
    [
        ("2026-01-31T23:59:59.999", "2026-01-31", "2026-01", "2026-02-01"),
        ("2026-02-01T00:00:00", "2026-02-01", "2026-02", "2026-03-01"),
        ("2028-02-29T12:00:00", "2028-02-29", "2028-02", "2028-03-01"),
        ("2026-12-31T23:59:59", "2026-12-31", "2026-12", "2027-01-01"),
    ],
)
def test_windows_are_days_and_months_of_the_brokers_clock_in_utc(
    at: str, day: str, month: str, month_ends: str
) -> None:
    assert window_at("day", ms(at)).name == day
    assert window_at("month", ms(at)).name == month
    assert window_at("month", ms(at)).ends_ms == ms(month_ends)


@given(st.integers(0, 4_000_000_000_000))
def test_a_window_ends_after_the_moment_in_it_and_the_next_begins_there(at_ms: int) -> None:
    day, month = window_at("day", at_ms), window_at("month", at_ms)
    assert at_ms < day.ends_ms <= at_ms + DAY_MS
    assert day.ends_ms <= month.ends_ms
    assert window_at("day", day.ends_ms).name != day.name
    assert window_at("day", day.ends_ms - 1) == day
    assert window_at("month", month.ends_ms - 1) == month


@given(
    needed=st.integers(0, TIER.input_tokens_max),
    asked=st.none() | st.integers(-1, 500),
    left=st.integers(-50, 2_000),
)
def test_a_grant_fits_the_headroom_the_prompt_and_the_tier(
    needed: int, asked: int | None, left: int
) -> None:
    given_ = grant(TIER, needed=needed, asked_output=asked, headroom_tokens=left)
    if given_ is None:
        assert left <= needed
        return
    assert needed <= given_.input_budget <= TIER.input_tokens_max
    assert 1 <= given_.output <= TIER.output_tokens_max
    assert given_.total <= left
    wanted = TIER.output_tokens_max if asked is None else max(1, min(asked, 100))
    assert given_.quota_limited == (given_.output < wanted)
    # Earlier turns get what the answer leaves, and the answer is cut only when they get nothing.
    assert given_.output == wanted or given_.input_budget == needed


def test_what_is_reserved_and_settled_comes_off_the_headroom_of_its_window_only() -> None:
    windows = reserved((), "2026-05-01", 400, appended_ms=ms("2026-05-01"))
    assert headroom(windows, "2026-05-01", 1_000) == 600
    assert headroom(windows, "2026-05-02", 1_000) == 1_000
    windows = settled(windows, "2026-05-01", reserved_tokens=400, used_tokens=15)
    assert headroom(windows, "2026-05-01", 1_000) == 985


def test_a_window_is_kept_while_anything_is_reserved_in_it_and_for_a_day_after_it_is_over() -> None:
    today, month = window_at("day", NOON_MS).name, window_at("month", NOON_MS).name
    windows = reserved((), today, 400, appended_ms=NOON_MS)

    def later(given: tuple[WindowUse, ...], days: int) -> list[str]:
        at = NOON_MS + days * DAY_MS
        after = reserved(given, window_at("day", at).name, 1, appended_ms=at)
        return [use.window for use in after]

    assert today in later(windows, 40)
    over = settled(windows, today, reserved_tokens=400, used_tokens=1)
    assert today in later(over, 1)
    assert today not in later(over, 2)
    assert month not in [use.window for use in over]
