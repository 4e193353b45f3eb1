"""What an account is told of its quota: read from the rows that admission saves, never decided here.

W1  Per account the row with the highest applied offset counts, in whatever order rows arrive.
W2  The window is the one that the broker's clock is in; a row that knows only older windows has used nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from edge.decisions.refusals import rfc3339
from schemas.events.account_snapshots import AccountSnapshot
from schemas.events.accounts import TierLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaView:
    """Tokens and runs of one account, now."""

    limit: int
    settled: int
    reserved: int
    window_ends_ms: int
    open_runs: int
    open_runs_max: int

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
        """`x-ratelimit-…` of creation routes. Requests are limited by what may be open at once, so a place is free when one ends."""
        until_s = max(0, -(-(self.window_ends_ms - now_ms) // 1000))
        free = max(0, self.open_runs_max - self.open_runs)
        return {
            "x-ratelimit-limit-requests": str(self.open_runs_max),
            "x-ratelimit-remaining-requests": str(free),
            "x-ratelimit-reset-requests": "0s" if free else "1s",
            "x-ratelimit-limit-tokens": str(self.limit),
            "x-ratelimit-remaining-tokens": str(self.remaining),
            "x-ratelimit-reset-tokens": f"{until_s}s",
        }


def quota_view(row: AccountSnapshot | None, limits: TierLimits, *, now_ms: int) -> QuotaView:
    """The view of an account with this newest row (None: it has never been used)."""
    name, ends_ms = _window(limits.window, now_ms)
    used = next((use for use in row.windows if use.window == name), None) if row else None
    return QuotaView(
        limit=limits.tokens_per_window,
        settled=used.settled if used else 0,
        reserved=used.reserved if used else 0,
        window_ends_ms=ends_ms,
        open_runs=sum(1 for run in row.open if not run.ended) if row else 0,
        open_runs_max=limits.open_runs_max,
    )


def _window(kind: str, now_ms: int) -> tuple[str, int]:
    at = datetime.fromtimestamp(now_ms / 1000, UTC)
    day = at.replace(hour=0, minute=0, second=0, microsecond=0)
    if kind == "day":
        return f"{day:%Y-%m-%d}", int((day + timedelta(days=1)).timestamp()) * 1000
    first = day.replace(day=1)
    following = (first + timedelta(days=32)).replace(day=1)
    return f"{first:%Y-%m}", int(following.timestamp()) * 1000
