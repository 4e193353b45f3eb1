"""What an account is told of its quota and its rates: read from the rows that admission saves, never decided here.

W1  Per account the row with the highest applied offset counts, in whatever order rows arrive.
W2  The window is the one that the broker's clock is in; a row that knows only older windows has used nothing of it.
W3  Of the rate and the quota, both of them in tokens, the headers name the one that leaves less. Requests are limited by the rate, or,
    where the tier has none, by what may be open at once: then a place is free when one ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from edge.decisions.refusals import rfc3339
from schemas.events.account_snapshots import AccountSnapshot, OpenReservation, RateBucket
from schemas.events.accounts import TierLimits
from schemas.rates import burst, filled, full_in_ms, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """One pair of limit headers: how much at most, what is left, and when all of it is there again."""

    limit: int
    remaining: int
    reset_ms: int

    def headers(self, kind: str) -> dict[str, str]:
        """`x-ratelimit-…-{kind}`; the reset in whole seconds, not too early."""
        return {
            f"x-ratelimit-limit-{kind}": str(self.limit),
            f"x-ratelimit-remaining-{kind}": str(self.remaining),
            f"x-ratelimit-reset-{kind}": f"{max(0, -(-self.reset_ms // 1000))}s",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaView:
    """Tokens and runs of one account, now. `requests` and `tokens` are its rates; None: it has none."""

    limit: int
    settled: int
    reserved: int
    window_ends_ms: int
    open_runs: int
    open_runs_max: int
    requests: Allowance | None = None
    tokens: Allowance | None = None

    @property
    def remaining(self) -> int:
        """Tokens that may still be reserved."""
        return max(0, self.limit - self.settled - self.reserved)

    def body(self) -> dict[str, object]:
        """The answer of GET /v1/quota."""
        return {
            "limit": self.limit,
            "settled": self.settled,
            "reserved": self.reserved,
            "remaining": self.remaining,
            "window_ends_at": rfc3339(self.window_ends_ms),
            "open_runs": self.open_runs,
            "open_runs_max": self.open_runs_max,
        }

    def headers(self, now_ms: int) -> Mapping[str, str]:
        """`x-ratelimit-…` of creation routes (W3)."""
        free = max(0, self.open_runs_max - self.open_runs)
        places = Allowance(limit=self.open_runs_max, remaining=free, reset_ms=0 if free else 1_000)
        quota = Allowance(
            limit=self.limit, remaining=self.remaining, reset_ms=self.window_ends_ms - now_ms
        )
        tokens = quota
        if self.tokens is not None and self.tokens.remaining <= quota.remaining:
            tokens = self.tokens
        return (self.requests or places).headers("requests") | tokens.headers("tokens")


def quota_view(row: AccountSnapshot | None, limits: TierLimits, *, now_ms: int) -> QuotaView:
    """The view of an account with this newest row (None: it has never been used)."""
    name, ends_ms = _window(limits.window, now_ms)
    used = next((use for use in row.windows if use.window == name), None) if row else None
    return QuotaView(
        limit=limits.tokens_per_window,
        settled=used.settled if used else 0,
        reserved=used.reserved if used else 0,
        window_ends_ms=ends_ms,
        open_runs=_at_once(row.open) if row else 0,
        open_runs_max=limits.open_runs_max,
        requests=_allowance(
            row.requests if row else None, limits.requests_per_minute, limits.requests_burst, now_ms
        ),
        tokens=_allowance(
            row.tokens if row else None, limits.tokens_per_minute, limits.tokens_burst, now_ms
        ),
    )


def _at_once(open_runs: tuple[OpenReservation, ...]) -> int:
    """Runs that take a place: those that wait for another one take none."""
    live = {run.run_id for run in open_runs if not run.ended}
    return sum(1 for run in open_runs if not run.ended and run.after_run_id not in live)


def _allowance(
    bucket: RateBucket | None, per_minute: int | None, of_burst: int | None, now_ms: int
) -> Allowance | None:
    if per_minute is None:
        return None
    most = burst(per_minute, of_burst)
    now = filled(bucket, per_minute=per_minute, most=most, appended_ms=now_ms)
    return Allowance(
        limit=most,
        remaining=whole(now),
        reset_ms=full_in_ms(now, per_minute=per_minute, most=most),
    )


def _window(kind: str, now_ms: int) -> tuple[str, int]:
    at = datetime.fromtimestamp(now_ms / 1000, UTC)
    day = at.replace(hour=0, minute=0, second=0, microsecond=0)
    if kind == "day":
        return f"{day:%Y-%m-%d}", int((day + timedelta(days=1)).timestamp()) * 1000
    first = day.replace(day=1)
    following = (first + timedelta(days=32)).replace(day=1)
    return f"{first:%Y-%m}", int(following.timestamp()) * 1000
