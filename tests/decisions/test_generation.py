"""One attempt and its tail: each rule by example, then any interleaving of several workers on one run against the run fold."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inference_workers.decisions.generation import (
    ACK_WAIT_MS_MAX,
    BACK_WAIT_MS_MAX,
    Generation,
    Loss,
    Phase,
    acknowledged,
    begin,
    cause_of_full_grant,
    end,
    lose,
    overdue,
    say,
    seen,
    unacknowledged_too_long,
)
from schemas.events.tokens import (
    AttemptStarted,
    RunCancelled,
    RunEnded,
    RunEvent,
    TokensGenerated,
)
from schemas.run_fold import NEW_RUN, RunState, fold
from schemas.vocabulary import CancelReason, EndCause, EndWriter
from tests.run_samples import queued

RUN = "run_x"
GRANT = 12
QUEUED = queued(RUN, granted_output_tokens=GRANT)


def started(generation: Generation) -> AttemptStarted:
    return AttemptStarted(
        run_id=RUN,
        attempt=generation.attempt,
        nonce=generation.nonce,
        worker_id="w",
        input_tokens=3,
    )


def piece(nonce: str, index: int, count: int) -> TokensGenerated:
    return TokensGenerated(run_id=RUN, nonce=nonce, index=index, count=count, text="x" * count)


def ended(nonce: str, n: int) -> RunEnded:
    return RunEnded(run_id=RUN, cause=EndCause.STOP, writer=EndWriter.WORKER, nonce=nonce, end=n)


def folded(*events: RunEvent) -> RunState:
    state = NEW_RUN
    for event in events:
        state, _ = fold(state, event)
    return state


def shown(generation: Generation, state: RunState, event: RunEvent) -> tuple[Generation, RunState]:
    """The tail brings the event."""
    after, accepted = fold(state, event)
    return seen(generation, event, accepted=accepted, after=after), after


def first_attempt() -> tuple[Generation, RunState]:
    state = folded(QUEUED)
    return begin(state=state, run_id=RUN, nonce="n1", grant=GRANT, now_ms=0), state


def second_attempt() -> tuple[Generation, RunState]:
    first, _ = first_attempt()
    state = folded(QUEUED, started(first), piece("n1", 0, 4))
    return begin(state=state, run_id=RUN, nonce="n2", grant=GRANT, now_ms=0), state


def test_g1_the_first_attempt_speaks_before_anything_came_back() -> None:
    generation, _ = first_attempt()
    generation = say(generation, index=0, count=1, now_ms=1)
    assert (generation.phase, generation.said, len(generation.awaiting)) == (Phase.SPEAKING, 1, 2)


def test_g1_a_later_attempt_goes_on_at_the_n_that_it_finds_at_its_fence() -> None:
    generation, state = second_attempt()
    assert (generation.phase, generation.attempt) == (Phase.FENCING, 2)
    with pytest.raises(AssertionError, match="G1"):
        say(generation, index=4, count=1, now_ms=1)
    generation, state = shown(generation, state, piece("n1", 4, 2))  # The old one's last words.
    generation, state = shown(generation, state, started(generation))
    assert (generation.phase, generation.said) == (Phase.SPEAKING, 6)
    assert generation.tokens_left == GRANT - 6


def test_g2_pieces_are_dense_and_stay_within_the_grant() -> None:
    generation, _ = first_attempt()
    generation = say(generation, index=0, count=10, now_ms=1)
    with pytest.raises(AssertionError, match="G2"):
        say(generation, index=11, count=1, now_ms=1)
    with pytest.raises(AssertionError, match="G2"):
        say(generation, index=10, count=3, now_ms=1)


def test_g3_nothing_is_said_after_the_terminal_or_when_lost() -> None:
    generation, _ = first_attempt()
    for mute in (end(generation, now_ms=1), lose(generation, Loss.PARTITION_GONE)):
        with pytest.raises(AssertionError, match="G3"):
            say(mute, index=0, count=1, now_ms=1)


@pytest.mark.parametrize(
    "terminal",
    [
        RunCancelled(run_id=RUN, reason=CancelReason.USER),
        RunEnded(run_id=RUN, cause=EndCause.DEADLINE, writer=EndWriter.RECORDER),
    ],
)
def test_g4_anybodys_accepted_terminal_ends_the_attempt(terminal: RunEvent) -> None:
    generation, state = first_attempt()
    generation, _ = shown(generation, state, terminal)
    assert generation.phase is Phase.OVER


def test_g4_our_own_terminal_ends_the_attempt_when_it_is_back() -> None:
    generation, state = first_attempt()
    generation = end(say(generation, index=0, count=2, now_ms=1), now_ms=2)
    for event in (started(generation), piece("n1", 0, 2), ended("n1", 2)):
        assert generation.phase is Phase.ENDING
        generation, state = shown(generation, state, event)
    assert generation.phase is Phase.OVER


def test_g5_anothers_accepted_attempt_takes_the_run_away() -> None:
    generation, state = first_attempt()
    generation, state = shown(generation, state, started(generation))
    rival = begin(state=state, run_id=RUN, nonce="n2", grant=GRANT, now_ms=0)
    generation, _ = shown(generation, state, started(rival))
    assert (generation.phase, generation.loss) == (Phase.LOST, Loss.TAKEN_OVER)


def test_g5_a_lost_race_for_the_first_attempt_is_noticed_at_our_own_record() -> None:
    generation, state = first_attempt()
    rival = begin(state=state, run_id=RUN, nonce="n2", grant=GRANT, now_ms=0)
    _, state = shown(rival, state, started(rival))
    generation, _ = shown(generation, state, started(generation))
    assert (generation.phase, generation.loss) == (Phase.LOST, Loss.NOT_ACCEPTED)


def test_a_zombies_record_that_does_not_count_disturbs_nobody() -> None:
    generation, state = second_attempt()
    generation, state = shown(generation, state, started(generation))
    generation, state = shown(generation, state, piece("n1", 4, 2))
    assert generation.phase is Phase.SPEAKING
    assert state.n == 4


def test_a_record_of_ours_that_comes_by_twice_is_no_loss() -> None:
    generation, state = first_attempt()
    generation = say(generation, index=0, count=2, now_ms=1)
    for event in (started(generation), piece("n1", 0, 2), started(generation), piece("n1", 0, 2)):
        generation, state = shown(generation, state, event)
    assert generation.phase is Phase.SPEAKING


def test_g6_what_is_acknowledged_and_does_not_come_back_is_lost() -> None:
    generation, _ = first_attempt()
    generation = acknowledged(generation, generation.awaiting[0], now_ms=500)
    assert overdue(generation, now_ms=500 + BACK_WAIT_MS_MAX).open
    late = overdue(generation, now_ms=501 + BACK_WAIT_MS_MAX)
    assert (late.phase, late.loss) == (Phase.LOST, Loss.NOT_BACK)


def test_g6_an_outage_without_acknowledgements_loses_nothing_until_the_producer_is_given_up() -> (
    None
):
    generation, _ = first_attempt()
    assert overdue(generation, now_ms=20 * BACK_WAIT_MS_MAX).open
    assert not unacknowledged_too_long(generation, now_ms=ACK_WAIT_MS_MAX)
    assert unacknowledged_too_long(generation, now_ms=ACK_WAIT_MS_MAX + 1)


def test_what_is_over_is_never_lost() -> None:
    generation, state = first_attempt()
    generation, _ = shown(generation, state, RunCancelled(run_id=RUN, reason=CancelReason.USER))
    assert lose(generation, Loss.PARTITION_GONE).phase is Phase.OVER


def test_d3_a_full_grant_names_the_quota_where_it_was_the_quota() -> None:
    assert cause_of_full_grant(quota_limited=True) is EndCause.QUOTA_REACHED
    assert cause_of_full_grant(quota_limited=False) is EndCause.LENGTH


@dataclass(slots=True)
class Actor:
    """A worker that may be slow, cut off or a zombie: it has its own place on the log and its own unsent records."""

    name: int
    position: int = 0
    state: RunState = NEW_RUN
    generation: Generation | None = None
    outbox: list[RunEvent] = field(default_factory=list)
    attempts: int = 0


class WorkersOnOneRun(RuleBasedStateMachine):
    """Three workers on one log. Records reach it late and in order of each worker, tails lag, workers die and records get lost."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[RunEvent] = [QUEUED]
        self.truth = folded(QUEUED)
        self.actors = [Actor(name) for name in range(3)]

    def _append(self, event: RunEvent) -> None:
        self.log.append(event)
        before = self.truth
        self.truth, accepted = fold(self.truth, event)
        if accepted and isinstance(event, TokensGenerated):
            assert event.index == before.n, "I2"

    @rule(who=st.integers(0, 2), steps=st.integers(1, 4))
    def tail(self, who: int, steps: int) -> None:
        actor = self.actors[who]
        for event in self.log[actor.position : actor.position + steps]:
            actor.position += 1
            actor.state, accepted = fold(actor.state, event)
            if actor.generation is not None:
                actor.generation = seen(
                    actor.generation, event, accepted=accepted, after=actor.state
                )

    @rule(who=st.integers(0, 2))
    def start(self, who: int) -> None:
        actor = self.actors[who]
        if not actor.state.open or (actor.generation is not None and actor.generation.open):
            return
        actor.attempts += 1
        nonce = f"{who}.{actor.attempts}"
        actor.generation = begin(state=actor.state, run_id=RUN, nonce=nonce, grant=GRANT, now_ms=0)
        actor.outbox.append(started(actor.generation))

    @rule(who=st.integers(0, 2), count=st.integers(1, 3))
    def speak(self, who: int, count: int) -> None:
        actor = self.actors[who]
        generation = actor.generation
        if generation is None or generation.phase is not Phase.SPEAKING:
            return
        count = min(count, generation.tokens_left)
        if count == 0:
            actor.generation = end(generation, now_ms=0)
            actor.outbox.append(ended(generation.nonce, generation.said))
            return
        actor.outbox.append(piece(generation.nonce, generation.said, count))
        actor.generation = say(generation, index=generation.said, count=count, now_ms=0)

    @rule(who=st.integers(0, 2), steps=st.integers(1, 3))
    def deliver(self, who: int, steps: int) -> None:
        actor = self.actors[who]
        for event in actor.outbox[:steps]:
            self._append(event)
        del actor.outbox[:steps]

    @rule(who=st.integers(0, 2), kept=st.integers(0, 3))
    def die(self, who: int, kept: int) -> None:
        for event in self.actors[who].outbox[:kept]:
            self._append(event)
        self.actors[who] = Actor(who, attempts=self.actors[who].attempts)

    @rule(place=st.integers(0, 30))
    def replay(self, place: int) -> None:
        self._append(self.log[place % len(self.log)])

    @precondition(lambda self: len(self.log) > 25)
    @rule()
    def cancel(self) -> None:
        self._append(RunCancelled(run_id=RUN, reason=CancelReason.USER))

    @invariant()
    def the_answer_is_dense_and_within_the_grant(self) -> None:
        assert self.truth.n == len(self.truth.text) <= GRANT

    @invariant()
    def who_has_read_everything_and_speaks_has_the_current_attempt(self) -> None:
        for actor in self.actors:
            generation = actor.generation
            if generation is None or not generation.open or actor.position < len(self.log):
                continue
            assert not actor.state.ended, "G4"
            back = not any(s.kind.value == "started" for s in generation.awaiting)
            if back:
                assert actor.state.nonce == generation.nonce, "G5"

    def teardown(self) -> None:
        """However it stands, one worker that reads everything finishes the run."""
        for actor in self.actors:
            self.deliver(actor.name, len(actor.outbox))
        self.actors[0] = Actor(0, attempts=self.actors[0].attempts)
        for _ in range(40):
            self.tail(0, len(self.log))
            self.start(0)
            self.speak(0, 3)
            self.deliver(0, len(self.actors[0].outbox))
        assert self.truth.ended, "I1"


TestWorkersOnOneRun = WorkersOnOneRun.TestCase
TestWorkersOnOneRun.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
