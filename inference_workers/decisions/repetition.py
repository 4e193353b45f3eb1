"""When an answer that says the same thing over and over is ended (requirement E3).

A small model may fall into a cycle that only its grant would end: every further token costs the account and helps nobody.

Rules:
  R1  An answer repeats itself when its newest tokens are one cycle of at most CYCLE_TOKENS_MAX tokens, said at least REPEATS_MIN
      times in a row without any difference, over at least REPEATED_TOKENS_MIN tokens.
  R2  Both bounds of R1 are needed: a table, a list or a ruler repeats short cycles often and long ones seldom, but in every row
      something differs. A page of zeros that somebody asked for is ended too; that is the price.
  R3  Where the ids are not exact the text is judged instead, by the same rule in characters, CHARS_A_TOKEN of them for a token.
  R4  What is judged is a function of what was said in all attempts, however it was cut into pieces: a takeover decides the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

CYCLE_TOKENS_MAX: Final = 64
REPEATS_MIN: Final = 4
REPEATED_TOKENS_MIN: Final = 160
CHARS_A_TOKEN: Final = 4

TOKENS_HELD: Final = max(REPEATED_TOKENS_MIN, REPEATS_MIN * CYCLE_TOKENS_MAX)
CHARS_HELD: Final = TOKENS_HELD * CHARS_A_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestSaid:
    """The end of an answer, as far as R1 looks. `ids` are None from the first token on whose id is not exact."""

    ids: tuple[int, ...] | None
    text: str


def said_so_far(*, ids: tuple[int, ...] | None, text: str) -> NewestSaid:
    """The end of what earlier attempts said."""
    return NewestSaid(
        ids=None if ids is None else ids[-TOKENS_HELD:],
        text=text[-CHARS_HELD:],
    )


def say(newest: NewestSaid, *, ids: tuple[int, ...] | None, text: str) -> NewestSaid:
    """The end of the answer after one more piece."""
    exact = newest.ids is not None and ids is not None
    return said_so_far(
        ids=(*(newest.ids or ()), *(ids or ())) if exact else None,
        text=newest.text + text,
    )


def repeats(newest: NewestSaid) -> bool:
    """R1 and R3."""
    if newest.ids is not None:
        return _ends_in_cycle(newest.ids, unit=1)
    return _ends_in_cycle(newest.text, unit=CHARS_A_TOKEN)


def _ends_in_cycle(said: Sequence[object], *, unit: int) -> bool:
    """Whether `said` ends as R1 has it, where `unit` elements stand for a token."""
    for period in range(1, CYCLE_TOKENS_MAX * unit + 1):
        covered = max(REPEATS_MIN * period, REPEATED_TOKENS_MIN * unit)
        if covered > len(said):
            return False  # Longer cycles need no less.
        if said[-1] != said[-1 - period]:
            continue
        end = said[-covered:]
        if end[period:] == end[:-period]:
            return True
    return False
