"""The run fold: which records of a run's stream count, and where the run stands after them.

Edge, worker, recorder and verifier all use this one fold on the same records from the run's mint offset, so a duplicate, a replay
or a zombie's late write is ignored by all alike (invariants I1 to I3, I8, I12).

Rules (cited by assertions, simulator checks and tests):
  R1  RunQueued counts iff the run is not queued and not ended. If it was cancelled early, it ends here as cancelled.
  R2  RunRedirected, and RunEnded(refused) by admission, count iff not queued and not ended. They end the run.
  R3  AttemptStarted counts iff queued, not ended and attempt = current + 1. The first one fixes the input tokens.
  R4  TokensGenerated counts iff queued, not ended, its nonce is the current one, index = n, and count >= 1.
  R5  RunEnded by a worker counts iff queued, not ended, its nonce is the current one and end = n.
  R6  RunCancelled counts iff not ended. Queued: the run ends here. Not queued yet: it is remembered (see R1), once.
  R7  RunEnded(deadline) by the recorder counts iff queued and not ended.
  R8  RunEnded(error) by context counts iff queued, not ended and no attempt was accepted.
Anything else is ignored. The first accepted terminal wins; nothing counts after it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, assert_never

import msgspec

from schemas.events.tokens import (
    AttemptStarted,
    Refusal,
    RunCancelled,
    RunEnded,
    RunEvent,
    RunQueued,
    RunRedirected,
    TokensGenerated,
)
from schemas.vocabulary import (
    STATUS_OF_FINISH,
    CancelReason,
    EndCause,
    EndWriter,
    FinishReason,
    RunStatus,
)


class Ending(StrEnum):
    """How a run left the open state."""

    FINISHED = "finished"
    REFUSED = "refused"
    REDIRECTED = "redirected"


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run stands. `n` counts accepted output tokens; `text` is their text; `input_tokens` is None before R3."""

    queued: RunQueued | None = None
    cancelled_early: CancelReason | None = None
    attempt: int = 0
    nonce: str | None = None
    n: int = 0
    input_tokens: int | None = None
    text: str = ""
    ending: Ending | None = None
    finish_reason: FinishReason | None = None
    refusal: Refusal | None = None
    redirected_to: str | None = None

    @property
    def ended(self) -> bool:
        """Whether an accepted terminal was seen."""
        return self.ending is not None

    @property
    def open(self) -> bool:
        """Queued and not ended: somebody owes this run a terminal."""
        return self.queued is not None and self.ending is None

    @property
    def status(self) -> RunStatus:
        """The status clients see. A redirected run has none of its own and shows as refused."""
        if self.ending in (Ending.REFUSED, Ending.REDIRECTED):
            return RunStatus.REFUSED
        if self.finish_reason is not None:
            return STATUS_OF_FINISH[self.finish_reason]
        return RunStatus.STREAMING if self.attempt else RunStatus.QUEUED


NEW_RUN: Final = RunState()

_WORKER_FINISH: Final[dict[EndCause, FinishReason]] = {
    EndCause.STOP: FinishReason.STOP,
    EndCause.LENGTH: FinishReason.LENGTH,
    EndCause.QUOTA_REACHED: FinishReason.QUOTA_REACHED,
    EndCause.BLOCKED: FinishReason.BLOCKED,
    EndCause.REPETITION: FinishReason.REPETITION,
    EndCause.ERROR: FinishReason.ERROR,
}
_replace = msgspec.structs.replace


def fold(state: RunState, event: RunEvent) -> tuple[RunState, bool]:
    """The state after `event`, and whether the event counted. An ignored event leaves the state as it is."""
    if state.ending is not None:
        return state, False
    match event:
        case TokensGenerated():
            after = _tokens(state, event)
        case RunQueued():
            after = _queued(state, event)
        case AttemptStarted():
            after = _attempt(state, event)
        case RunCancelled():
            after = _cancelled(state, event)
        case RunRedirected():
            after = (
                _replace(state, ending=Ending.REDIRECTED, redirected_to=event.to_run_id)
                if state.queued is None  # R2
                else None
            )
        case RunEnded():
            after = _ended(state, event)
        case _:
            assert_never(event)
    return (state, False) if after is None else (after, True)


def _queued(state: RunState, event: RunQueued) -> RunState | None:
    if state.queued is not None:
        return None  # R1
    if state.cancelled_early is None:
        return _replace(state, queued=event)
    return _replace(
        state,
        queued=event,
        ending=Ending.FINISHED,
        finish_reason=_finish_of_cancel(state.cancelled_early),
    )


def _attempt(state: RunState, event: AttemptStarted) -> RunState | None:
    if state.queued is None or event.attempt != state.attempt + 1:
        return None  # R3
    first = event.input_tokens if state.input_tokens is None else state.input_tokens
    return _replace(state, attempt=event.attempt, nonce=event.nonce, input_tokens=first)


def _tokens(state: RunState, event: TokensGenerated) -> RunState | None:
    if (
        state.queued is None
        or state.nonce is None
        or event.nonce != state.nonce
        or event.index != state.n
        or event.count < 1
    ):
        return None  # R4
    return _replace(state, n=state.n + event.count, text=state.text + event.text)


def _cancelled(state: RunState, event: RunCancelled) -> RunState | None:
    if state.queued is not None:
        return _replace(
            state, ending=Ending.FINISHED, finish_reason=_finish_of_cancel(event.reason)
        )
    if state.cancelled_early is not None:
        return None  # R6: remembered already
    return _replace(state, cancelled_early=event.reason)


def _finish_of_cancel(reason: CancelReason) -> FinishReason:
    return FinishReason.QUOTA_REACHED if reason is CancelReason.LIMITS else FinishReason.CANCELLED


def _ended(state: RunState, event: RunEnded) -> RunState | None:
    match event.writer:
        case EndWriter.ADMISSION:  # R2
            if state.queued is not None or event.cause is not EndCause.REFUSED:
                return None
            return _replace(state, ending=Ending.REFUSED, refusal=event.refusal)
        case EndWriter.WORKER:  # R5
            finish = _WORKER_FINISH.get(event.cause)
            counts = (
                finish is not None
                and state.nonce is not None
                and event.nonce == state.nonce
                and event.end == state.n
            )
        case EndWriter.RECORDER:  # R7
            finish, counts = FinishReason.DEADLINE, event.cause is EndCause.DEADLINE
        case EndWriter.CONTEXT:  # R8
            finish = FinishReason.ERROR
            counts = event.cause is EndCause.ERROR and state.attempt == 0
        case _:
            assert_never(event.writer)
    if state.queued is None or not counts:
        return None
    return _replace(state, ending=Ending.FINISHED, finish_reason=finish)
