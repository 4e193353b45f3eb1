"""chat.admissions: what admission decided about each prompt, keyed by chat. Carries the user's message."""

from __future__ import annotations

from schemas.events import Event
from schemas.events.accounts import Sampling
from schemas.vocabulary import Lane, RefusalReason, Tier


class PromptAdmitted(Event, frozen=True, kw_only=True):
    """The prompt will be answered: on this model and lane, within this input budget and grant (tokens).

    `deadline_ms` is counted from the append time of the run's RunQueued.
    """

    run_id: str
    account_id: str
    chat_id: str
    tier: Tier
    lane: Lane
    model: str
    user_message_id: str
    assistant_message_id: str
    parent_id: str | None
    content: str
    input_budget_tokens: int
    granted_output_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    deadline_ms: int
    quota_limited: bool = False


class PromptRefused(Event, frozen=True, kw_only=True):
    """The prompt was refused. It binds nothing: neither an idempotency key nor a message."""

    run_id: str
    account_id: str
    chat_id: str
    user_message_id: str
    assistant_message_id: str
    reason: RefusalReason


AdmissionEvent = PromptAdmitted | PromptRefused
