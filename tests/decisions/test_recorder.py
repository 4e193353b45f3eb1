"""The recorder's rules C1 to C6: each by example, then any mixture of crashes, rebalances, duplicates, zombies and late sends."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from processors.decisions import recorder
from processors.decisions.recorder import Concluded, Partition, ReadBack, Seen, misplaced
from schemas.events import Event
from schemas.events.tokens import PartitionTick, RunCancelled
from schemas.ids import RunAddress, derived_event_id, mint_run_id, run_address
from schemas.run_fold import Ending
from schemas.vocabulary import CancelReason, EndCause, EndWriter, FinishReason
from tests.decisions.token_log import ACCOUNT, ID_KEY, PARTITION, TokenLog


def read(log: TokenLog, partition: Partition, count: int | None = None) -> list[Concluded]:
    """Give the partition its next records, reading back where it asks, as the process does."""
    found = []
    end = log.end if count is None else min(log.end, partition.position + count)
    for seen in log.records[partition.position : end]:
        step = partition.take(seen)
        if isinstance(step, ReadBack):
            assert step.through == seen.offset
            step = partition.replace(step, log.records[step.mint_offset : step.through + 1])
        if step is not None:
            found.append(step)
    return found


def answered(log: TokenLog, *, deadline_ms: int = 1_000) -> str:
    """A run of two tokens that stopped by itself."""
    run = log.mint()
    log.queued(run, deadline_ms=deadline_ms)
    log.attempt(run, 1, "n")
    log.tokens(run, "n", 0, "a")
    log.tokens(run, "n", 1, "b")
    log.stopped(run, "n", 2)
    return run


def test_c2_an_answered_run_is_concluded_and_measured_with_ids_of_its_own() -> None:
    log = TokenLog()
    run = answered(log)
    (done,) = read(log, Partition(0))
    assert (done.outcome.text, done.outcome.end_offset, done.outcome.attempts) == ("ab", 4, 1)
    assert done.outcome.finish_reason is done.usage.finish_reason is FinishReason.STOP
    assert (done.usage.input_tokens, done.usage.output_tokens) == (7, 2)
    assert done.outcome_id == derived_event_id(run, "RunConcluded")
    assert done.usage_id == derived_event_id(run, "UsageMeasured")
    assert done.cause_id == "e-4"


def test_c2_a_run_that_never_started_is_measured_with_no_input() -> None:
    log = TokenLog()
    run = log.mint()
    log.queued(run)
    log.cancelled(run)
    (done,) = read(log, Partition(0))
    assert (done.usage.input_tokens, done.usage.output_tokens) == (0, 0)
    assert (done.outcome.attempts, done.outcome.text) == (0, "")


def test_c2_refused_and_redirected_runs_leave_no_outcome() -> None:
    log = TokenLog()
    refused, redirected = log.mint(), log.mint()
    log.refused(refused)
    log.redirected(redirected, to=refused)
    partition = Partition(0)
    assert read(log, partition) == []
    assert partition.commit_offset() == log.end


def test_c2_nothing_after_an_accepted_cancel_is_in_the_outcome() -> None:
    log = TokenLog()
    run = log.mint()
    log.queued(run)
    log.attempt(run, 1, "n")
    log.tokens(run, "n", 0, "seen")
    log.cancelled(run)
    log.tokens(run, "n", 1, "unseen")
    log.stopped(run, "n", 2)
    (done,) = read(log, Partition(0))
    assert (done.outcome.text, done.outcome.output_tokens) == ("seen", 1)
    assert done.outcome.finish_reason is FinishReason.CANCELLED


def test_c1_an_early_cancel_ends_the_run_when_it_is_queued() -> None:
    log = TokenLog()
    run = log.mint()
    log.cancelled(run)
    log.queued(run)
    (done,) = read(log, Partition(0))
    assert (done.outcome.finish_reason, done.outcome.end_offset) == (FinishReason.CANCELLED, 1)


def test_c1_a_cancel_from_before_the_start_is_found_by_reading_back() -> None:
    log = TokenLog()
    run = log.mint()
    log.cancelled(run)
    log.tick()
    log.queued(run)
    partition = Partition(2)
    assert partition.take(log.records[2]) == ReadBack(run_id=run, mint_offset=0, through=2)
    (done,) = read(log, Partition(2))
    assert done.outcome.finish_reason is FinishReason.CANCELLED


def test_c1_a_late_duplicate_of_an_ended_runs_queueing_opens_nothing() -> None:
    log = TokenLog()
    run = answered(log)
    partition = Partition(0)
    first = read(log, partition)
    log.queued(run)
    assert read(log, partition) == []
    assert partition.open_runs == 0
    # A successor that begins after the run reads it back, and says the same again.
    assert read(log, Partition(5)) == first


def test_c1_a_refused_run_found_by_reading_back_stays_ended() -> None:
    log = TokenLog()
    run = log.mint()
    log.refused(run)
    log.queued(run)
    log.cancelled(run)
    partition = Partition(1)
    assert read(log, partition) == []
    assert partition.open_runs == 0


def test_c3_the_commit_waits_at_the_mint_offset_of_open_and_of_unacknowledged_runs() -> None:
    log = TokenLog()
    log.tick()
    run = answered(log)
    later = log.mint()
    log.queued(later)
    partition = Partition(0)
    read(log, partition)
    assert partition.commit_offset() == run_address(run).mint_offset == 1
    partition.acknowledged(run)
    assert partition.commit_offset() == run_address(later).mint_offset == 6
    log.cancelled(later)
    read(log, partition)
    assert partition.commit_offset() == 6
    partition.acknowledged(later)
    assert partition.commit_offset() == log.end == partition.position


def test_c4_a_run_is_ended_once_when_the_partitions_time_passes_its_deadline() -> None:
    log = TokenLog()
    run = log.mint()
    log.queued(run, deadline_ms=500)
    partition = Partition(0)
    read(log, partition)
    log.now_ms += 499
    log.tick()
    read(log, partition)
    assert partition.overdue() == []
    log.now_ms += 1
    log.tick()
    read(log, partition)
    (late,) = partition.overdue()
    assert (late.ended.cause, late.ended.writer) == (EndCause.DEADLINE, EndWriter.RECORDER)
    assert partition.overdue() == []
    log.append(late.ended, late.event_id)
    (done,) = read(log, partition)
    assert done.outcome.finish_reason is FinishReason.DEADLINE


def test_c4_a_run_that_ended_in_time_is_not_overdue() -> None:
    log = TokenLog()
    answered(log, deadline_ms=10)
    partition = Partition(0)
    read(log, partition)
    log.now_ms += 1_000
    log.tick()
    read(log, partition)
    assert partition.overdue() == []


def test_c4_a_step_back_of_the_brokers_clock_does_not_move_time_back() -> None:
    log = TokenLog()
    run = log.mint()
    log.queued(run, deadline_ms=500)
    log.now_ms += 500
    log.tick()
    log.now_ms -= 400
    log.tick()
    partition = Partition(0)
    read(log, partition)
    assert len(partition.overdue()) == 1


def test_c5_what_is_forgotten_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "ENDED_RUNS_MAX", 2)
    monkeypatch.setattr(recorder, "EARLY_RUNS_MAX", 2)
    log = TokenLog()
    early = log.mint()
    log.cancelled(early)
    for _ in range(5):
        log.cancelled(log.mint())
    ended = [answered(log) for _ in range(5)]
    partition = Partition(0)
    assert len(read(log, partition)) == 5
    log.queued(early)
    (done,) = read(log, partition)
    assert done.outcome.finish_reason is FinishReason.CANCELLED
    log.queued(ended[0])
    (again,) = read(log, partition)
    assert again.outcome.text == "ab"
    assert partition.open_runs == 0


def test_c5_a_late_cancel_of_a_forgotten_run_is_not_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy of its RunQueued after that must say what the first one said."""
    monkeypatch.setattr(recorder, "ENDED_RUNS_MAX", 1)
    log, partition = TokenLog(), Partition(0)
    answered, other = log.mint(), log.mint()
    queued = log.queued(answered)
    log.attempt(answered, 1, "n")
    log.tokens(answered, "n", 0, "said")
    log.stopped(answered, "n", 1)
    log.cancelled(other)
    log.queued(other)
    log.cancelled(answered)
    log.append(queued.event, queued.event_id)
    steps = [partition.take(seen) for seen in log.records]
    first, again = steps[3], steps[-1]
    assert isinstance(first, Concluded)
    assert isinstance(again, ReadBack)
    assert partition.replace(again, log.records) == first


def test_c5_deadlines_of_ended_runs_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "DUE_SLACK", 10)
    log = TokenLog()
    for _ in range(100):
        answered(log, deadline_ms=10_000_000)
    partition = Partition(0)
    read(log, partition)
    assert len(partition._due) <= 12


@pytest.mark.parametrize(
    ("run_id", "reason"),
    [
        ("run_x", "no run id"),
        ("chat_aaaa", "no run id"),
        (
            mint_run_id(
                key=ID_KEY,
                account_id=ACCOUNT,
                address=RunAddress(epoch=1, partition=PARTITION + 1, mint_offset=0),
                random=b"0" * 10,
            ),
            "another partition",
        ),
        (
            mint_run_id(
                key=ID_KEY,
                account_id=ACCOUNT,
                address=RunAddress(epoch=1, partition=PARTITION, mint_offset=6),
                random=b"0" * 10,
            ),
            "beyond this record",
        ),
    ],
)
def test_c6_a_record_that_no_reader_could_fold_is_malformed(run_id: str, reason: str) -> None:
    event = RunCancelled(run_id=run_id, reason=CancelReason.USER)
    found = misplaced(PARTITION, Seen(offset=5, appended_ms=0, event_id="e", event=event))
    assert found is not None
    assert reason in found
    assert run_id not in found


def test_c6_ticks_and_proper_records_are_in_place() -> None:
    log = TokenLog()
    log.tick()
    log.cancelled(log.mint())
    assert [misplaced(PARTITION, seen) for seen in log.records] == [None, None]


RUNS = st.integers(0, 5)
NONCES = st.sampled_from(["n1", "n2", "n3"])


class RecorderMachine(RuleBasedStateMachine):
    """Any log, read by a recorder that may lose everything but what it committed, at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.log = TokenLog()
        self.runs: list[str] = []
        self.partition = Partition(0)
        self.committed = 0
        self.sent: list[Concluded] = []
        self.unacknowledged: list[str] = []
        self.durable: set[str] = set()
        self.outputs: dict[str, Event] = {}
        self._limits = (recorder.EARLY_RUNS_MAX, recorder.ENDED_RUNS_MAX)
        recorder.EARLY_RUNS_MAX, recorder.ENDED_RUNS_MAX = 1, 2  # type: ignore[misc]

    def pick(self, number: int) -> str | None:
        return self.runs[number % len(self.runs)] if self.runs else None

    @rule()
    def mint(self) -> None:
        self.runs.append(self.log.mint())

    @rule(number=RUNS)
    def queue(self, number: int) -> None:
        if run := self.pick(number):
            self.log.queued(run)

    @rule(number=RUNS, attempt=st.integers(1, 3), nonce=NONCES)
    def start(self, number: int, attempt: int, nonce: str) -> None:
        if run := self.pick(number):
            self.log.attempt(run, attempt, nonce, input_tokens=attempt)

    @rule(number=RUNS, nonce=NONCES, index=st.integers(0, 3))
    def talk(self, number: int, nonce: str, index: int) -> None:
        if run := self.pick(number):
            self.log.tokens(run, nonce, index, f"{nonce}.{index} ")

    @rule(number=RUNS, nonce=NONCES, end=st.integers(0, 3))
    def stop(self, number: int, nonce: str, end: int) -> None:
        if run := self.pick(number):
            self.log.stopped(run, nonce, end)

    @rule(number=RUNS, what=st.sampled_from(["cancel", "refuse", "redirect"]))
    def say(self, number: int, what: str) -> None:
        if run := self.pick(number):
            if what == "cancel":
                self.log.cancelled(run)
            elif what == "refuse":
                self.log.refused(run)
            else:
                self.log.redirected(run, to=None)

    @rule(ms=st.integers(1, 1_500))
    def time_passes(self, ms: int) -> None:
        self.log.now_ms += ms
        self.log.tick()

    @rule(count=st.integers(1, 10))
    def read(self, count: int) -> None:
        for done in read(self.log, self.partition, count):
            self.sent.append(done)
            self.unacknowledged.append(done.run_id)
            for event_id, event in (
                (done.outcome_id, done.outcome),
                (done.usage_id, done.usage),
            ):
                # I12: the same id never has two contents.
                assert self.outputs.setdefault(event_id, event) == event

    @rule()
    def write_overdue(self) -> None:
        for late in self.partition.overdue():
            self.log.append(late.ended, late.event_id)

    @precondition(lambda self: self.unacknowledged)
    @rule()
    def acknowledge(self) -> None:
        run = self.unacknowledged.pop(0)
        self.durable.add(run)
        self.partition.acknowledged(run)

    @rule()
    def commit(self) -> None:
        self.committed = self.partition.commit_offset()

    @rule(lost=st.booleans())
    def crash(self, lost: bool) -> None:
        """The next owner begins at the committed offset. What was not acknowledged may never have been written."""
        for run in set(self.unacknowledged) - self.durable if lost else ():
            self.outputs.pop(derived_event_id(run, "RunConcluded"), None)
            self.outputs.pop(derived_event_id(run, "UsageMeasured"), None)
        self.unacknowledged.clear()
        self.partition = Partition(self.committed)

    @precondition(lambda self: self.unacknowledged)
    @rule()
    def commit_and_lose_what_is_under_way(self) -> None:
        self.commit()
        self.crash(lost=True)

    @invariant()
    def the_position_is_never_behind_the_commit(self) -> None:
        assert self.partition.commit_offset() <= self.partition.position <= self.log.end

    def teardown(self) -> None:
        try:
            self.log.now_ms += 10_000
            self.log.tick()
            while self.partition.position < self.log.end:
                self.read(100)
                self.write_overdue()
            for run in self.runs:
                self.check(run)
            while self.unacknowledged:
                self.acknowledge()
            assert self.partition.open_runs == 0, "I1: every queued run has ended"
            assert self.partition.commit_offset() == self.log.end
        finally:
            recorder.EARLY_RUNS_MAX, recorder.ENDED_RUNS_MAX = self._limits  # type: ignore[misc]

    def check(self, run: str) -> None:
        state, terminal = self.log.truth(run)
        outcome = self.outputs.get(derived_event_id(run, "RunConcluded"))
        usage = self.outputs.get(derived_event_id(run, "UsageMeasured"))
        if state.ending is not Ending.FINISHED:
            assert outcome is usage is None
            assert state.queued is None, "I1: a queued run finishes"
            return
        assert terminal is not None
        expected = recorder.concluded(state, terminal)
        assert (outcome, usage) == (expected.outcome, expected.usage)


TestRecorder = RecorderMachine.TestCase
TestRecorder.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_a_tick_moves_only_time() -> None:
    log = TokenLog()
    log.now_ms += 5
    log.append(PartitionTick())
    partition = Partition(0)
    assert read(log, partition) == []
    assert (partition.position, partition.newest_ms) == (1, log.now_ms)
