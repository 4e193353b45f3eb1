"""chat.accounts: the one ordered input of every admission decision, keyed by account.

Whatever a decision depends on is in this log: the edge puts its soft view of load and the token counts into the prompt, because
a decider that looked anywhere else would decide differently on replay.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from schemas.events import Event, Part
from schemas.vocabulary import FinishReason, Lane, OnBusy, ServiceTier, Tier


class LaneWait(Part, frozen=True, kw_only=True):
    """An edge's estimate for one queue: `wait_ms` until a request sent now would start, and what stands in it before that one."""

    model: str
    lane: str
    wait_ms: int
    queued_requests: int = 0
    queued_tokens: int = 0


class LoadView(Part, frozen=True, kw_only=True):
    """The edge's soft view when it took the prompt.

    `saturation_ms` is how long the workers need for everything that is queued now; None: an edge that does not say, then the longest
    wait stands for it. `pressure`, 0 (calm) to 4 (shed), counts only where the limits have no ladder.
    """

    pressure: int = 0
    waits: tuple[LaneWait, ...] = ()
    saturation_ms: int | None = None


class Sampling(Part, frozen=True, kw_only=True):
    """How the engine picks tokens. None means the model's default."""

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None


class PromptSubmitted(Event, frozen=True, kw_only=True):
    """A person sent a message; the run that would answer it has its id. Not yet admitted.

    `prompt_tokens` maps each candidate model to the exact tokens of this message in its template, `chat_tokens_max` is what the
    edge knows of the chat before it (0: unknown). `ended_runs` are runs of the account that the edge has seen end: a set, never
    a counter. `parent_id` is None for a chat's first message; `parent_given`: the client named it, so it stays also where the
    message waits behind another.
    """

    run_id: str
    account_id: str
    tier: Tier
    seat_id: str | None = None
    chat_id: str
    user_message_id: str
    assistant_message_id: str
    parent_id: str | None
    parent_given: bool = False
    content: str
    model: str | None = None
    max_output_tokens: int | None = None
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    on_busy: OnBusy = OnBusy.REJECT
    service_tier: ServiceTier = ServiceTier.DEFAULT
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
    """What one tier may use. Token limits count input and output together, per window of the broker's clock (UTC).

    The rates are token buckets: `…_per_minute` flows in, `…_burst` is the most that one holds. `enqueued_runs_max` may wait in one chat
    behind its open run. Seats share the account's limits; `seats_max` of them may use it in one window. None: no such limit.
    """

    tokens_per_window: int
    window: Literal["day", "month"]
    open_runs_max: int
    models: tuple[str, ...]
    input_tokens_max: int
    output_tokens_max: int
    run_deadline_ms: int
    queue_wait_ms_max: int
    enqueued_runs_max: int = 4
    requests_per_minute: int | None = None
    requests_burst: int | None = None
    tokens_per_minute: int | None = None
    tokens_burst: int | None = None
    seats_max: int | None = None
    seat_open_runs_max: int | None = None
    seat_tokens_per_window: int | None = None


class LaneLimits(Part, frozen=True, kw_only=True):
    """One queue's share of a worker, and its bounds.

    `weight` divides what is left when each lane had its `floor_percent`. The bounds hold for one model's queue over all workers; None:
    none. A worker looks at the first `look_ahead_requests` of the queue when it chooses among accounts.
    """

    weight: int = 1
    floor_percent: int = 0
    queued_requests_max: int | None = None
    queued_tokens_max: int | None = None
    look_ahead_requests: int = 64


class ModelPolicy(Part, frozen=True, kw_only=True):
    """One model: the tokens of its context, what one of its tokens costs (percent of a unit), and what stands in for it under load."""

    context_tokens: int
    cost_percent: int = 100
    smaller: str | None = None


class LadderLevel(Part, frozen=True, kw_only=True):
    """One step of the degradation ladder: entered at `enter_ms` of saturation, left below `leave_ms`.

    `output_percent_…` of the answer that would be granted is granted; `downgrade_…` to the model's smaller one; without `optional_work`
    flex prompts are refused; `shed_…` refuses all.
    """

    enter_ms: int
    leave_ms: int
    output_percent_free: int = 100
    output_percent_paid: int = 100
    downgrade_free: bool = False
    downgrade_paid: bool = False
    optional_work: bool = True
    shed_free: bool = False
    shed_paid: bool = False


class Ladder(Part, frozen=True, kw_only=True):
    """The levels, mildest first; level 0 is calm. A level is held at least `hold_ms` before it is left downward."""

    hold_ms: int = 5_000
    levels: tuple[LadderLevel, ...] = ()


class ContentPolicy(Part, frozen=True, kw_only=True):
    """What may not be said. A message that holds one of the phrases is refused, an answer ends before it (rules B1 to B4)."""

    blocked_phrases: tuple[str, ...] = ()


class LimitsChanged(Event, frozen=True, kw_only=True):
    """The policy from here on. A tier-wide change is written to every partition of the topic.

    `version` names the content (a hash), so writing the same policy again changes no decision. `order` is the offset at which
    POLICY_ORDER_PARTITION has it, where it is written first; None: there itself.
    """

    version: str
    tiers: dict[Tier, TierLimits]
    changed_by: str
    lanes: dict[Lane, LaneLimits] = msgspec.field(default_factory=dict)
    models: dict[str, ModelPolicy] = msgspec.field(default_factory=dict)
    ladder: Ladder = Ladder()
    content: ContentPolicy = ContentPolicy()
    order: int | None = None


AccountEvent = PromptSubmitted | UsageMeasured | LimitsChanged
