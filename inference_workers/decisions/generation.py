"""One attempt at one run, as the worker that makes it sees it: what it may append, and what the tail tells it.

The worker appends to the run's stream and reads the same stream back. What comes back, folded by the run fold, is the truth; what
was sent is only a hope.

States: FENCING (attempt 2 and later: our AttemptStarted is not back yet), SPEAKING, ENDING (our terminal is sent), and for good
OVER (an accepted terminal is on the log) or LOST (this attempt can append nothing that counts).

Rules (cited by assertions and tests):
  G1  Attempt 1 speaks at once: its nonce protects. A later attempt fences, then reads: it says nothing before its AttemptStarted
      came back accepted, and goes on at the n found there.
  G2  What is said is dense: each piece begins where the one before ended, and the grant is never exceeded.
  G3  Nothing is said after our terminal, nor once the attempt is over or lost.
  G4  An accepted terminal on the log, whoever wrote it, makes the attempt over.
  G5  Another's accepted AttemptStarted, or a record of ours that is not accepted, makes it lost.
  G6  A record of ours that was acknowledged and is not back within BACK_WAIT_MS_MAX makes it lost. The time counts from the
      acknowledgement: in an outage of the broker nothing comes back and nothing is lost either.
  G7  A run of which BARREN_WORKERS_MAX workers in a row made no token is ended by the next one: a prompt that kills its engine must
      not kill every engine. A worker that lives and tries again counts once: it was late, and killed nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from schemas.events.tokens import AttemptStarted, RunEnded, RunEvent, TokensGenerated
from schemas.run_fold import RunState
from schemas.vocabulary import EndCause, EndWriter

BACK_WAIT_MS_MAX: Final = 1_000
# An idempotent send waits for ever in an outage; after this the process ends and begins anew.
ACK_WAIT_MS_MAX: Final = 30_000
BARREN_WORKERS_MAX: Final = 4
ENGINE_FAILURES_MAX: Final = 3


class Phase(StrEnum):
    """Where an attempt stands. OVER and LOST are for good."""

    FENCING = "fencing"
    SPEAKING = "speaking"
    ENDING = "ending"
    OVER = "over"
    LOST = "lost"


class Loss(StrEnum):
    """Why an attempt was lost."""

    NOT_ACCEPTED = "not_accepted"
    TAKEN_OVER = "taken_over"
    NOT_BACK = "not_back"
    PARTITION_GONE = "partition_gone"
    ENGINE_FAILED = "engine_failed"


class RecordKind(StrEnum):
    """The three kinds of record that a worker appends to a run."""

    STARTED = "started"
    SAID = "said"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A record of ours that is not back yet. `index` is its first token (or, for a terminal, the end); times are the worker's own."""

    kind: RecordKind
    index: int
    sent_ms: int
    acked_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One attempt. `said` counts the run's tokens up to what was sent last; `awaiting` are our records not back yet, in order."""

    run_id: str
    attempt: int
    nonce: str
    grant: int
    said: int
    phase: Phase
    awaiting: tuple[Sent, ...]
    loss: Loss | None = None

    @property
    def open(self) -> bool:
        """Neither over nor lost."""
        return self.phase not in (Phase.OVER, Phase.LOST)

    @property
    def tokens_left(self) -> int:
        """What the grant still allows."""
        return self.grant - self.said


def begin(*, state: RunState, run_id: str, nonce: str, grant: int, now_ms: int) -> Generation:
    """The next attempt at a run that is open on the tail; its AttemptStarted is what the caller sends first."""
    assert state.open, "only an open run is attempted"
    first = state.attempt == 0
    return Generation(
        run_id=run_id,
        attempt=state.attempt + 1,
        nonce=nonce,
        grant=grant,
        said=state.n,
        phase=Phase.SPEAKING if first else Phase.FENCING,  # G1
        awaiting=(Sent(kind=RecordKind.STARTED, index=0, sent_ms=now_ms),),
    )


def say(generation: Generation, *, index: int, count: int, now_ms: int) -> Generation:
    """A piece of the answer was sent."""
    assert generation.phase is Phase.SPEAKING, "G1, G3: only a speaking attempt says something"
    assert index == generation.said, "G2: dense"
    assert 1 <= count <= generation.tokens_left, "G2: within the grant"
    return replace(
        generation,
        said=index + count,
        awaiting=(
            *generation.awaiting,
            Sent(kind=RecordKind.SAID, index=index, sent_ms=now_ms),
        ),
    )


def end(generation: Generation, *, now_ms: int) -> Generation:
    """Our terminal was sent."""
    assert generation.phase is Phase.SPEAKING, "G1, G3: only a speaking attempt ends"
    sent = Sent(kind=RecordKind.ENDED, index=generation.said, sent_ms=now_ms)
    return replace(generation, phase=Phase.ENDING, awaiting=(*generation.awaiting, sent))


def acknowledged(generation: Generation, sent: Sent, *, now_ms: int) -> Generation:
    """The broker acknowledged a record of ours. It may have come back before."""
    return replace(
        generation,
        awaiting=tuple(
            replace(waiting, acked_ms=now_ms) if _same(waiting, sent) else waiting
            for waiting in generation.awaiting
        ),
    )


def seen(generation: Generation, event: RunEvent, *, accepted: bool, after: RunState) -> Generation:
    """A record of the run came by on the tail; `after` is the run after it."""
    if not generation.open:
        return generation
    if after.ended:
        return replace(generation, phase=Phase.OVER, awaiting=())  # G4
    ours = _ours(generation, event)
    if ours is None:
        if accepted and isinstance(event, AttemptStarted):
            return lose(generation, Loss.TAKEN_OVER)  # G5
        return generation
    if not any(_same(waiting, ours) for waiting in generation.awaiting):
        return generation  # A duplicate of one that is back already.
    if not accepted or not _same(generation.awaiting[0], ours):
        return lose(generation, Loss.NOT_ACCEPTED)  # G5
    generation = replace(generation, awaiting=generation.awaiting[1:])
    if generation.phase is Phase.FENCING:
        return replace(generation, phase=Phase.SPEAKING, said=after.n)  # G1
    return generation


def overdue(generation: Generation, *, now_ms: int) -> Generation:
    """G6: lose what was acknowledged and does not come back."""
    if generation.open and generation.awaiting:
        acked_ms = generation.awaiting[0].acked_ms
        if acked_ms is not None and now_ms - acked_ms > BACK_WAIT_MS_MAX:
            return lose(generation, Loss.NOT_BACK)
    return generation


def unacknowledged_too_long(generation: Generation, *, now_ms: int) -> bool:
    """Whether the oldest record of ours waits for its acknowledgement beyond ACK_WAIT_MS_MAX."""
    if not generation.awaiting:
        return False
    oldest = generation.awaiting[0]
    return oldest.acked_ms is None and now_ms - oldest.sent_ms > ACK_WAIT_MS_MAX


def lose(generation: Generation, why: Loss) -> Generation:
    """This attempt appends nothing that counts any more. What is over stays over."""
    if not generation.open:
        return generation
    return replace(generation, phase=Phase.LOST, awaiting=(), loss=why)


def cause_of_full_grant(*, quota_limited: bool) -> EndCause:
    """How a run ends whose grant is used up: requirement D3 wants the quota named where it was the quota."""
    return EndCause.QUOTA_REACHED if quota_limited else EndCause.LENGTH


def _ours(generation: Generation, event: RunEvent) -> Sent | None:
    match event:
        case AttemptStarted(nonce=generation.nonce):
            return Sent(kind=RecordKind.STARTED, index=0, sent_ms=0)
        case TokensGenerated(nonce=generation.nonce):
            return Sent(kind=RecordKind.SAID, index=event.index, sent_ms=0)
        case RunEnded(nonce=generation.nonce, writer=EndWriter.WORKER):
            return Sent(kind=RecordKind.ENDED, index=event.end or 0, sent_ms=0)
        case _:
            return None


def _same(one: Sent, other: Sent) -> bool:
    return one.kind is other.kind and one.index == other.index
