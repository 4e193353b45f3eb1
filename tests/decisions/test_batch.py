"""Which requests start, and when the pieces of an answer are sent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference_workers.decisions.batch_slots import LANES_BY_PRIORITY, choose, free_floor
from inference_workers.decisions.delta_buffer import (
    EMPTY,
    FLUSH_EVERY_MS,
    FLUSH_TOKENS,
    DeltaBuffer,
    Piece,
    add,
    take,
)
from schemas.vocabulary import Lane

LANES = st.sampled_from(list(Lane))


def piece(index: int, count: int = 1, *, exact: bool = True) -> Piece:
    ids = tuple(range(index, index + count)) if exact else None
    return Piece(text="x" * count, ids=ids, index=index, count=count)


def test_l2_lanes_go_by_priority_and_l4_by_arrival_within_one() -> None:
    waiting = {Lane.BACKGROUND: ["b"], Lane.PLUS: ["p1", "p2"], Lane.TEAM: ["t"]}
    assert choose(waiting, {}, slots=8) == ["t", "p1", "p2", "b"]


def test_l3_the_free_lane_gets_its_floor_before_anybody_and_no_more() -> None:
    waiting = {Lane.FREE: ["f1", "f2"], Lane.TEAM: ["t1", "t2", "t3", "t4"]}
    assert choose(waiting, {}, slots=4) == ["f1", "t1", "t2", "t3"]
    assert choose(waiting, {Lane.FREE: 1}, slots=4) == ["t1", "t2", "t3"]


def test_l3_a_floor_that_nobody_claims_is_used_by_others() -> None:
    assert choose({Lane.TEAM: ["t1", "t2"]}, {}, slots=2) == ["t1", "t2"]


def test_l3_a_single_slot_has_no_floor() -> None:
    assert choose({Lane.FREE: ["f"], Lane.TEAM: ["t"]}, {}, slots=1) == ["t"]


@given(
    st.dictionaries(LANES, st.integers(0, 9)),
    st.dictionaries(LANES, st.integers(0, 5)),
    st.integers(1, 20),
)
def test_slots_are_never_oversubscribed_nor_left_empty(
    waiting: dict[Lane, int], busy: dict[Lane, int], slots: int
) -> None:
    runs = {lane: [f"{lane}{n}" for n in range(count)] for lane, count in waiting.items()}
    started = choose(runs, busy, slots=slots)
    free = max(0, slots - sum(busy.values()))
    assert len(started) == min(free, sum(waiting.values())), "L1"
    assert len(set(started)) == len(started)
    free_runs = busy.get(Lane.FREE, 0) + sum(1 for run in started if run in runs.get(Lane.FREE, []))
    wanted = busy.get(Lane.FREE, 0) + min(free, waiting.get(Lane.FREE, 0))
    assert free_runs >= min(free_floor(slots), wanted), "L3"


def test_every_lane_is_served_in_the_end() -> None:
    assert set(LANES_BY_PRIORITY) == set(Lane)


def test_f1_the_first_piece_is_due_at_once() -> None:
    assert EMPTY.due_ms is None
    assert add(EMPTY, piece(0)).due_ms == 0


def test_f2_later_pieces_wait_for_the_interval_or_for_enough_tokens() -> None:
    _, buffer = take(add(EMPTY, piece(0)), now_ms=100)
    buffer = add(buffer, piece(1))
    assert buffer.due_ms == 100 + FLUSH_EVERY_MS
    buffer = add(buffer, piece(2, FLUSH_TOKENS - 1))
    assert buffer.due_ms == 0


def test_f3_joined_pieces_have_ids_only_where_all_have() -> None:
    exact = add(add(EMPTY, piece(0, 2)), piece(2))
    assert take(exact, now_ms=0)[0] == Piece(text="xxx", ids=(0, 1, 2), index=0, count=3)
    assert take(add(exact, piece(3, exact=False)), now_ms=0)[0].ids is None


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=30))
def test_nothing_is_lost_or_doubled_by_joining(steps: list[tuple[int, bool]]) -> None:
    buffer: DeltaBuffer = EMPTY
    index, sent = 0, 0
    for count, flush in steps:
        buffer = add(buffer, piece(index, count))
        index += count
        if flush:
            joined, buffer = take(buffer, now_ms=0)
            assert joined.index == sent
            sent += joined.count
            assert len(joined.text) == joined.count
    assert sent + buffer.count == index
