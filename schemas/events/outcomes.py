"""chat.outcomes: the whole answer of each concluded run, keyed by chat."""

from __future__ import annotations

from schemas.events import Event
from schemas.vocabulary import FinishReason, Tier


class RunConcluded(Event, frozen=True, kw_only=True):
    """The accepted text and counts of a run that had been queued, up to its terminal at `end_offset`."""

    run_id: str
    account_id: str
    chat_id: str
    user_message_id: str
    assistant_message_id: str
    tier: Tier
    model: str
    text: str
    input_tokens: int
    output_tokens: int
    finish_reason: FinishReason
    attempts: int
    end_offset: int


OutcomeEvent = RunConcluded
