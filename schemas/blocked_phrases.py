"""Whether a text holds one of an operator's phrases. A list of phrases, and nothing more: it knows no meaning and no other spelling.

Rules (cited by assertions and tests):
  B1  Characters that are compatible (NFKD, so NFKC likewise) or differ only by case are alike.
  B2  A text is a row of units. A word is a unit: letters and digits, and the combining marks on them, as far as they reach. White space,
      however much, is one unit, and so is every other character. A phrase is found where its units follow one another: whole words only.
      Where a script writes no spaces between words, what lies between two other characters is one word.
  B3  `PhraseScan` takes a text in pieces, in time that grows with the text alone, and finds what it would find in the whole.
  B4  It says at every moment up to where the text is clear: no phrase begins before that place, whatever follows.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

PHRASES_MAX: Final = 100
PHRASE_CHARS_MAX: Final = 64

_SPACE: Final = " "
# The commonest runs at once, every other character by itself; nothing is tried twice.
_RUNS: Final = re.compile(r"(?P<word>[0-9A-Za-z]+)|(?P<space>[\t-\r ]+)|.", re.DOTALL)
_LISTS_KEPT: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """A beginning that phrases share, of `depth` units. `shorter`: the longest other beginning that it ends in.

    `begins` are the beginnings of the words that go on from here. `found`: it ends in a whole phrase.
    """

    depth: int
    shorter: int
    found: bool
    after: dict[str, int]
    begins: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phrases:
    """A list that is ready to be looked for. The first node is the empty beginning."""

    nodes: tuple[_Node, ...]
    word_chars_max: int

    def __bool__(self) -> bool:
        return len(self.nodes) > 1

    def in_text(self, text: str) -> bool:
        """Whether the text holds one of them."""
        scan = PhraseScan(self)
        scan.take(text)
        scan.end()
        return scan.found


@lru_cache(maxsize=_LISTS_KEPT)
def blocked_phrases(texts: tuple[str, ...]) -> Phrases:
    """The list of these phrases, in any spelling of B1 and B2."""
    after: list[dict[str, int]] = [{}]
    ends: set[int] = set()
    for text in texts:
        at = 0
        for unit in units(text):
            if unit not in after[at]:
                after.append({})
                after[at][unit] = len(after) - 1
            at = after[at][unit]
        if at:
            ends.add(at)
    return Phrases(
        nodes=_nodes(after, ends),
        word_chars_max=max((len(unit) for next_ in after for unit in next_), default=0),
    )


def units(text: str) -> tuple[str, ...]:
    """B1, B2. The units of a whole text, without white space at its ends."""
    found = [unit for unit, _ in _Units().take(text, last=True)]
    while found and found[-1] == _SPACE:
        found.pop()
    while found and found[0] == _SPACE:
        found.pop(0)
    return tuple(found)


def _nodes(after: Sequence[dict[str, int]], ends: set[int]) -> tuple[_Node, ...]:
    """Each beginning with the longest shorter one, level by level."""
    shorter, depth = [0] * len(after), [0] * len(after)
    due = deque([0])
    while due:
        at = due.popleft()
        for unit, to in after[at].items():
            due.append(to)
            depth[to] = depth[at] + 1
            if at:
                shorter[to] = _onward(after, shorter, shorter[at], unit)
            if shorter[to] in ends:
                ends.add(to)
    return tuple(
        _Node(
            depth=depth[at],
            shorter=shorter[at],
            found=at in ends,
            after=after[at],
            begins=frozenset(
                unit[:size]
                for unit in after[at]
                if unit[0].isalnum()
                for size in range(1, len(unit) + 1)
            ),
        )
        for at in range(len(after))
    )


def _onward(after: Sequence[dict[str, int]], shorter: Sequence[int], at: int, unit: str) -> int:
    while at and unit not in after[at]:
        at = shorter[at]
    return after[at].get(unit, 0)


class PhraseScan:
    """B3, B4. After a phrase was `found` nothing more is looked at."""

    def __init__(self, phrases: Phrases) -> None:
        self._phrases = phrases
        self._units = _Units(word_chars_max=phrases.word_chars_max)
        self._node = phrases.nodes[0]
        self._starts: deque[int] = deque()
        self.found = False
        self.clear = 0
        """How many characters of the text are clear (B4)."""

    def take(self, text: str) -> None:
        """The text goes on."""
        self._take(text, last=False)

    def end(self) -> None:
        """The text is complete."""
        self._take("", last=True)

    def _take(self, text: str, *, last: bool) -> None:
        if self.found or not self._phrases:
            self.clear += 0 if self.found else len(text)
            return
        for unit, start in self._units.take(text, last=last):
            if self._completes(unit, start):
                self.found, self.clear = True, self._starts[0]
                return
        self.clear = self._units.read if last else self._clear()

    def _completes(self, unit: str, start: int) -> bool:
        """Go on by one unit; whether a phrase ends with it."""
        nodes, node = self._phrases.nodes, self._node
        while node.depth and unit not in node.after:
            node = nodes[node.shorter]
        self._node = node = nodes[node.after.get(unit, 0)]
        self._starts.append(start)
        while len(self._starts) > node.depth:
            self._starts.popleft()
        return node.found

    def _clear(self) -> int:
        open_word = self._units.open_word
        if open_word is None:
            return self._starts[0] if self._starts else self._units.read
        begun, word_start = open_word
        node = self._node
        while begun is None or begun not in node.begins:
            if begun is None or not node.depth:
                return self._units.read
            node = self._phrases.nodes[node.shorter]
        return self._starts[-node.depth] if node.depth else word_start


class _Units:
    """Divides a text that comes in pieces. A word ends where something else comes."""

    def __init__(self, *, word_chars_max: int | None = None) -> None:
        self.read = 0
        """Characters taken."""
        self._word = ""
        self._word_start = 0
        self._spaced = False
        # A longer word than any that is looked for is not kept.
        self._kept_max = word_chars_max + 1 if word_chars_max is not None else None

    def take(self, text: str, *, last: bool) -> Iterator[tuple[str, int]]:
        """The units that are complete now, each with the place of its first character; `last`: the text ends here."""
        before, self.read = self.read, self.read + len(text)
        for run in _RUNS.finditer(text):
            at, chars = before + run.start(), run.group()
            if run.lastgroup == "word":
                self._go_on(chars.lower(), at)
                continue
            for char in _SPACE if run.lastgroup == "space" else _alike(chars):
                if char.isalnum() or (self._word and _is_mark(char)):
                    self._go_on(char, at)
                else:
                    if self._word:
                        yield self._whole_word()
                    spaced, self._spaced = self._spaced, char.isspace()
                    if not (spaced and self._spaced):
                        yield _SPACE if self._spaced else char, at
        if last and self._word:
            yield self._whole_word()

    def _go_on(self, chars: str, at: int) -> None:
        if not self._word:
            self._word_start, self._spaced = at, False
        self._word = (self._word + chars)[: self._kept_max]

    @property
    def open_word(self) -> tuple[str | None, int] | None:
        """What is certain of the word that may go on, None where it is too long, and its place; None: there is no such word."""
        if not self._word:
            return None
        if len(self._word) == self._kept_max:
            return None, self._word_start
        certain = len(self._word)
        while _is_mark(self._word[certain - 1]):
            certain -= 1  # Further marks may yet come before these.
        return _in_order(self._word[:certain]), self._word_start

    def _whole_word(self) -> tuple[str, int]:
        word, self._word = _in_order(self._word), ""
        return word, self._word_start


def _in_order(word: str) -> str:
    """The marks on each letter in the order that makes equal words equal."""
    return unicodedata.normalize("NFKD", word)


@lru_cache(maxsize=4_096)
def _alike(char: str) -> str:
    """B1. The characters that stand for this one."""
    for _ in range(2):  # The letters of some signs have a case of their own.
        char = unicodedata.normalize("NFKD", char).casefold()
    return unicodedata.normalize("NFKD", char)


def _is_mark(char: str) -> bool:
    return unicodedata.category(char).startswith("M")
