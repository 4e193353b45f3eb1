"""chat.usage: exactly one settlement per admitted run, keyed by account. What billing reads."""

from __future__ import annotations

from schemas.events import Event
from schemas.vocabulary import FinishReason, Tier


class UsageSettled(Event, frozen=True, kw_only=True):
    """The bill of one run: integers, counted from the token log, booked to the window of its reservation."""

    run_id: str
    account_id: str
    chat_id: str
    tier: Tier
    model: str
    window: str
    input_tokens: int
    output_tokens: int
    finish_reason: FinishReason


UsageEvent = UsageSettled
