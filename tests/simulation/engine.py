"""The simulated engine: tokens whose text tells what was said before them, so that any mixture of two attempts shows.

A token is three characters: two hex digits of a checksum over the whole answer before it, and a letter drawn anew in every attempt.
Two attempts therefore say different things, and a token that follows anything but the text that its engine was given is found out.
Its id is a checksum of the answer through it.
"""

from __future__ import annotations

from random import Random
from typing import Final
from zlib import crc32

from inference_workers.decisions.delta_buffer import Piece

TOKEN_CHARS: Final = 3
# Some say a space, so that an answer has words of two digits that phrases can be made of.
LETTERS: Final = "abcdef  "


def next_token(text: str, letter: str) -> str:
    """What an engine says after `text`."""
    return f"{crc32(text.encode()) & 0xFF:02x}{letter}"


def token_ids(text: str, start: int) -> tuple[int, ...]:
    """The ids of the tokens of an answer from number `start` on."""
    count = len(text) // TOKEN_CHARS
    return tuple(
        crc32(text[: TOKEN_CHARS * (at + 1)].encode()) & 0xFFFF for at in range(start, count)
    )


def incoherent(text: str) -> int | None:
    """The first token that does not follow what lies before it, or None."""
    if len(text) % TOKEN_CHARS:
        return len(text) // TOKEN_CHARS
    for at in range(0, len(text), TOKEN_CHARS):
        if text[at : at + 2] != f"{crc32(text[:at].encode()) & 0xFF:02x}":
            return at // TOKEN_CHARS
    return None


class Stream:
    """One answer being made, from what was emitted before. `tokens_max` is what the grant leaves."""

    def __init__(
        self, rng: Random, *, emitted: str, emitted_ids: tuple[int, ...] | None, tokens_max: int
    ) -> None:
        self._rng = rng
        self._text = emitted
        start = len(emitted) // TOKEN_CHARS
        assert emitted_ids is None or emitted_ids == token_ids(emitted, 0), (
            "E2: a takeover feeds the ids of exactly what was said"
        )
        self._exact = rng.random() < 0.7
        self._left = rng.choice((0, 3, 9, 20, 40))
        self._tokens_left = tokens_max
        self._at = start

    @property
    def stopped(self) -> bool:
        """The model ended its turn."""
        return self._left == 0

    @property
    def full(self) -> bool:
        """The grant is used up."""
        return self._tokens_left == 0

    def pieces(self) -> list[Piece]:
        """What it makes in one step: nothing, or some tokens in one or two pieces."""
        made = []
        for _ in range(self._rng.choice((0, 1, 1, 2))):
            count = min(self._rng.randint(1, 2), self._left, self._tokens_left)
            if count == 0:
                break
            start = len(self._text)
            for _ in range(count):
                self._text += next_token(self._text, self._rng.choice(LETTERS))
            made.append(
                Piece(
                    text=self._text[start:],
                    ids=token_ids(self._text, self._at) if self._exact else None,
                    index=self._at,
                    count=count,
                )
            )
            self._at += count
            self._left -= count
            self._tokens_left -= count
        return made
