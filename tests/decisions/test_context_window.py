"""What of a chat goes into a prompt: laws of the window."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from processors.decisions.context_window import CHUNK_TURNS, Said, first_kept, turns_of
from schemas.vocabulary import Role

COSTS = st.lists(st.integers(1, 50), max_size=40)


def said(number: int, role: Role, content: str = "x") -> Said:
    return Said(message_id=f"m{number}", role=role, content=content)


@given(COSTS, st.integers(-10, 600))
def test_what_is_kept_fits_and_is_a_run_of_the_newest(costs: list[int], room: int) -> None:
    start = first_kept(costs, room)
    assert 0 <= start <= len(costs)
    assert sum(costs[start:]) <= max(room, 0)


@given(COSTS, st.integers(0, 600))
def test_nothing_is_dropped_beyond_what_a_chunk_explains(costs: list[int], room: int) -> None:
    start = first_kept(costs, room)
    fitting = [at for at in range(len(costs) + 1) if sum(costs[at:]) <= room]
    assert start - fitting[0] < CHUNK_TURNS
    assert start % CHUNK_TURNS == 0 or start == fitting[0]
    # A turn is given up for a boundary only where a turn is left.
    assert start == fitting[0] or start < len(costs)


@given(st.integers(8, 30), st.integers(9, 20))
def test_while_a_chat_grows_its_window_begins_at_the_same_turn_for_a_chunk(
    turns: int, held: int
) -> None:
    starts = [first_kept([1] * count, held) for count in range(held, held + turns)]
    moves = [at for at, (a, b) in enumerate(pairwise(starts)) if a != b]
    assert all(b - a >= CHUNK_TURNS for a, b in pairwise(moves))
    assert starts == sorted(starts)


def test_a_turn_too_large_for_any_boundary_leaves_the_newest_that_fit() -> None:
    assert first_kept([1, 1, 1, 1, 90, 1, 1], 10) == 5
    assert first_kept([90], 10) == 1


def test_a_message_without_an_answer_text_is_left_out_so_that_roles_alternate() -> None:
    branch = [
        said(1, Role.USER),
        said(2, Role.ASSISTANT, ""),
        said(3, Role.USER),
        said(4, Role.ASSISTANT, "cut sho"),
        said(5, Role.USER),
        said(6, Role.USER),
        said(7, Role.ASSISTANT),
        said(8, Role.USER),
    ]
    ids = [(turn.asked.message_id, turn.answered.message_id) for turn in turns_of(branch)]
    assert ids == [("m3", "m4"), ("m6", "m7")]


@given(st.lists(st.sampled_from((Role.USER, Role.ASSISTANT)), max_size=12), st.integers(0, 4095))
def test_turns_are_pairs_in_order_whatever_the_branch_holds(roles: list[Role], empty: int) -> None:
    branch = [said(i, role, "" if empty >> i & 1 else "x") for i, role in enumerate(roles)]
    turns = turns_of(branch)
    flat = [message for turn in turns for message in (turn.asked, turn.answered)]
    assert [m.role for m in flat] == [Role.USER, Role.ASSISTANT] * len(turns)
    assert all(turn.answered.content for turn in turns)
    assert [m for m in branch if m in flat] == flat
