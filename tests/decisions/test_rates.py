"""Token buckets: what flows in, what passes, and who is told to wait how long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schemas.events.account_snapshots import RateBucket
from schemas.rates import SCALE, filled, given_back, taken, wait_ms

RATES = st.integers(1, 1_000_000)
BURSTS = st.integers(1, 1_000_000)
GAPS = st.lists(st.integers(-1_000, 100_000), max_size=20)


def test_a_bucket_begins_full_and_passes_its_burst_at_once_and_no_more() -> None:
    bucket = filled(None, per_minute=60, most=3, appended_ms=0)
    for _ in range(3):
        assert wait_ms(bucket, per_minute=60, most=3, amount=1) == 0
        bucket = taken(bucket, 1)
    assert wait_ms(bucket, per_minute=60, most=3, amount=1) == 1_000


@given(rate=RATES, burst=BURSTS, gaps=GAPS, amount=st.integers(1, 2_000_000))
def test_never_does_more_pass_than_the_burst_and_the_flow(
    rate: int, burst: int, gaps: list[int], amount: int
) -> None:
    now = newest = 0
    passed = 0
    bucket = None
    for gap in gaps:
        now = max(0, now + gap)
        newest = max(newest, now)
        bucket = filled(bucket, per_minute=rate, most=burst, appended_ms=now)
        if wait_ms(bucket, per_minute=rate, most=burst, amount=amount) == 0:
            bucket = taken(bucket, amount)
            passed += amount
    # V2: the last one may leave the bucket in debt by what it took.
    assert (passed - amount) * SCALE <= burst * SCALE + rate * newest


@given(rate=RATES, burst=BURSTS, spent=st.integers(0, 2_000_000), amount=st.integers(1, 1_000_000))
def test_who_waits_as_long_as_told_passes_and_one_millisecond_before_does_not(
    rate: int, burst: int, spent: int, amount: int
) -> None:
    bucket = taken(filled(None, per_minute=rate, most=burst, appended_ms=0), spent)
    wait = wait_ms(bucket, per_minute=rate, most=burst, amount=amount)

    def waits_at(ms: int) -> bool:
        later = filled(bucket, per_minute=rate, most=burst, appended_ms=ms)
        return wait_ms(later, per_minute=rate, most=burst, amount=amount) > 0

    assert not waits_at(wait)
    assert wait == 0 or waits_at(wait - 1)


def test_a_stamp_that_steps_back_adds_nothing_and_takes_nothing() -> None:
    bucket = taken(filled(None, per_minute=60, most=2, appended_ms=5_000), 2)
    back = filled(bucket, per_minute=60, most=2, appended_ms=4_000)
    assert back == bucket
    assert filled(back, per_minute=60, most=2, appended_ms=6_000).level == SCALE


def test_what_was_not_used_flows_back_but_never_above_the_burst() -> None:
    bucket = taken(filled(None, per_minute=60, most=100, appended_ms=0), 80)
    back = given_back(bucket, 90)
    assert filled(back, per_minute=60, most=100, appended_ms=0).level == 100 * SCALE
    assert given_back(None, 5) is None


def test_a_lowered_burst_holds_at_the_next_filling() -> None:
    bucket = filled(RateBucket(level=100 * SCALE, at_ms=0), per_minute=1, most=10, appended_ms=0)
    assert bucket.level == 10 * SCALE
