"""Tokens of one account: in which window they count, what a prompt may take of them, and what its measured use gives back.

Rules (cited by assertions and tests):
  N1  A prompt counts in the window, a UTC day or month, of its append time on the broker's clock. Its settlement counts there too.
  N2  headroom = limit - settled - reserved. A prompt needs its own exact tokens and one token of answer, else it is refused.
  N3  The answer is wished for as long as asked and allowed, or the percentage that the ladder leaves of it. What is left beside it is for
      earlier turns, up to the tier's input maximum but never below what the prompt itself needs.
  N4  Where that leaves less than the wished answer, the grant is cut to it, and the quota is named as the reason.
  N5  Settled never exceeds reserved, for input and output apart. The rest is released to the same window.
  N6  A window is forgotten when it is over by a day and nothing in it is reserved.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final, Literal

from schemas.events.account_snapshots import WindowUse
from schemas.events.accounts import TierLimits

WindowKind = Literal["day", "month"]

# The broker's stamps may step back by a second when a partition's leader moves; a day is far more.
KEPT_AFTER_END_MS: Final = 24 * 3_600_000
DAY_MS: Final = 24 * 3_600_000
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A span of the broker's clock in which tokens are limited. `ends_ms` is its first millisecond after."""

    name: str
    ends_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGrant:
    """What a prompt gets, in tokens. `quota_limited`: the quota made the answer shorter than wished."""

    input_budget: int
    output: int
    quota_limited: bool

    @property
    def total(self) -> int:
        """What is reserved for it."""
        return self.input_budget + self.output


def window_at(kind: WindowKind, appended_ms: int) -> Window:
    """N1. The window that the broker's stamp `appended_ms` lies in."""
    return _window_of_day(kind, appended_ms // DAY_MS)


@lru_cache(maxsize=64)
def _window_of_day(kind: WindowKind, days: int) -> Window:
    day = EPOCH + timedelta(days=days)
    if kind == "day":
        return Window(name=f"{day:%Y-%m-%d}", ends_ms=_ms(day + timedelta(days=1)))
    first = day.replace(day=1)
    return Window(name=f"{first:%Y-%m}", ends_ms=_ms((first + timedelta(days=32)).replace(day=1)))


def _ms(at: datetime) -> int:
    return int(at.timestamp()) * 1000


def headroom(windows: tuple[WindowUse, ...], window: str, limit: int) -> int:
    """N2. Tokens that may still be reserved in `window`; negative where the limit was lowered below what is in use."""
    use = _use(windows, window)
    return limit - use.settled - use.reserved


def grant(
    limits: TierLimits,
    *,
    needed: int,
    asked_output: int | None,
    headroom_tokens: int,
    output_percent: int = 100,
) -> TokenGrant | None:
    """N2 to N4. What a prompt of `needed` tokens gets, or None where the quota is exhausted.

    `needed` lies within the tier's input maximum: who asks has refused a longer prompt already.
    """
    assert 0 <= needed <= limits.input_tokens_max, "a prompt beyond the input maximum is refused"
    if headroom_tokens < needed + 1:
        return None
    wanted = limits.output_tokens_max
    if asked_output is not None:
        wanted = max(1, min(asked_output, wanted))
    wanted = max(1, wanted * output_percent // 100)
    budget = min(limits.input_tokens_max, max(needed, headroom_tokens - wanted))
    output = min(wanted, headroom_tokens - budget)
    assert output >= 1, "N2 leaves one token of answer"
    assert needed <= budget, "N3"
    return TokenGrant(input_budget=budget, output=output, quota_limited=output < wanted)


def reserved(
    windows: tuple[WindowUse, ...], window: str, tokens: int, *, appended_ms: int
) -> tuple[WindowUse, ...]:
    """The windows after `tokens` were set aside in `window` at `appended_ms`; N6 forgets old ones."""
    use = _use(windows, window)
    after = WindowUse(window=window, settled=use.settled, reserved=use.reserved + tokens)
    return _forget_old(_replaced(windows, after), appended_ms)


def settled(
    windows: tuple[WindowUse, ...], window: str, *, reserved_tokens: int, used_tokens: int
) -> tuple[WindowUse, ...]:
    """N5. The windows after a run's reservation was settled by what it used."""
    assert 0 <= used_tokens <= reserved_tokens, "N5: settled never exceeds reserved"
    use = _use(windows, window)
    assert use.reserved >= reserved_tokens, "what is settled was reserved in its window"
    return _replaced(
        windows,
        WindowUse(
            window=window,
            settled=use.settled + used_tokens,
            reserved=use.reserved - reserved_tokens,
        ),
    )


def _use(windows: tuple[WindowUse, ...], window: str) -> WindowUse:
    for use in windows:
        if use.window == window:
            return use
    return WindowUse(window=window, settled=0, reserved=0)


def _replaced(windows: tuple[WindowUse, ...], use: WindowUse) -> tuple[WindowUse, ...]:
    others = [other for other in windows if other.window != use.window]
    return tuple(sorted([*others, use], key=lambda each: each.window))


def _forget_old(windows: tuple[WindowUse, ...], appended_ms: int) -> tuple[WindowUse, ...]:
    earlier_ms = appended_ms - KEPT_AFTER_END_MS
    kinds: tuple[WindowKind, ...] = ("day", "month")
    kept = {window_at(kind, at).name for kind in kinds for at in (appended_ms, earlier_ms)}
    return tuple(use for use in windows if use.reserved > 0 or use.window in kept)
