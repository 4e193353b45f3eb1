"""What a worker holds of runs and requests: bounded, forgetful, and never wrong."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from inference_workers.decisions.request_book import Queue, Request, RequestBook
from inference_workers.decisions.run_book import (
    NEW,
    Absence,
    Followed,
    FollowedRun,
    RunBook,
    follow,
)
from schemas.events.generations import GenerationRequested
from schemas.events.tokens import (
    AttemptStarted,
    RunCancelled,
    RunEnded,
    RunEvent,
    TokensGenerated,
)
from schemas.ids import RunAddress, mint_run_id
from schemas.vocabulary import CancelReason, EndCause, EndWriter, Lane, Tier
from tests.run_samples import queued

PARTITION = 3


def run_id(mint_offset: int, number: int) -> str:
    return mint_run_id(
        key=b"k",
        account_id="a",
        address=RunAddress(epoch=1, partition=PARTITION, mint_offset=mint_offset),
        random=number.to_bytes(10, "big"),
    )


def attempt(run: str, number: int, worker_id: str = "w") -> AttemptStarted:
    return AttemptStarted(
        run_id=run, attempt=number, nonce=f"n{number}", worker_id=worker_id, input_tokens=1
    )


def said(
    run: str, nonce: int, index: int, ids: tuple[int, ...] | None, count: int = 1
) -> TokensGenerated:
    return TokensGenerated(
        run_id=run, nonce=f"n{nonce}", index=index, count=count, text="x" * count, ids=ids
    )


def cancelled(run: str) -> RunCancelled:
    return RunCancelled(run_id=run, reason=CancelReason.USER)


def followed_of(events: list[RunEvent]) -> FollowedRun:
    run = NEW
    for event in events:
        run, _ = follow(run, event)
    return run


def test_ids_are_kept_while_every_one_is_exact_and_given_up_for_good_after() -> None:
    run = run_id(0, 1)
    events: list[RunEvent] = [queued(run), attempt(run, 1), said(run, 1, 0, (7, 8), 2)]
    assert followed_of(events).emitted_ids == (7, 8)
    events.append(said(run, 1, 2, None))
    assert followed_of(events).emitted_ids is None
    events.append(said(run, 1, 3, (9,)))
    assert followed_of(events).emitted_ids is None
    assert followed_of(events).state.n == 4


def test_g7_workers_that_made_no_token_are_counted_until_a_token_comes() -> None:
    run = run_id(0, 1)
    events: list[RunEvent] = [queued(run)]
    events += [attempt(run, number, f"w{number}") for number in (1, 2, 3)]
    assert followed_of(events).barren_workers == {"w1", "w2", "w3"}
    events.append(said(run, 3, 0, None))
    assert followed_of(events).barren_workers == frozenset()


def test_g7_a_worker_whose_tail_is_late_again_and_again_does_not_end_the_run_by_that() -> None:
    run = run_id(0, 1)
    late = [attempt(run, number) for number in range(1, 20)]
    assert followed_of([queued(run), *late]).barren_workers == {"w"}


def test_b2_a_run_minted_later_than_the_tail_began_has_no_record_yet() -> None:
    book = RunBook(partition=PARTITION, start=100)
    assert book.find(run_id(100, 1)) is Absence.NO_RECORD
    assert book.find(run_id(99, 1)) is Absence.UNKNOWN


def test_b3_a_run_minted_earlier_is_not_believed_from_its_middle() -> None:
    book, run = RunBook(partition=PARTITION, start=100), run_id(99, 1)
    assert book.apply(100, queued(run)) is None
    assert book.find(run) is Absence.UNKNOWN


def test_b3_what_the_tail_brings_while_a_run_is_read_back_is_folded_after_it() -> None:
    book, run = RunBook(partition=PARTITION, start=100), run_id(90, 1)
    span = book.begin_reading_back([run])
    assert (span.start, span.end) == (90, 100)
    assert book.find(run) is Absence.BEING_READ
    assert book.apply(100, said(run, 1, 0, None)) is None
    assert book.apply(101, cancelled(run)) is None
    steps = book.end_reading_back({run: followed_of([queued(run), attempt(run, 1)])})
    assert [step.accepted for step in steps] == [True, True]
    assert steps[0].run.state.n == 1
    assert book.find(run) is Absence.ENDED


def test_a_record_that_comes_by_again_is_not_folded_again() -> None:
    book, run = RunBook(partition=PARTITION, start=0), run_id(0, 1)
    assert book.apply(0, queued(run)) is not None
    assert book.apply(0, queued(run)) is None


def test_b4_a_run_with_a_request_is_never_forgotten_while_it_is_open() -> None:
    book = RunBook(partition=PARTITION, start=0, open_held_max=2)
    pinned, *others = [run_id(0, number) for number in range(6)]
    book.pin(pinned)
    for offset, run in enumerate([pinned, *others]):
        book.apply(offset, queued(run))
    assert isinstance(book.find(pinned), FollowedRun)
    assert book.find(others[0]) is Absence.UNKNOWN


class BookAgainstTheWholeLog(RuleBasedStateMachine):
    """A book with tiny bounds that joins late never says what the whole log does not say."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[RunEvent] = []
        self.runs: list[str] = []
        self.book: RunBook | None = None
        self.reading: dict[str, FollowedRun] | None = None

    @rule(age=st.integers(0, 4))
    def mint(self, age: int) -> None:
        self.runs.append(run_id(max(0, len(self.log) - age), len(self.runs)))
        self._append(queued(self.runs[-1]))

    @rule(which=st.integers(0, 50), kind=st.integers(0, 4), data=st.data())
    def happen(self, which: int, kind: int, data: st.DataObject) -> None:
        if not self.runs:
            return
        run = self.runs[which % len(self.runs)]
        truth = self._truth(run)
        number = truth.state.attempt
        event: RunEvent
        match kind:
            case 0:
                event = attempt(run, number + data.draw(st.integers(0, 1)))
            case 1 | 2:
                ids = data.draw(st.none() | st.just((4,)))
                event = said(run, number, truth.state.n, ids)
            case 3:
                event = RunEnded(
                    run_id=run,
                    cause=EndCause.STOP,
                    writer=EndWriter.WORKER,
                    nonce=f"n{number}",
                    end=truth.state.n,
                )
            case _:
                event = cancelled(run)
        self._append(event)

    @rule()
    def join(self) -> None:
        if self.book is None:
            self.book = RunBook(
                partition=PARTITION, start=len(self.log), ended_held_max=2, open_held_max=2
            )

    @rule(steps=st.integers(1, 5))
    def tail(self, steps: int) -> None:
        if self.book is None:
            return
        for offset in range(self.book.position, min(len(self.log), self.book.position + steps)):
            self._check_step(offset, self.book.apply(offset, self.log[offset]))

    @rule()
    def begin_reading_back(self) -> None:
        if self.book is None or self.reading is not None:
            return
        unknown = [run for run in self.runs if self.book.find(run) is Absence.UNKNOWN]
        span = self.book.begin_reading_back(unknown)
        self.reading = dict.fromkeys(unknown, NEW)
        for event in self.log[span.start : span.end]:
            if event.run_id in self.reading:
                self.reading[event.run_id], _ = follow(self.reading[event.run_id], event)

    @rule()
    def end_reading_back(self) -> None:
        if self.book is not None and self.reading is not None:
            self.book.end_reading_back(self.reading)
            self.reading = None

    @invariant()
    def what_is_held_is_the_whole_truth(self) -> None:
        if self.book is None:
            return
        for run in self.runs:
            truth = followed_of(
                [event for event in self.log[: self.book.position] if event.run_id == run]
            )
            match self.book.find(run):
                case FollowedRun() as held:
                    assert held == truth, "B1"
                case Absence.ENDED:
                    assert truth.state.ended
                case Absence.NO_RECORD:
                    assert truth == NEW, "B2"
                case _:
                    pass

    def _append(self, event: RunEvent) -> None:
        self.log.append(event)

    def _truth(self, run: str) -> FollowedRun:
        return followed_of([event for event in self.log if event.run_id == run])

    def _check_step(self, offset: int, step: Followed | None) -> None:
        if step is not None:
            events = [
                event for event in self.log[: offset + 1] if event.run_id == step.event.run_id
            ]
            assert step.run == followed_of(events)


TestBookAgainstTheWholeLog = BookAgainstTheWholeLog.TestCase
TestBookAgainstTheWholeLog.settings = settings(
    max_examples=120, stateful_step_count=50, deadline=None
)


QUEUE = Queue(lane=Lane.FREE, partition=PARTITION)
OTHER = Queue(lane=Lane.PLUS, partition=PARTITION)


def request(offset: int, number: int, queue: Queue = QUEUE) -> Request:
    return Request(
        queue=queue,
        offset=offset,
        event_id=f"e{offset}",
        trace="",
        event=GenerationRequested(
            run_id=run_id(0, number),
            account_id="a",
            chat_id="c",
            tier=Tier.FREE,
            lane=queue.lane,
            model="model",
            prompt_ids=(offset,),
            granted_output_tokens=10,
            cache_scope="s",
            deadline_ms=1_000,
        ),
    )


def book_of(*requests: Request) -> RequestBook:
    book = RequestBook()
    book.own({QUEUE, OTHER})
    for each in requests:
        book.add(each)
    return book


def test_q1_the_lowest_offset_of_a_run_counts_and_both_are_done_with_it() -> None:
    book = book_of(request(0, 1), request(1, 1), request(2, 2))
    found = book.of_run(run_id(0, 1))
    assert found is not None
    assert found.offset == 0
    book.done(run_id(0, 1))
    assert book.to_commit() == {QUEUE: 2}


def test_q3_nothing_is_committed_beyond_the_lowest_open_request() -> None:
    book = book_of(request(0, 1), request(1, 2), request(2, 3))
    book.done(run_id(0, 2))
    assert book.to_commit() == {QUEUE: 0}
    book.done(run_id(0, 1))
    assert book.to_commit() == {QUEUE: 2}
    book.done(run_id(0, 3))
    assert book.to_commit() == {QUEUE: 3}


def test_q3_a_record_that_was_set_aside_is_passed_only_after_it_was() -> None:
    book = book_of(request(0, 1))
    book.skip(QUEUE, 1)
    assert book.to_commit() == {QUEUE: 0}
    book.done(run_id(0, 1))
    assert book.to_commit() == {QUEUE: 2}


def test_what_was_committed_is_not_committed_again() -> None:
    book = book_of(request(0, 1))
    book.was_committed(book.to_commit())
    assert book.to_commit() == {}
    assert book.lowest_open() == {QUEUE: 0}


def test_q4_a_kept_queue_that_is_read_again_brings_nothing_new() -> None:
    book = book_of(request(0, 1), request(1, 2))
    book.done(run_id(0, 1))
    assert book.own({QUEUE}) == []
    assert not book.add(request(0, 1))
    assert not book.add(request(1, 2))
    assert book.add(request(2, 3))


def test_q5_a_queue_that_is_gone_takes_its_requests_along_and_comes_back_afresh() -> None:
    book = book_of(request(5, 1), request(7, 2, OTHER))
    assert [gone.offset for gone in book.own({OTHER})] == [5]
    assert book.of_run(run_id(0, 1)) is None
    assert len(book) == 1
    book.own({QUEUE, OTHER})
    assert book.add(request(3, 9))


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=25),
    st.lists(st.integers(0, 6), max_size=25),
)
def test_q3_holds_for_any_order_of_ends(numbers: list[int], ends: list[int]) -> None:
    book = book_of(*(request(offset, number) for offset, number in enumerate(numbers)))
    ended: set[int] = set()
    for number in ends:
        book.done(run_id(0, number))
        ended.add(number)
        still_open = [offset for offset, number in enumerate(numbers) if number not in ended]
        assert book.to_commit() == {QUEUE: min(still_open, default=len(numbers))}
