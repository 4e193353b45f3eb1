"""Token buckets on the broker's clock: how many requests, and how many tokens, an account may send a minute, and how many at once.

Rules (cited by assertions and tests):
  V1  A bucket begins full. It fills by its rate with the append times of the account's records, whole numbers only, up to its burst.
      A stamp that steps back adds nothing and takes nothing.
  V2  A prompt passes when the bucket holds what it needs, or all that it can hold. What is *taken* is what is reserved for it, which may
      be more: then the bucket is in debt, by no more than one reservation, and nothing passes until the flow has paid.
  V3  What a run did not use of its reservation flows back when it is measured.
  V4  Who is told to wait is told the first millisecond at which the same request would pass, if nothing else came.
"""

from __future__ import annotations

from typing import Final

from schemas.events.account_snapshots import RateBucket

SCALE: Final = 60_000
"""A bucket counts in 60,000ths, so that a flow of one a minute adds one each millisecond."""


def burst(per_minute: int, most: int | None) -> int:
    """What a bucket holds at most: a minute's flow, unless the limits say otherwise."""
    return most if most is not None else per_minute


def filled(
    bucket: RateBucket | None, *, per_minute: int, most: int, appended_ms: int
) -> RateBucket:
    """V1. The bucket at `appended_ms`; None: it was never used."""
    if bucket is None:
        return RateBucket(level=most * SCALE, at_ms=appended_ms)
    at_ms = max(bucket.at_ms, appended_ms)
    level = min(most * SCALE, bucket.level + per_minute * (at_ms - bucket.at_ms))
    return RateBucket(level=level, at_ms=at_ms)


def whole(bucket: RateBucket) -> int:
    """What the bucket holds, in whole units; 0 while it is in debt."""
    return max(0, bucket.level // SCALE)


def full_in_ms(bucket: RateBucket, *, per_minute: int, most: int) -> int:
    """How long until it is full, if nothing is taken."""
    return max(0, -(-(most * SCALE - bucket.level) // per_minute))


def wait_ms(bucket: RateBucket, *, per_minute: int, most: int, amount: int) -> int:
    """V2, V4. How long until `amount` would pass; 0: it passes now. The bucket is `filled` as of now."""
    missing = min(amount, most) * SCALE - bucket.level
    return max(0, -(-missing // per_minute))


def taken(bucket: RateBucket, amount: int) -> RateBucket:
    """V2. The bucket after `amount` were taken."""
    return RateBucket(level=bucket.level - amount * SCALE, at_ms=bucket.at_ms)


def given_back(bucket: RateBucket | None, amount: int) -> RateBucket | None:
    """V3. The next filling holds it to the burst again."""
    if bucket is None:
        return None
    return RateBucket(level=bucket.level + amount * SCALE, at_ms=bucket.at_ms)
