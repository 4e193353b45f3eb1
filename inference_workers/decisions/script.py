"""Decides what the scripted engine says: a pure function of the prompt's ids.

S1. The same prompt ids give the same tokens, on any machine, in any attempt. Token k depends on
    nothing else, so an answer goes on from any cut.
S2. The answer has exactly the tokens that the script gives it, and then the turn ends.
S3. A phrase is one or more tokens; a character may be spread over several. The answer never ends
    inside a phrase.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from itertools import count as naturals
from typing import Final

LOOP_FROM: Final = 10
LOOP_PHRASES: Final = 7


class Script(StrEnum):
    """What the phrases are made of."""

    WORDS = "words"
    # Everything that frames, counters and stores stumble over.
    UNICODE = "unicode"
    # A model that is caught in a cycle: from token LOOP_FROM on the same LOOP_PHRASES phrases of words.
    LOOP = "loop"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptToken:
    """One token. `says` may be part of a character."""

    id: int
    says: bytes
    ends_phrase: bool


_WORDS: Final = [
    "the",
    "log",
    "keeps",
    "every",
    "word",
    "in",
    "order",
    "and",
    "each",
    "reader",
    "folds",
    "it",
    "to",
    "one",
    "answer",
    "while",
    "workers",
    "come",
    "and",
    "go",
    "so",
    "nothing",
    "said",
    "is",
    "lost",
    "or",
    "said",
    "twice",
    "and",
    "what",
    "was",
    "stopped",
    "stays",
    "stopped",
    "until",
    "somebody",
    "asks",
    "again",
    "about",
    "rivers",
    "stones",
    "bridges",
    "birds",
    "letters",
    "harbours",
    "winters",
    "engines",
]

_UNICODE: Final[tuple[tuple[bytes, ...], ...]] = (
    (b" plain",),
    (b"\xf0\x9f", b"\x98", b"\x80"),  # a face over three tokens
    (b" \xe2\x9c", b"\x85"),  # a space and a character begun in one token
    (b"\r",),
    (b"\n",),
    (b"\r\n\r\n",),
    (b"\xe2\x80\xa8",),  # U+2028
    (b"\xe2\x80", b"\xa9"),  # U+2029 over two tokens
    (b"e", b"\xcc\x81"),  # a combining accent
    (b"\x00",),
    (b"\xe2\x80\xae", b"abc", b"\xe2\x80\xac"),  # right to left, and back
    (b"\xef\xbb\xbf",),  # a byte order mark
    (b"\xee\x80\x80\xee\x80\x81",),  # private use
    # A family: four characters and three joiners, over five tokens.
    (
        b"\xf0\x9f\x91\xa8\xe2\x80",
        b"\x8d\xf0\x9f",
        b"\x91\xa9\xe2\x80\x8d",
        b"\xf0\x9f\x91",
        b"\xa7",
    ),
    (b"data: x\n\nid: 7\n",),
    (b"<|im_end|>",),
    (b" </script>",),
    (b"\xc2\xa0",),
)


def _phrases(texts: tuple[tuple[bytes, ...], ...]) -> tuple[tuple[ScriptToken, ...], ...]:
    ids = naturals()
    return tuple(
        tuple(
            ScriptToken(id=next(ids), says=says, ends_phrase=place == len(phrase))
            for place, says in enumerate(phrase, start=1)
        )
        for phrase in texts
    )


_PHRASES: Final = {
    Script.WORDS: _phrases(tuple((b" " + word.encode(),) for word in _WORDS)),
    Script.UNICODE: _phrases(_UNICODE),
    Script.LOOP: _phrases(tuple((b" " + word.encode(),) for word in _WORDS)),
}


def seed_of(prompt_ids: tuple[int, ...]) -> bytes:
    """What the prompt contributes."""
    return blake2b(array("q", prompt_ids).tobytes(), digest_size=16).digest()


def answer(
    *, script: Script, prompt_ids: tuple[int, ...], tokens: int, start: int = 0
) -> Iterator[ScriptToken]:
    """The answer's tokens from number `start` on; it has `tokens` in all."""
    phrases, seed, place = _PHRASES[script], seed_of(prompt_ids), 0
    for turn in naturals():
        if place >= tokens:
            return
        drawn = turn
        if script is Script.LOOP and turn > LOOP_FROM:
            drawn = LOOP_FROM + (turn - LOOP_FROM) % LOOP_PHRASES
        phrase = phrases[_draw(seed, drawn, len(phrases))]
        if len(phrase) > tokens - place:
            phrase = phrases[0]  # S2 and S3: one token long in every script.
        for token in phrase:
            if place >= start:
                yield token
            place += 1


def _draw(seed: bytes, turn: int, below: int) -> int:
    digest = blake2b(turn.to_bytes(8, "big"), key=seed, digest_size=8).digest()
    return int.from_bytes(digest, "big") % below


assert all(len(phrases[0]) == 1 for phrases in _PHRASES.values()), "S3: the filler is one token"
