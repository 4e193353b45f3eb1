"""What an answer says where phrases are blocked: rules P1 to P4, over any text in any pieces and any takeover."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from inference_workers.decisions.delta_buffer import EMPTY, DeltaBuffer, Piece
from inference_workers.decisions.held_phrases import HeldPieces
from schemas.blocked_phrases import Phrases, PhraseScan, blocked_phrases

PHRASES = blocked_phrases(("bad word", "ab", "a b a"))
TEXT = st.text("ab \n", max_size=16).map(lambda text: text.replace("bb", "bad word"))


def pieces_of(text: str, cuts: list[int]) -> list[Piece]:
    """The text as pieces of one token."""
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    return [
        Piece(text=text[start:end], ids=(start,), index=at, count=1)
        for at, (start, end) in enumerate(pairwise(places))
    ]


def play(phrases: Phrases, pieces: list[Piece], *, said: str = "") -> tuple[DeltaBuffer, bool]:
    """All that is said, and whether the answer ended as blocked."""
    held, buffer = HeldPieces(phrases, said=said), EMPTY
    for piece in pieces:
        if held.blocked:
            return buffer, True
        buffer = held.hear(piece, buffer)
    return (held.end(buffer), held.blocked) if not held.blocked else (buffer, True)


def text_of(buffer: DeltaBuffer) -> str:
    return "".join(piece.text for piece in buffer.pieces)


@given(TEXT, st.lists(st.integers(0, 40)))
@example(text="aba ab", cuts=[2])
@example(text="aba ab ", cuts=[2])
def test_an_answer_without_a_phrase_is_said_whole_and_any_other_is_blocked(
    text: str, cuts: list[int]
) -> None:
    pieces = pieces_of(text, cuts)
    buffer, blocked = play(PHRASES, pieces)
    assert blocked == PHRASES.in_text(text)
    said = text_of(buffer)
    assert text.startswith(said)
    assert list(buffer.pieces) == pieces[: len(buffer.pieces)], "whole pieces, in order"
    if not blocked:
        assert said == text
    else:
        assert not PHRASES.in_text(said)
        assert PHRASES.in_text(text[len(said) :]), "nothing of the phrase was said"


@given(TEXT, st.lists(st.integers(0, 40)), TEXT)
@example(text="aba ab", cuts=[2], other=" ")
def test_whatever_another_attempt_says_instead_no_part_of_a_phrase_was_said_before(
    text: str, cuts: list[int], other: str
) -> None:
    held, buffer = HeldPieces(PHRASES, said=""), EMPTY
    for piece in pieces_of(text, cuts):
        buffer = held.hear(piece, buffer)
        said = text_of(buffer)
        assert not PHRASES.in_text(said)
        scan = PhraseScan(PHRASES)
        scan.take(said + other)
        scan.end()
        assert not scan.found or scan.clear >= len(said)
        if held.blocked:
            break


@given(TEXT, st.lists(st.integers(0, 40)), st.integers(0, 40))
def test_a_takeover_says_what_one_attempt_would_have_said(
    text: str, cuts: list[int], lost_after: int
) -> None:
    pieces = pieces_of(text, cuts)
    held, before = HeldPieces(PHRASES, said=""), EMPTY
    for piece in pieces[:lost_after]:
        before = held.hear(piece, before)
        if held.blocked:
            break
    said = text_of(before)
    rest = pieces[len(before.pieces) :]
    after, blocked = play(PHRASES, rest, said=said)
    whole, blocked_at_once = play(PHRASES, pieces)
    assert (said + text_of(after), blocked) == (text_of(whole), blocked_at_once)


def test_text_is_held_no_longer_than_a_phrase_may_go_on() -> None:
    held, buffer = HeldPieces(blocked_phrases(("bad word",)), said=""), EMPTY
    said = []
    for at, text in enumerate(("so ", "b", "ad", " day", ", a bad", " ", "word", "y one")):
        buffer = held.hear(Piece(text=text, ids=None, index=at, count=1), buffer)
        said.append(text_of(buffer))
    assert said == ["so "] * 3 + ["so bad day"] * 4 + ["so bad day, a bad wordy one"]


def test_without_phrases_nothing_is_held() -> None:
    buffer, blocked = play(blocked_phrases(()), pieces_of("a bad word", [1, 2, 5]))
    assert (text_of(buffer), blocked) == ("a bad word", False)
