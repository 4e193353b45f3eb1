"""chat.admissions: what admission decided about each prompt, keyed by chat. Carries the user's message."""

from __future__ import annotations

from schemas.events import Event
from schemas.events.accounts import Sampling
from schemas.vocabulary import Lane, RefusalReason, Tier


class PromptAdmitted(Event, frozen=True, kw_only=True):
    """The prompt will be answered: on this model and lane, within this input budget and grant (tokens).

    `deadline_ms` is counted from the append time of the run's RunQueued. `after_run_id`: it waits for the end of that run of its chat,
    whose answer is `after_message_id`, and for those of all others that were open in the chat then: `behind_message_ids` are their answers,
    oldest first. `ladder_level` is the pressure at which it was decided, `output_percent` what that left of the
    answer which would have been granted; without `optional_work` a flex prompt would have been refused.
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
    after_run_id: str | None = None
    after_message_id: str | None = None
    behind_message_ids: tuple[str, ...] = ()
    ladder_level: int = 0
    downgraded_from: str | None = None
    output_percent: int = 100
    optional_work: bool = True


class PromptRefused(Event, frozen=True, kw_only=True):
    """The prompt was refused, by the policy field `limit`. It binds nothing: neither an idempotency key nor a message."""

    run_id: str
    account_id: str
    chat_id: str
    user_message_id: str
    assistant_message_id: str
    reason: RefusalReason
    limit: str = ""
    ladder_level: int = 0


AdmissionEvent = PromptAdmitted | PromptRefused
