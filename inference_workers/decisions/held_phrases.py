"""Which pieces of an answer may be said where it may not hold a blocked phrase (invariant I11).

Rules (cited by assertions and tests):
  P1  Pieces are said whole and in order, and only up to the end of a piece at which the text so far was clear to its end (rule B4). So no
      part of a blocked phrase is ever said, and what was said holds none, wherever the run ends or another attempt goes on.
  P2  The piece with which a phrase is complete ends the answer: neither it nor what was held is said.
  P3  At the end of an answer without a phrase what was held is said.
  P4  What earlier attempts said belongs to the text. What they held was neither said nor counted, so it is made again.
"""

from __future__ import annotations

from inference_workers.decisions.delta_buffer import DeltaBuffer, Piece, add
from schemas.blocked_phrases import Phrases, PhraseScan


class HeldPieces:
    """The pieces of one attempt that wait until they are clear."""

    def __init__(self, phrases: Phrases, *, said: str) -> None:
        """`said` is the text of the attempts before (P4)."""
        self._scan = PhraseScan(phrases)
        self._scan.take(said)
        self._chars = len(said)
        self._pieces: list[Piece] = []

    @property
    def blocked(self) -> bool:
        """The text holds a phrase: the answer is over (P2)."""
        return self._scan.found

    def hear(self, piece: Piece, buffer: DeltaBuffer) -> DeltaBuffer:
        """The engine made this piece: the buffer with what may be said now."""
        assert not self.blocked, "P2: nothing follows a phrase"
        self._pieces.append(piece)
        self._chars += len(piece.text)
        self._scan.take(piece.text)
        return self._with_clear(buffer)

    def end(self, buffer: DeltaBuffer) -> DeltaBuffer:
        """No more pieces come (P3)."""
        self._scan.end()
        return self._with_clear(buffer)

    def _with_clear(self, buffer: DeltaBuffer) -> DeltaBuffer:
        """P1. A word that goes on in the next piece might alone be a phrase: a piece before a clear place is not said for that alone."""
        if self._scan.clear < self._chars:
            return buffer
        for piece in self._pieces:
            buffer = add(buffer, piece)
        self._pieces.clear()
        return buffer
