"""When the pieces of an answer that an engine made become one record on the token log.

Rules:
  F1  The first piece of an attempt is due at once.
  F2  After that a record is due FLUSH_EVERY_MS after the last one, or as soon as FLUSH_TOKENS tokens wait.
  F3  Joined pieces have ids only where every one of them has; else the engine does not know them exactly from there on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

FLUSH_EVERY_MS: Final = 25
FLUSH_TOKENS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """`count` tokens of the answer from `index` on; `ids` are all of them or None."""

    text: str
    ids: tuple[int, ...] | None
    index: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaBuffer:
    """What waits. `flushed_ms` is when the last record was taken, None before the first."""

    pieces: tuple[Piece, ...] = ()
    count: int = 0
    flushed_ms: int | None = None

    @property
    def due_ms(self) -> int | None:
        """When what waits is to be sent (0: now); None while nothing waits."""
        if not self.pieces:
            return None
        if self.flushed_ms is None or self.count >= FLUSH_TOKENS:
            return 0  # F1, F2
        return self.flushed_ms + FLUSH_EVERY_MS  # F2


EMPTY: Final = DeltaBuffer()


def add(buffer: DeltaBuffer, piece: Piece) -> DeltaBuffer:
    """The engine made this."""
    assert piece.count >= 1, "a piece has a token"
    if buffer.pieces:
        last = buffer.pieces[-1]
        assert piece.index == last.index + last.count, "the engine's pieces are dense"
    return replace(buffer, pieces=(*buffer.pieces, piece), count=buffer.count + piece.count)


def take(buffer: DeltaBuffer, *, now_ms: int) -> tuple[Piece, DeltaBuffer]:
    """Everything that waits as one piece, and the buffer after it."""
    assert buffer.pieces, "something waits"
    ids: list[int] | None = []
    for piece in buffer.pieces:
        if piece.ids is None or ids is None:
            ids = None  # F3
        else:
            ids.extend(piece.ids)
    joined = Piece(
        text="".join(piece.text for piece in buffer.pieces),
        ids=None if ids is None else tuple(ids),
        index=buffer.pieces[0].index,
        count=buffer.count,
    )
    return joined, DeltaBuffer(flushed_ms=now_ms)
