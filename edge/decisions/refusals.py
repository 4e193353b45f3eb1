"""Admission's refusal as an HTTP answer: the status, and what a client needs to know to come back.

F1  Waiting helps: 429 or 503 with Retry-After, whole seconds, never less than the wait.
F2  Waiting does not help (the quota of a window, a key with another body): `x-should-retry: false`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, assert_never

from edge.decisions.problems import INVALID, LIMITED, NEVER_RETRY, SERVER, Problem
from schemas.events.tokens import Refusal
from schemas.vocabulary import RefusalReason

RETRY_AFTER_S_DEFAULT: Final = 1
FLOOD: Final = "flood"
"""The limit that a request beyond the edge's own bound is told (rules E1 to E7): no field of the policy, it follows from several."""

RATE_MESSAGES: Final = {
    "requests_per_minute": "Too many requests in this minute.",
    "tokens_per_minute": "Too many tokens in this minute.",
    FLOOD: "Far more requests than this account may send.",
}
RUNS_MESSAGES: Final = {
    "enqueued_runs_max": "Too many messages wait in this chat.",
    "seat_open_runs_max": "Too many answers are under way for this seat.",
}
QUOTA_MESSAGES: Final = {
    "seat_tokens_per_window": "The token quota of this seat does not cover this message.",
    "seats_max": "As many seats as the account may have are in use in this window.",
}


def rfc3339(ms: int) -> str:
    """Milliseconds of the epoch as a time in UTC."""
    return (
        datetime.fromtimestamp(ms / 1000, UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


def refusal_problem(refusal: Refusal) -> Problem:
    """The answer to a prompt that admission refused. `limit` in the error names the field of the policy that did."""
    retry_ms = refusal.retry_after_ms if refusal.retry_after_ms is not None else refusal.wait_ms
    retry_after_s = max(RETRY_AFTER_S_DEFAULT, -(-(retry_ms or 0) // 1000))
    come_back = {"retry-after": str(retry_after_s), "retry-after-ms": str(retry_after_s * 1000)}
    code = refusal.reason.value
    named = {"limit": refusal.limit} if refusal.limit else {}
    match refusal.reason:
        case RefusalReason.RUN_IN_PROGRESS:
            return Problem(
                status=409,
                type=INVALID,
                code=code,
                message="An answer is under way in this chat; wait for its end or cancel it.",
                headers=NEVER_RETRY,
            )
        case RefusalReason.RATE_LIMITED:
            return Problem(
                status=429,
                type=LIMITED,
                code=code,
                message=RATE_MESSAGES.get(refusal.limit, "Too many requests."),
                headers=come_back | _spent(refusal.limit, retry_after_s),
                extra=named,
            )
        case RefusalReason.TOO_MANY_RUNS:
            return Problem(
                status=429,
                type=LIMITED,
                code=code,
                message=RUNS_MESSAGES.get(
                    refusal.limit, "Too many answers are under way for this account."
                ),
                headers=come_back,
                extra=named,
            )
        case RefusalReason.QUOTA_EXHAUSTED:
            ends = refusal.window_ends_ms
            return Problem(
                status=429,
                type=LIMITED,
                code=code,
                message=QUOTA_MESSAGES.get(
                    refusal.limit, "The token quota of this window does not cover this message."
                ),
                headers=NEVER_RETRY,
                extra={"window_ends_at": rfc3339(ends) if ends is not None else None, **named},
            )
        case RefusalReason.OVERLOADED:
            return Problem(
                status=503,
                type=SERVER,
                code=code,
                message="All workers are busy; come back after the wait.",
                headers=come_back,
                extra={"wait_ms": refusal.wait_ms or 0, **named},
            )
        case RefusalReason.CONTENT_BLOCKED:
            return Problem(
                status=400,
                type=INVALID,
                code=code,
                message="The message was not accepted by the content check.",
                param="content",
                headers=NEVER_RETRY,
            )
        case RefusalReason.MODEL_NOT_ALLOWED:
            return Problem(
                status=422,
                type=INVALID,
                code=code,
                message="This account may not use that model.",
                param="model",
                headers=NEVER_RETRY,
            )
        case RefusalReason.CONTEXT_TOO_LONG:
            return CONTEXT_TOO_LONG
        case _:
            assert_never(refusal.reason)


def _spent(limit: str, retry_after_s: int) -> dict[str, str]:
    """What admission knows of a rate is newer than what this edge was told: nothing is left of it until then."""
    kind = "requests" if limit == FLOOD else limit.removesuffix("_per_minute")
    if kind not in ("requests", "tokens"):
        return {}
    return {f"x-ratelimit-remaining-{kind}": "0", f"x-ratelimit-reset-{kind}": f"{retry_after_s}s"}


CONTEXT_TOO_LONG = Problem(
    status=422,
    type=INVALID,
    code=RefusalReason.CONTEXT_TOO_LONG.value,
    message="The message is longer than this account's input limit or the model's context window.",
    param="content",
    headers=NEVER_RETRY,
)


IDEMPOTENCY_CONFLICT = Problem(
    status=422,
    type=INVALID,
    code="idempotency_conflict",
    message="This Idempotency-Key was used with another request.",
    param="Idempotency-Key",
    headers=NEVER_RETRY,
)
