"""The run fold against its rules: each rule by example, then any mixture of duplicates, losses, delays and zombies."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from schemas.events.tokens import (
    AttemptStarted,
    Refusal,
    RunCancelled,
    RunEnded,
    RunEvent,
    RunRedirected,
    TokensGenerated,
)
from schemas.run_fold import NEW_RUN, Ending, RunState, fold
from schemas.vocabulary import (
    CancelReason,
    EndCause,
    EndWriter,
    FinishReason,
    RefusalReason,
    RunStatus,
)
from tests.run_samples import queued

RUN = "run_x"
QUEUED = queued(RUN)
DEADLINE = RunEnded(run_id=RUN, cause=EndCause.DEADLINE, writer=EndWriter.RECORDER)
CONTEXT_ERROR = RunEnded(run_id=RUN, cause=EndCause.ERROR, writer=EndWriter.CONTEXT)
REFUSED = RunEnded(
    run_id=RUN,
    cause=EndCause.REFUSED,
    writer=EndWriter.ADMISSION,
    refusal=Refusal(reason=RefusalReason.OVERLOADED),
)
CONFLICT = RunRedirected(run_id=RUN, account_id="a", to_run_id=None)
CANCEL = RunCancelled(run_id=RUN, reason=CancelReason.USER)
LIMITS = RunCancelled(run_id=RUN, reason=CancelReason.LIMITS)


def attempt(number: int, nonce: str, input_tokens: int = 7) -> AttemptStarted:
    return AttemptStarted(
        run_id=RUN, attempt=number, nonce=nonce, worker_id="w", input_tokens=input_tokens
    )


def tokens(nonce: str, index: int, count: int = 1, text: str = "x") -> TokensGenerated:
    return TokensGenerated(run_id=RUN, nonce=nonce, index=index, count=count, text=text)


def stop(nonce: str, end: int, cause: EndCause = EndCause.STOP) -> RunEnded:
    return RunEnded(run_id=RUN, cause=cause, writer=EndWriter.WORKER, nonce=nonce, end=end)


def after(*events: RunEvent) -> RunState:
    """The state after events that must all count."""
    state = NEW_RUN
    for event in events:
        state, counted = fold(state, event)
        assert counted, event
    return state


STARTED = (QUEUED, attempt(1, "n1"))
TALKING = (*STARTED, tokens("n1", 0, 2, "ab"))

IGNORED: dict[str, tuple[tuple[RunEvent, ...], RunEvent]] = {
    "R1 a second RunQueued": ((QUEUED,), QUEUED),
    "R2 a refusal of a queued run": ((QUEUED,), REFUSED),
    "R2 a redirect of a queued run": ((QUEUED,), CONFLICT),
    "R2 admission cannot end a run for another cause": (
        (),
        RunEnded(run_id=RUN, cause=EndCause.ERROR, writer=EndWriter.ADMISSION),
    ),
    "R3 an attempt before the queue": ((), attempt(1, "n1")),
    "R3 a repeated attempt number": (STARTED, attempt(1, "n2")),
    "R3 a skipped attempt number": (STARTED, attempt(3, "n2")),
    "R4 tokens before any attempt": ((QUEUED,), tokens("n1", 0)),
    "R4 tokens with an old nonce": ((*TALKING, attempt(2, "n2")), tokens("n1", 2)),
    "R4 tokens that leave a gap": (TALKING, tokens("n1", 3)),
    "R4 tokens said again": (TALKING, tokens("n1", 0, 2, "ab")),
    "R4 no tokens at all": (TALKING, tokens("n1", 2, 0, "")),
    "R5 an end before any attempt": (
        (QUEUED,),
        RunEnded(run_id=RUN, cause=EndCause.STOP, writer=EndWriter.WORKER, nonce=None, end=0),
    ),
    "R5 an end that hides a lost delta": (TALKING, stop("n1", 3)),
    "R5 an end by a zombie": ((*TALKING, attempt(2, "n2")), stop("n1", 2)),
    "R5 a worker cannot write a deadline": (TALKING, stop("n1", 2, EndCause.DEADLINE)),
    "R6 an early cancel, twice": ((CANCEL,), CANCEL),
    "R7 a deadline before the queue": ((), DEADLINE),
    "R7 the recorder writes deadlines only": (
        (QUEUED,),
        RunEnded(run_id=RUN, cause=EndCause.STOP, writer=EndWriter.RECORDER),
    ),
    "R8 context's error before the queue": ((), CONTEXT_ERROR),
    "R8 context's error once an attempt was accepted": (STARTED, CONTEXT_ERROR),
}
AFTER_THE_END: tuple[RunEvent, ...] = (
    QUEUED,
    attempt(2, "n2"),
    tokens("n1", 2),
    stop("n1", 2),
    CANCEL,
    DEADLINE,
)
IGNORED |= {
    f"nothing counts after the end: {type(event).__name__}": ((*TALKING, stop("n1", 2)), event)
    for event in AFTER_THE_END
}


@pytest.mark.parametrize(("before", "event"), IGNORED.values(), ids=IGNORED)
def test_ignored(before: tuple[RunEvent, ...], event: RunEvent) -> None:
    state = after(*before)
    assert fold(state, event) == (state, False)


ENDS: dict[str, tuple[tuple[RunEvent, ...], FinishReason | None, RunStatus]] = {
    "stop": ((*TALKING, stop("n1", 2)), FinishReason.STOP, RunStatus.DONE),
    "quota": (
        (*TALKING, stop("n1", 2, EndCause.QUOTA_REACHED)),
        FinishReason.QUOTA_REACHED,
        RunStatus.DONE,
    ),
    "an error of the worker": (
        (*TALKING, stop("n1", 2, EndCause.ERROR)),
        FinishReason.ERROR,
        RunStatus.FAILED,
    ),
    "cancel": ((*TALKING, CANCEL), FinishReason.CANCELLED, RunStatus.CANCELLED),
    "cancel without a worker": ((QUEUED, CANCEL), FinishReason.CANCELLED, RunStatus.CANCELLED),
    "an early cancel": ((CANCEL, QUEUED), FinishReason.CANCELLED, RunStatus.CANCELLED),
    "an early cancel for limits": ((LIMITS, QUEUED), FinishReason.QUOTA_REACHED, RunStatus.DONE),
    "lowered limits": ((*TALKING, LIMITS), FinishReason.QUOTA_REACHED, RunStatus.DONE),
    "deadline": ((*TALKING, DEADLINE), FinishReason.DEADLINE, RunStatus.FAILED),
    "context's error": ((QUEUED, CONTEXT_ERROR), FinishReason.ERROR, RunStatus.FAILED),
    "refusal": ((REFUSED,), None, RunStatus.REFUSED),
    "refusal after an early cancel": ((CANCEL, REFUSED), None, RunStatus.REFUSED),
    "conflict": ((CONFLICT,), None, RunStatus.REFUSED),
}


@pytest.mark.parametrize(("events", "finish", "status"), ENDS.values(), ids=ENDS)
def test_ends(events: tuple[RunEvent, ...], finish: FinishReason | None, status: RunStatus) -> None:
    state = after(*events)
    assert (state.ended, state.finish_reason, state.status) == (True, finish, status)


def test_a_takeover_continues_the_text_and_keeps_the_first_input_tokens() -> None:
    state = after(*TALKING, attempt(2, "n2", input_tokens=99), tokens("n2", 2, 1, "c"))
    assert (state.n, state.text, state.attempt, state.input_tokens) == (3, "abc", 2, 7)


def test_a_refusal_says_why() -> None:
    state = after(REFUSED)
    assert state.ending is Ending.REFUSED
    assert state.refusal == REFUSED.refusal


@dataclass
class Writer:
    """A worker that believes what it once read. It may be a zombie; its appends may be lost, late or out of order."""

    nonce: str
    n: int
    outbox: list[RunEvent] = field(default_factory=list)


class RunLog(RuleBasedStateMachine):
    """Any number of workers write one run's stream, each from a view as old as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[RunEvent] = []
        self.states: list[RunState] = [NEW_RUN]
        self.counted: list[RunEvent] = []
        self.writers: list[Writer] = []

    def append(self, event: RunEvent) -> None:
        state, counted = fold(self.states[-1], event)
        self.log.append(event)
        self.states.append(state)
        if counted:
            self.counted.append(event)

    @rule(
        event=st.sampled_from(
            (QUEUED, QUEUED, CANCEL, LIMITS, DEADLINE, CONTEXT_ERROR, REFUSED, CONFLICT)
        )
    )
    def somebody_else_appends(self, event: RunEvent) -> None:
        self.append(event)

    @rule(data=st.data())
    def a_worker_takes_the_run(self, data: st.DataObject) -> None:
        seen = data.draw(st.sampled_from(self.states), label="the view it decides by")
        writer = Writer(nonce=f"n{len(self.writers)}", n=seen.n)
        writer.outbox.append(attempt(seen.attempt + 1, writer.nonce))
        self.writers.append(writer)

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), count=st.integers(1, 3))
    def a_worker_generates(self, data: st.DataObject, count: int) -> None:
        writer = data.draw(st.sampled_from(self.writers))
        text = f"[{writer.nonce}@{writer.n}]"
        writer.outbox.append(tokens(writer.nonce, writer.n, count, text))
        writer.n += count

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def a_worker_ends(self, data: st.DataObject) -> None:
        writer = data.draw(st.sampled_from(self.writers))
        writer.outbox.append(stop(writer.nonce, writer.n))

    @precondition(lambda self: any(writer.outbox for writer in self.writers))
    @rule(data=st.data(), lost=st.booleans(), out_of_order=st.booleans())
    def an_append_arrives_or_is_lost(
        self, data: st.DataObject, lost: bool, out_of_order: bool
    ) -> None:
        writer = data.draw(st.sampled_from([w for w in self.writers if w.outbox]))
        event = writer.outbox.pop(-1 if out_of_order else 0)
        if not lost:
            self.append(event)

    @precondition(lambda self: any(writer.outbox for writer in self.writers))
    @rule(data=st.data())
    def a_worker_flushes(self, data: st.DataObject) -> None:
        writer = data.draw(st.sampled_from([w for w in self.writers if w.outbox]))
        while writer.outbox:
            self.append(writer.outbox.pop(0))

    @precondition(lambda self: self.log)
    @rule(data=st.data())
    def an_old_record_is_appended_again(self, data: st.DataObject) -> None:
        self.append(data.draw(st.sampled_from(self.log)))

    @invariant()
    def folding_from_zero_gives_the_same(self) -> None:  # I12
        state = NEW_RUN
        for event in self.log:
            state, _ = fold(state, event)
        assert state == self.states[-1]

    @invariant()
    def what_counted_counts_never_again(self) -> None:  # I12
        state = self.states[-1]
        for event in self.counted:
            assert fold(state, event) == (state, False)

    @invariant()
    def indices_are_dense_and_each_belongs_to_one_attempt(self) -> None:  # I2, I3
        n, nonce, text, number = 0, None, "", 0
        for event in self.counted:
            match event:
                case AttemptStarted():
                    number += 1
                    assert event.attempt == number
                    nonce = event.nonce
                case TokensGenerated():
                    assert event.nonce == nonce, "only the newest accepted attempt speaks"
                    assert event.index == n
                    n += event.count
                    text += event.text
                case RunEnded(writer=EndWriter.WORKER):
                    assert event.nonce == nonce
                    assert event.end == n, "an end hides no lost token"
                case _:
                    pass
        state = self.states[-1]
        assert (state.n, state.text, state.attempt) == (n, text, number)

    @invariant()
    def a_run_ends_once(self) -> None:  # I1
        ends = [k for k, state in enumerate(self.states) if state.ended]
        if ends:
            assert all(state == self.states[ends[0]] for state in self.states[ends[0] :])
            state = self.states[-1]
            assert (state.queued is None) == (state.finish_reason is None)


RunLog.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestRunLog = RunLog.TestCase
