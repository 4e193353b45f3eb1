"""A list of phrases is found in whole words, in any case and spacing, in pieces as in the whole, and never shown a part of."""

from __future__ import annotations

import unicodedata
from itertools import groupby

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schemas.blocked_phrases import PhraseScan, blocked_phrases, units

LETTERS = "aAbﬀßeé\u0301\u0323½ \n\u2003-❤"
TEXTS = st.text(LETTERS, max_size=24)
PHRASES = st.lists(st.text(LETTERS, min_size=1, max_size=6).filter(units), max_size=4).map(tuple)


def ordered(text: str) -> str:
    return unicodedata.normalize("NFKD", text)


def plain_units(text: str) -> list[str]:
    """B1 and B2 once more, over the whole text and without an eye to speed."""
    alike = "".join(ordered(ordered(char).casefold()) for char in text)
    found: list[str] = []
    word = ""
    for char in [*alike, ""]:
        if char.isalnum() or (word and char and unicodedata.combining(char)):
            word += char
            continue
        found += [ordered(word)] if word else []
        word = ""
        found += [" " if char.isspace() else char] if char else []
    return [unit for unit, same in groupby(found) for unit in (" " if unit == " " else same)]


def plain_end(phrases: tuple[str, ...], text: str) -> int | None:
    """In units, where the phrase that ends first ends."""
    row = plain_units(text)
    ends = [
        at + len(sought)
        for sought in map(plain_units, map(str.strip, phrases))
        for at in range(len(row) - len(sought) + 1)
        if row[at : at + len(sought)] == sought
    ]
    return min(ends, default=None)


@pytest.mark.parametrize(
    ("phrase", "text", "found"),
    [
        ("bad word", "a BAD\n\t word!", True),
        ("bad word", "a bad wordy one", False),
        ("bad word", "not-bad word", True),
        ("bad word", "bad, word", False),
        ("bad", "badly", False),
        ("bad", "_bad_", True),
        ("bad", "it is bad", True),
        ("Straße", "STRASSE", True),
        ("café", "cafe\u0301", True),
        ("cafe", "café", False),
        ("final", "\ufb01nal", True),
        ("full", "ｆｕｌｌ", True),
        ("c++", "c++11", True),
        ("a a b", "a a a b", True),
        ("bad", "b\u200bad", False),
        ("坏话", "这是坏话吗", False),
        ("坏话", "这是「坏话」吗", True),
        ("❤ you", "I ❤  you", True),
    ],
)
def test_a_phrase_is_found_in_whole_words_and_in_any_case_and_spacing(
    phrase: str, text: str, found: bool
) -> None:
    assert blocked_phrases((phrase,)).in_text(text) is found


def test_an_empty_list_finds_nothing() -> None:
    assert not blocked_phrases(())
    assert not blocked_phrases(()).in_text("anything")


@given(phrases=PHRASES, text=TEXTS)
@example(phrases=("a b a", "b"), text="a b")
@example(phrases=("a", "a a b"), text="a a a b")
def test_it_finds_what_a_plain_search_finds(phrases: tuple[str, ...], text: str) -> None:
    assert blocked_phrases(phrases).in_text(text) == (plain_end(phrases, text) is not None)


@given(phrases=PHRASES, text=TEXTS, cuts=st.lists(st.integers(0, 24)))
def test_cut_into_pieces_it_is_found_alike_and_no_part_of_it_was_ever_clear(
    phrases: tuple[str, ...], text: str, cuts: list[int]
) -> None:
    listed = blocked_phrases(phrases)
    scan, clears, before = PhraseScan(listed), [0], 0
    for cut in [*sorted(cut for cut in cuts if cut < len(text)), len(text)]:
        scan.take(text[before:cut])
        before = cut
        assert scan.found or 0 <= scan.clear <= cut
        clears.append(scan.clear)
    scan.end()
    assert scan.found == listed.in_text(text)
    assert clears == sorted(clears), "what was clear stays clear"
    if not scan.found:
        assert scan.clear == len(text)
        return
    shown, held = text[: scan.clear], text[scan.clear :]
    assert not listed.in_text(shown)
    assert listed.in_text(held), "all of it was held"


def test_text_is_held_only_while_a_phrase_may_go_on() -> None:
    scan = PhraseScan(blocked_phrases(("bad word", "word")))
    held = []
    for piece in ("so b", "ad", " ", "day ", "bad", "ly wor", "th b"):
        scan.take(piece)
        held.append(scan.clear)
    assert held == [3, 3, 3, 11, 11, 17, 23]


def test_time_grows_with_the_text_alone() -> None:
    hard = blocked_phrases(tuple("a " * size + f"b{size}" for size in range(1, 30)))
    scan = PhraseScan(hard)
    for _ in range(20_000):
        scan.take("a ")
    assert not scan.found
    scan.take("a" * 100_000)
    assert scan.clear == 140_000, "a word longer than any is clear"
