"""chat.tokens: what was said. One run is one stream inside one partition; `run_fold` says which records count."""

from __future__ import annotations

from schemas.events import Event, Part
from schemas.vocabulary import CancelReason, EndCause, EndWriter, Lane, RefusalReason, Tier


class RunQueued(Event, frozen=True, kw_only=True):
    """Admission let the run in. `deadline_ms` counts from this record's append time; `wait_ms` is an estimate.

    `quota_limited`: the quota, not the request, made the grant this short, so reaching it ends the run with `quota_reached`.
    `after_run_id`: it starts when that run of its chat has ended. `ladder_level` is the pressure at which it was decided;
    without it the answer would have had `downgraded_from` as its model, and the grant of which `output_percent` is left.
    Of the `blocked_phrases` its answer may hold none.
    """

    run_id: str
    account_id: str
    chat_id: str
    user_message_id: str
    assistant_message_id: str
    parent_id: str | None
    tier: Tier
    lane: Lane
    model: str
    input_budget_tokens: int
    granted_output_tokens: int
    deadline_ms: int
    wait_ms: int = 0
    quota_limited: bool = False
    after_run_id: str | None = None
    ladder_level: int = 0
    downgraded_from: str | None = None
    output_percent: int = 100
    blocked_phrases: tuple[str, ...] = ()


class RunRedirected(Event, frozen=True, kw_only=True):
    """The idempotency key was bound already: to `to_run_id`, or (None) to a request with another body."""

    run_id: str
    account_id: str
    to_run_id: str | None


class AttemptStarted(Event, frozen=True, kw_only=True):
    """A worker took the run. `nonce` is new for each attempt: records with an older one are a zombie's."""

    run_id: str
    attempt: int
    nonce: str
    worker_id: str
    input_tokens: int


class TokensGenerated(Event, frozen=True, kw_only=True):
    """`count` tokens from `index` on. `ids` are all of them, or None where the engine does not know them exactly."""

    run_id: str
    nonce: str
    index: int
    count: int
    text: str
    ids: tuple[int, ...] | None = None


class RunCancelled(Event, frozen=True, kw_only=True):
    """The answer ends at this record's place in the log."""

    run_id: str
    reason: CancelReason


class Refusal(Part, frozen=True, kw_only=True):
    """Why a prompt was refused, with what a client needs to know to come back. `limit` names the field of the policy that refused it."""

    reason: RefusalReason
    retry_after_ms: int | None = None
    wait_ms: int | None = None
    window_ends_ms: int | None = None
    detail: str = ""
    limit: str = ""
    ladder_level: int = 0


class RunEnded(Event, frozen=True, kw_only=True):
    """A terminal. A worker states its `nonce` and the token count at the `end`; admission states the `refusal`.

    `detail` is for operators and says what failed, never what a user wrote.
    """

    run_id: str
    cause: EndCause
    writer: EndWriter
    nonce: str | None = None
    end: int | None = None
    refusal: Refusal | None = None
    detail: str = ""


class PartitionTick(Event, frozen=True, kw_only=True):
    """Moves the partition's time while runs are open, so that deadlines pass on the broker's clock."""


RunEvent = RunQueued | RunRedirected | AttemptStarted | TokensGenerated | RunCancelled | RunEnded
TokenEvent = RunEvent | PartitionTick
