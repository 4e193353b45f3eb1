"""When the pieces of an answer are sent: rules F1 to F3."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference_workers.decisions.delta_buffer import (
    EMPTY,
    FLUSH_EVERY_MS,
    FLUSH_TOKENS,
    DeltaBuffer,
    Piece,
    add,
    take,
)


def piece(index: int, count: int = 1, *, exact: bool = True) -> Piece:
    ids = tuple(range(index, index + count)) if exact else None
    return Piece(text="x" * count, ids=ids, index=index, count=count)


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
