"""Why a record of a run did not count: the rule of `schemas.run_fold` that it fails, in a few words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from schemas.events.tokens import (
    AttemptStarted,
    RunCancelled,
    RunEnded,
    RunEvent,
    RunQueued,
    RunRedirected,
    TokensGenerated,
)
from schemas.run_fold import RunState
from schemas.vocabulary import EndWriter


class Kind(StrEnum):
    """What an ignored record is."""

    AFTER_THE_END = "after the end"
    DUPLICATE = "duplicate"
    FENCED = "fenced"
    LOST_RACE = "lost attempt race"
    GAP = "gap"
    TOO_EARLY = "before it could count"
    NOT_ALLOWED = "not allowed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored:
    """`rule` is a number of the run fold (R1 to R8); `why` ends the sentence "ignored: …"."""

    kind: Kind
    rule: str
    why: str


def why_ignored(state: RunState, event: RunEvent) -> Ignored:
    """For an event that the fold did not accept in `state`."""
    if state.ended:
        return Ignored(kind=Kind.AFTER_THE_END, rule="R*", why="the run had ended")
    match event:
        case RunQueued():
            return Ignored(kind=Kind.DUPLICATE, rule="R1", why="the run was queued already")
        case RunRedirected():
            return Ignored(kind=Kind.NOT_ALLOWED, rule="R2", why="the run was queued")
        case AttemptStarted():
            return _attempt(state, event)
        case TokensGenerated():
            return _tokens(state, event)
        case RunCancelled():
            return Ignored(
                kind=Kind.DUPLICATE, rule="R6", why="an early cancel is remembered already"
            )
        case RunEnded():
            return _ended(state, event)
        case _:
            assert_never(event)


def _attempt(state: RunState, event: AttemptStarted) -> Ignored:
    if state.queued is None:
        return Ignored(kind=Kind.TOO_EARLY, rule="R3", why="the run was not queued")
    if event.attempt > state.attempt + 1:
        return Ignored(
            kind=Kind.GAP, rule="R3", why=f"attempt {state.attempt + 1} was the next one"
        )
    return Ignored(
        kind=Kind.LOST_RACE, rule="R3", why=f"attempt {event.attempt} had been taken already"
    )


def _tokens(state: RunState, event: TokensGenerated) -> Ignored:
    if state.queued is None or state.nonce is None:
        return Ignored(kind=Kind.TOO_EARLY, rule="R4", why="no attempt had started")
    if event.nonce != state.nonce:
        return Ignored(kind=Kind.FENCED, rule="R4", why=f"attempt {state.attempt} holds the run")
    if event.count < 1:
        return Ignored(kind=Kind.NOT_ALLOWED, rule="R4", why="it holds no token")
    if event.index < state.n:
        return Ignored(
            kind=Kind.DUPLICATE, rule="R4", why=f"tokens up to {state.n} were there already"
        )
    return Ignored(
        kind=Kind.GAP, rule="R4", why=f"tokens {state.n} to {event.index - 1} are missing"
    )


def _ended(state: RunState, event: RunEnded) -> Ignored:
    rule = {
        EndWriter.ADMISSION: "R2",
        EndWriter.WORKER: "R5",
        EndWriter.RECORDER: "R7",
        EndWriter.CONTEXT: "R8",
    }[event.writer]
    if event.writer is EndWriter.ADMISSION:
        return Ignored(kind=Kind.NOT_ALLOWED, rule=rule, why="the run was queued")
    if state.queued is None:
        return Ignored(kind=Kind.TOO_EARLY, rule=rule, why="the run was not queued")
    if event.writer is EndWriter.WORKER and state.nonce is None:
        return Ignored(kind=Kind.TOO_EARLY, rule=rule, why="no attempt had started")
    if event.writer is EndWriter.WORKER and event.nonce != state.nonce:
        return Ignored(kind=Kind.FENCED, rule=rule, why=f"attempt {state.attempt} holds the run")
    if event.writer is EndWriter.WORKER and event.end != state.n:
        return Ignored(
            kind=Kind.GAP, rule=rule, why=f"it ends at {event.end}, the run stood at {state.n}"
        )
    if event.writer is EndWriter.CONTEXT and state.attempt:
        return Ignored(kind=Kind.TOO_EARLY, rule=rule, why="an attempt had started")
    return Ignored(kind=Kind.NOT_ALLOWED, rule=rule, why=f"{event.writer} cannot say {event.cause}")
