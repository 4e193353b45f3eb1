"""What of a chat goes into a prompt.

Rules (cited by assertions and tests):
  W1  The system prompt is pinned: it comes first, whole, or the prompt fails.
  W2  The new message comes last. Between the two stand turns of its branch: a run of the newest ones, in order, each one whole.
  W3  A turn is a user's message and its answer. An answer that was cut short counts with the text it has. A message without any
      answer text is left out, so that roles alternate.
  W4  The prompt never exceeds its input budget.
  W5  The oldest turns are dropped in chunks: the first kept turn has a number, counted from the chat's root, that is a multiple of
      CHUNK_TURNS. So while a chat grows its prompts share their beginning, and a worker's prefix cache stays warm.
  W6  Where no such beginning fits, the newest turns that fit are kept one by one: context matters more than a warm cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from schemas.vocabulary import Role

CHUNK_TURNS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A message of the branch. `content` of an answer is what its run had when it ended."""

    message_id: str
    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A user's message and its answer."""

    asked: Said
    answered: Said


def turns_of(branch: Sequence[Said]) -> list[Turn]:
    """W3. The turns of a branch, oldest first."""
    turns: list[Turn] = []
    asked: Said | None = None
    for message in branch:
        match message.role:
            case Role.USER:
                asked = message  # One before it that was never answered is left out.
            case Role.ASSISTANT:
                if asked is not None and message.content:
                    turns.append(Turn(asked=asked, answered=message))
                asked = None
            case Role.SYSTEM:
                raise AssertionError("the system prompt belongs to the chat, not to its branches")
            case _:
                assert_never(message.role)
    return turns


def first_kept(costs: Sequence[int], room: int) -> int:
    """W4 to W6. The number of the first turn kept, where turn i costs costs[i] tokens and `room` tokens are left for turns."""
    fits = len(costs)
    left = room
    while fits > 0 and costs[fits - 1] <= left:
        fits -= 1
        left -= costs[fits]
    boundary = -(-fits // CHUNK_TURNS) * CHUNK_TURNS
    return boundary if boundary < len(costs) else fits
