"""Which of a worker's requests may have a slot, and when one whose attempt was lost may have another."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from inference_workers.decisions.request_book import RequestBook
from inference_workers.decisions.run_book import Absence, FollowedRun, RunBook
from inference_workers.decisions.waiting_room import (
    RETRY_AFTER_MS_MAX,
    RETRY_AFTER_MS_MIN,
    WaitingRoom,
)
from tests.decisions.test_worker_books import (
    PARTITION,
    QUEUE,
    attempt,
    cancelled,
    request,
    run_id,
)
from tests.run_samples import queued

RUN = run_id(0, 1)
LOST_MS = 1_000
ACKED_OFFSET = 7


@dataclass(slots=True, kw_only=True)
class _Tail:
    book: RunBook = field(default_factory=lambda: RunBook(partition=PARTITION, start=0))

    @property
    def position(self) -> int:
        return self.book.position

    def find(self, run: str) -> FollowedRun | Absence:
        return self.book.find(run)


@dataclass(slots=True, kw_only=True)
class _Desk:
    tail: _Tail = field(default_factory=_Tail)
    requests: RequestBook = field(default_factory=RequestBook)
    room: WaitingRoom = field(init=False)

    def __post_init__(self) -> None:
        self.room = WaitingRoom(self.requests, claim_tokens_max=100)
        self.requests.own([QUEUE])
        came = request(0, 1)
        assert self.requests.add(came)
        self.room.came(came, now_ms=0)

    def taken(self, *, now_ms: int = 0, busy: tuple[str, ...] = ()) -> str | None:
        assert not self.room.place({PARTITION: self.tail}, busy=busy, now_ms=now_ms)
        return self.room.lanes.take(room_tokens=1_000)

    def lose(self, *, now_ms: int = LOST_MS) -> None:
        self.room.lost(
            RUN, now_ms=now_ms, past_offset=ACKED_OFFSET, used_tokens=1, engine_failed=True
        )


def test_w1_a_request_waits_for_a_slot_when_its_run_is_seen_to_be_queued() -> None:
    desk = _Desk()
    assert desk.taken() is None
    desk.tail.book.apply(0, queued(RUN))
    assert desk.taken() == RUN


def test_w1_nothing_waits_for_a_slot_without_a_tail() -> None:
    desk = _Desk()
    assert desk.room.place({}, busy=(), now_ms=0) == []
    assert desk.room.lanes.take(room_tokens=1_000) is None
    assert len(desk.room) == 1


def test_w1_a_run_that_has_ended_is_done() -> None:
    desk = _Desk()
    desk.tail.book.apply(0, queued(RUN))
    desk.tail.book.apply(1, cancelled(RUN))
    assert desk.room.place({PARTITION: desk.tail}, busy=(), now_ms=0) == [RUN]


def test_w4_while_the_attempt_of_before_holds_its_slot_the_run_waits_for_no_other() -> None:
    desk = _Desk()
    desk.tail.book.apply(0, queued(RUN))
    assert desk.taken(busy=(RUN,)) is None
    assert desk.taken() == RUN


PROOFS = {"the time", "the tail", "the group"}


@pytest.mark.parametrize("missing", [*sorted(PROOFS), ""])
def test_w2_a_lost_run_goes_on_only_with_all_three_proofs(missing: str) -> None:
    desk = _Desk()
    desk.tail.book.apply(0, queued(RUN))
    assert desk.taken() == RUN
    desk.lose()
    assert desk.room.membership_in_doubt
    if missing != "the tail":
        desk.tail.book.apply(ACKED_OFFSET, attempt(RUN, 1))
    if missing != "the group":
        desk.room.member_at(LOST_MS + 1)
        assert not desk.room.membership_in_doubt
    soon = LOST_MS + RETRY_AFTER_MS_MIN
    now_ms = soon - 1 if missing == "the time" else soon
    assert desk.taken(now_ms=now_ms) == (None if missing else RUN)
    assert desk.room.engine_failures(RUN) == 1


def test_w2_what_the_group_took_before_the_loss_proves_nothing() -> None:
    desk = _Desk()
    desk.room.member_at(LOST_MS)
    desk.tail.book.apply(0, queued(RUN))
    assert desk.taken() == RUN
    desk.lose()
    assert desk.room.membership_in_doubt


def test_w2_each_loss_doubles_the_time_up_to_its_bound() -> None:
    desk = _Desk()
    desk.tail.book.apply(0, queued(RUN))
    desk.tail.book.apply(ACKED_OFFSET, attempt(RUN, 1))
    assert desk.taken() == RUN
    now_ms, waits = LOST_MS, []
    for _ in range(8):
        desk.lose(now_ms=now_ms)
        desk.room.member_at(now_ms + 1)
        wait_ms = next(
            ms for ms in range(RETRY_AFTER_MS_MAX + 1) if desk.taken(now_ms=now_ms + ms) is not None
        )
        waits.append(wait_ms)
        now_ms += wait_ms
    assert waits == [50, 100, 200, 400, 800, 1_600, 2_000, 2_000]


def test_what_is_forgotten_waits_no_more() -> None:
    desk = _Desk()
    desk.tail.book.apply(0, queued(RUN))
    assert desk.taken() == RUN
    desk.lose()
    assert desk.room.any_rests
    assert desk.room.forget(RUN)
    assert (len(desk.room), desk.room.any_rests, desk.room.engine_failures(RUN)) == (0, False, 0)
