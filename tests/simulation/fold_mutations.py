"""The rules R1 to R8 of the run fold, each broken in some way. All readers then fold by the broken rule alike."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from inference_workers.decisions.request_book import RequestBook
from processors.decisions import account
from processors.decisions.known_ids import Facts
from schemas import run_fold
from schemas.events.tokens import (
    AttemptStarted,
    RunCancelled,
    RunEnded,
    RunEvent,
    RunQueued,
    RunRedirected,
    TokensGenerated,
)
from schemas.run_fold import Ending, RunState
from schemas.vocabulary import EndCause, EndWriter
from tests.simulation.mutation import LOSSES, REPLAYS, WORKER_PAUSES, WORKER_ZOMBIES, Mutation
from tests.simulation.swaps import swap, swap_everywhere

_replace = msgspec.structs.replace
_fold = run_fold.fold
_ended = run_fold._ended
_decide_prompt = account._decide_prompt


def _goes_on_after_the_end(state: RunState, event: RunEvent) -> tuple[RunState, bool]:
    if state.ending is None or not isinstance(event, TokensGenerated | RunEnded):
        return _fold(state, event)
    after, counted = _fold(_replace(state, ending=None), event)
    return (_replace(after, ending=state.ending), True) if counted else (state, False)


def _queued_twice(state: RunState, event: RunQueued) -> RunState | None:
    return _queued(_replace(state, queued=None), event)


_queued = run_fold._queued


def _early_cancel_does_not_end(state: RunState, event: RunQueued) -> RunState | None:
    return _replace(state, queued=event) if state.queued is None else None


def _admission_ends_what_is_queued(state: RunState, event: RunEvent) -> tuple[RunState, bool]:
    if state.queued is not None and state.ending is None:
        match event:
            case RunRedirected():
                return _replace(
                    state, ending=Ending.REDIRECTED, redirected_to=event.to_run_id
                ), True
            case RunEnded(cause=EndCause.REFUSED):
                return _replace(state, ending=Ending.REFUSED, refusal=event.refusal), True
            case _:
                pass
    return _fold(state, event)


def _forgets_known_runs(
    known: Any, command: Any, prompt: Any, facts: Facts, limits: Any, *, level: int
) -> list[Any]:
    return _decide_prompt(known, command, prompt, Facts(binding=facts.binding), limits, level=level)


def _attempt_of_any_number(state: RunState, event: AttemptStarted) -> RunState | None:
    if state.queued is None:
        return None
    first = event.input_tokens if state.input_tokens is None else state.input_tokens
    return _replace(state, attempt=event.attempt, nonce=event.nonce, input_tokens=first)


def _last_input_counts(state: RunState, event: AttemptStarted) -> RunState | None:
    if state.queued is None or event.attempt != state.attempt + 1:
        return None
    return _replace(
        state, attempt=event.attempt, nonce=event.nonce, input_tokens=event.input_tokens
    )


def _last_request_counts(book: Any, run_id: str) -> Any:
    requests = book._of_run.get(run_id)
    return requests[-1] if requests else None


def _tokens_where(check: Any) -> Any:
    def tokens(state: RunState, event: TokensGenerated) -> RunState | None:
        if state.queued is None or state.nonce is None or not check(state, event):
            return None
        return _replace(state, n=event.index + event.count, text=state.text + event.text)

    return tokens


def _worker_ends_where(check: Any) -> Any:
    def ended(state: RunState, event: RunEnded) -> RunState | None:
        if event.writer is not EndWriter.WORKER or state.queued is None:
            return _ended(state, event)
        if not check(state, event):
            return None
        return _ended(state, _replace(event, nonce=state.nonce, end=state.n))

    return ended


def _cancel_only_before_the_start(state: RunState, event: RunCancelled) -> RunState | None:
    return None if state.attempt else _cancelled(state, event)


def _early_cancel_is_forgotten(state: RunState, event: RunCancelled) -> RunState | None:
    return None if state.queued is None else _cancelled(state, event)


_cancelled = run_fold._cancelled


def _deadline_never_counts(state: RunState, event: RunEnded) -> RunState | None:
    return None if event.writer is EndWriter.RECORDER else _ended(state, event)


def _context_ends_any(state: RunState, event: RunEnded) -> RunState | None:
    if event.writer is EndWriter.CONTEXT:
        return _ended(_replace(state, attempt=0), event)
    return _ended(state, event)


def _kept_attempt(state: RunState, event: RunEnded) -> RunState | None:
    after = _context_ends_any(state, event)
    return None if after is None else _replace(after, attempt=state.attempt)


FOLD_MUTATIONS: Final = (
    Mutation(
        rule="nothing counts after the terminal",
        swaps=(swap_everywhere(run_fold.fold, _goes_on_after_the_end),),
        caught_by={"I1", "I2", "I4", "I8"},
    ),
    Mutation(
        rule="R1: a second RunQueued does not count",
        swaps=(swap(run_fold, "_queued", _queued_twice),),
        caught_by={"I4"},
    ),
    Mutation(
        rule="R1: an early cancel ends the run as soon as it is queued",
        swaps=(swap(run_fold, "_queued", _early_cancel_does_not_end),),
        caught_by={"I8"},
    ),
    Mutation(
        rule="R2 with Q3: admission ends only what is not queued, and decides a run once",
        note="each holds without the other: a run that is known is not decided again, so nothing of it can be refused or redirected",
        swaps=(
            swap_everywhere(run_fold.fold, _admission_ends_what_is_queued),
            swap(account, "_decide_prompt", _forgets_known_runs),
        ),
        faults=REPLAYS,
        caught_by={"I1", "I5", "I6", "I14"},
    ),
    Mutation(
        rule="R3: attempts follow one another",
        swaps=(swap(run_fold, "_attempt", _attempt_of_any_number),),
        faults=WORKER_ZOMBIES,
        caught_by={"I3"},
    ),
    Mutation(
        rule="R3 with Q1 of the requests: the first attempt fixes the input, the lowest request counts",
        note="without one of them the other still gives every attempt the same prompt",
        swaps=(
            swap(run_fold, "_attempt", _last_input_counts),
            swap(RequestBook, "of_run", _last_request_counts),
        ),
        caught_by={"I5"},
    ),
    Mutation(
        rule="R4: tokens of an old nonce do not count",
        swaps=(swap(run_fold, "_tokens", _tokens_where(lambda s, e: e.index == s.n)),),
        faults=WORKER_ZOMBIES,
        caught_by={"I3"},
    ),
    Mutation(
        rule="R4: no gap",
        swaps=(
            swap(
                run_fold,
                "_tokens",
                _tokens_where(lambda s, e: e.nonce == s.nonce and e.index >= s.n),
            ),
        ),
        faults=LOSSES,
        caught_by={"I2"},
    ),
    Mutation(
        rule="R4: nothing is said twice",
        swaps=(
            swap(
                run_fold,
                "_tokens",
                _tokens_where(lambda s, e: e.nonce == s.nonce and e.index <= s.n),
            ),
        ),
        faults=REPLAYS,
        caught_by={"I2"},
    ),
    Mutation(
        rule="R5: a terminal never hides a lost delta",
        swaps=(swap(run_fold, "_ended", _worker_ends_where(lambda s, e: e.nonce == s.nonce)),),
        faults=LOSSES,
        caught_by={"I1"},
    ),
    Mutation(
        rule="R5: a fenced worker ends nothing",
        swaps=(
            swap(
                run_fold,
                "_ended",
                _worker_ends_where(lambda s, e: s.nonce is not None and e.end == s.n),
            ),
        ),
        faults=WORKER_PAUSES,
        caught_by={"I3"},
    ),
    Mutation(
        rule="R6: a cancel ends what is queued, also in mid-answer",
        swaps=(swap(run_fold, "_cancelled", _cancel_only_before_the_start),),
        caught_by={"I8"},
    ),
    Mutation(
        rule="R6: a cancel before the queue is remembered",
        swaps=(swap(run_fold, "_cancelled", _early_cancel_is_forgotten),),
        caught_by={"I8"},
    ),
    Mutation(
        rule="R7: the recorder's deadline counts",
        swaps=(swap(run_fold, "_ended", _deadline_never_counts),),
        caught_by={"I1"},
    ),
    Mutation(
        rule="R8: context ends only what has not begun",
        swaps=(swap(run_fold, "_ended", _kept_attempt),),
        caught_by={"I13"},
    ),
)
