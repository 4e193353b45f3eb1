"""Whether the lane has room for one more request: the last thing that a prompt is judged by (rule Q13 of `admission.py`).

  Q13 The ladder leaves optional work out and the prompt is a flex one, or it sheds (rule L5); the lane is full, or the wait is beyond
      the tier's maximum, by the edge's view of load: refused, overloaded. A flex prompt's lane is the background one, so it waits for
      everybody, and nobody for it.

The view travels with the prompt, since nothing but the account's own log may decide.
"""

from __future__ import annotations

from typing import Final

from processors.decisions.ladder import Step, keeps_floor
from schemas.events.accounts import LaneWait, LimitsChanged, PromptSubmitted
from schemas.events.tokens import Refusal
from schemas.vocabulary import RefusalReason, ServiceTier, lane_of

RETRY_OVERLOADED_MS_MIN: Final = 1_000
RETRY_OVERLOADED_MS_MAX: Final = 60_000


def ahead_of(prompt: PromptSubmitted, model: str) -> LaneWait:
    """The queue that its request for this model would join, as the edge saw it."""
    lane = lane_of(prompt.tier, prompt.service_tier)
    for wait in prompt.load.waits:
        if wait.model == model and wait.lane == lane.value:
            return wait
    return LaneWait(model=model, lane=lane.value, wait_ms=0)


def no_room(
    prompt: PromptSubmitted, ahead: LaneWait, limits: LimitsChanged, step: Step
) -> Refusal | None:
    """Q13. Why the request may not join this queue at this step of the ladder; None: it may."""
    lane = lane_of(prompt.tier, prompt.service_tier)
    bounds = limits.lanes.get(lane)
    limit = ""
    if prompt.service_tier is ServiceTier.FLEX and not step.optional_work:
        limit = "optional_work"
    elif step.shed and not keeps_floor(limits, lane, ahead.wait_ms):
        limit = "ladder"
    elif bounds is not None and _reached(ahead.queued_requests, bounds.queued_requests_max):
        limit = "queued_requests_max"
    elif bounds is not None and _reached(ahead.queued_tokens, bounds.queued_tokens_max):
        limit = "queued_tokens_max"
    elif ahead.wait_ms > limits.tiers[prompt.tier].queue_wait_ms_max:
        limit = "queue_wait_ms_max"
    if not limit:
        return None
    retry_ms = max(RETRY_OVERLOADED_MS_MIN, min(ahead.wait_ms, RETRY_OVERLOADED_MS_MAX))
    return Refusal(
        reason=RefusalReason.OVERLOADED,
        retry_after_ms=retry_ms,
        wait_ms=ahead.wait_ms,
        limit=limit,
    )


def _reached(queued: int, most: int | None) -> bool:
    return most is not None and queued >= most
