"""The closed sets of words that events, HTTP and stores share. Values are wire values: never change one."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Tier(StrEnum):
    """What an account pays for; it fixes limits and the lane."""

    FREE = "free"
    PLUS = "plus"
    TEAM = "team"


PAID_TIERS: Final = frozenset({Tier.PLUS, Tier.TEAM})
"""Under pressure the others feel each step before these."""


class Lane(StrEnum):
    """The queue of a generation request. Admission fixes it; nobody chooses again."""

    TEAM = "team"
    PLUS = "plus"
    FREE = "free"
    BACKGROUND = "background"


LANE_OF_TIER: Final = {Tier.TEAM: Lane.TEAM, Tier.PLUS: Lane.PLUS, Tier.FREE: Lane.FREE}


class ServiceTier(StrEnum):
    """How soon an answer is wanted, as the client says. A flex one can wait for all others: nothing that anybody waits for needs it."""

    DEFAULT = "default"
    FLEX = "flex"


def lane_of(tier: Tier, service_tier: ServiceTier) -> Lane:
    """Where a prompt's request queues."""
    return Lane.BACKGROUND if service_tier is ServiceTier.FLEX else LANE_OF_TIER[tier]


class Role(StrEnum):
    """Who speaks in a message. A typed field: no text can forge it (requirement F2)."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


class FinishReason(StrEnum):
    """Why an admitted run ended, as clients see it."""

    STOP = "stop"
    LENGTH = "length"
    QUOTA_REACHED = "quota_reached"
    CANCELLED = "cancelled"
    BLOCKED = "blocked"
    REPETITION = "repetition"
    DEADLINE = "deadline"
    ERROR = "error"


class EndCause(StrEnum):
    """What a RunEnded record says. Who may write each one is part of the run fold's rules."""

    STOP = "stop"
    LENGTH = "length"
    QUOTA_REACHED = "quota_reached"
    BLOCKED = "blocked"
    REPETITION = "repetition"
    ERROR = "error"
    DEADLINE = "deadline"
    REFUSED = "refused"


class EndWriter(StrEnum):
    """Which process wrote a RunEnded record; each is accepted under a rule of its own."""

    WORKER = "worker"
    RECORDER = "recorder"
    CONTEXT = "context"
    ADMISSION = "admission"


class CancelReason(StrEnum):
    """Why a RunCancelled record was written."""

    USER = "user"
    DISCONNECT = "disconnect"
    INTERRUPT = "interrupt"
    GAVE_UP = "gave_up"
    LIMITS = "limits"


class RunStatus(StrEnum):
    """Where a run stands, as clients see it."""

    QUEUED = "queued"
    STREAMING = "streaming"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"
    BLOCKED = "blocked"
    REFUSED = "refused"


class RefusalReason(StrEnum):
    """Why admission refused a prompt. The value is the error code that clients read."""

    RUN_IN_PROGRESS = "run_in_progress"
    RATE_LIMITED = "rate_limited"
    TOO_MANY_RUNS = "too_many_runs"
    QUOTA_EXHAUSTED = "quota_exhausted"
    OVERLOADED = "overloaded"
    CONTENT_BLOCKED = "content_blocked"
    MODEL_NOT_ALLOWED = "model_not_allowed"
    CONTEXT_TOO_LONG = "context_too_long"


class OnBusy(StrEnum):
    """What a second message does while a run of the chat is open (requirement A6)."""

    REJECT = "reject"
    ENQUEUE = "enqueue"
    INTERRUPT = "interrupt"


STATUS_OF_FINISH: Final[dict[FinishReason, RunStatus]] = {
    FinishReason.STOP: RunStatus.DONE,
    FinishReason.LENGTH: RunStatus.DONE,
    FinishReason.QUOTA_REACHED: RunStatus.DONE,
    FinishReason.REPETITION: RunStatus.DONE,
    FinishReason.CANCELLED: RunStatus.CANCELLED,
    FinishReason.BLOCKED: RunStatus.BLOCKED,
    FinishReason.DEADLINE: RunStatus.FAILED,
    FinishReason.ERROR: RunStatus.FAILED,
}

assert set(STATUS_OF_FINISH) == set(FinishReason), "every finish reason has a status"
