"""chat.accounts: the one ordered input of every admission decision, keyed by account.

Whatever a decision depends on is in this log: the edge puts its soft view of load and the token counts into the prompt, because
a decider that looked anywhere else would decide differently on replay.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from schemas.events import Event, Part
from schemas.vocabulary import FinishReason, OnBusy, Tier


class LaneWait(Part, frozen=True, kw_only=True):
    """An edge's estimate for one queue: `wait_ms` until a request sent now would start."""

    model: str
    lane: str
    wait_ms: int


class LoadView(Part, frozen=True, kw_only=True):
    """The edge's soft view when it took the prompt. `pressure` 0 (calm) to 4 (shed)."""

    pressure: int = 0
    waits: tuple[LaneWait, ...] = ()


class Sampling(Part, frozen=True, kw_only=True):
    """How the engine picks tokens. None means the model's default."""

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None


class PromptSubmitted(Event, frozen=True, kw_only=True):
    """A person sent a message; the run that would answer it has its id. Not yet admitted.

    `prompt_tokens` maps each candidate model to the exact tokens of this message in its template, `chat_tokens_max` is what the
    edge knows of the chat before it (0: unknown). `ended_runs` are runs of the account that the edge has seen end: a set, never
    a counter. `parent_id` is None for a chat's first message.
    """

    run_id: str
    account_id: str
    tier: Tier
    seat_id: str | None = None
    chat_id: str
    user_message_id: str
    assistant_message_id: str
    parent_id: str | None
    content: str
    model: str | None = None
    max_output_tokens: int | None = None
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    on_busy: OnBusy = OnBusy.REJECT
    idempotency_key: str | None = None
    fingerprint: str = ""
    prompt_tokens: dict[str, int] = msgspec.field(default_factory=dict)
    load: LoadView = LoadView()
    ended_runs: tuple[str, ...] = ()


class UsageMeasured(Event, frozen=True, kw_only=True):
    """The recorder's count of a concluded run: what the token log holds up to its accepted terminal."""

    run_id: str
    account_id: str
    input_tokens: int
    output_tokens: int
    finish_reason: FinishReason


class TierLimits(Part, frozen=True, kw_only=True):
    """What one tier may use. Token limits count input and output together, per window of the broker's clock (UTC)."""

    tokens_per_window: int
    window: Literal["day", "month"]
    open_runs_max: int
    models: tuple[str, ...]
    input_tokens_max: int
    output_tokens_max: int
    run_deadline_ms: int
    queue_wait_ms_max: int


class LimitsChanged(Event, frozen=True, kw_only=True):
    """The policy from here on. A tier-wide change is written to every partition of the topic.

    `version` names the content (a hash), so writing the same policy again is a no-op.
    """

    version: str
    tiers: dict[Tier, TierLimits]
    changed_by: str


AccountEvent = PromptSubmitted | UsageMeasured | LimitsChanged
