"""Which pieces of an answer may be said where it may not hold a blocked phrase (invariant I11).

Rules (cited by assertions and tests):
  P1  Pieces are said whole and in order: each as soon as it is clear to its end (rule B4), so no part of a blocked phrase is ever said.
  P2  The piece with which a phrase is complete ends the answer: what is clear before the phrase is said, and nothing after.
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
        self._said_chars = len(said)
        self._pieces: list[Piece] = []

    @property
    def blocked(self) -> bool:
        """The text holds a phrase: the answer is over (P2)."""
        return self._scan.found

    def hear(self, piece: Piece, buffer: DeltaBuffer) -> DeltaBuffer:
        """The engine made this piece: the buffer with what may be said now."""
        assert not self.blocked, "P2: nothing follows a phrase"
        self._pieces.append(piece)
        self._scan.take(piece.text)
        return self._with_clear(buffer)

    def end(self, buffer: DeltaBuffer) -> DeltaBuffer:
        """No more pieces come (P3)."""
        self._scan.end()
        return self._with_clear(buffer)

    def _with_clear(self, buffer: DeltaBuffer) -> DeltaBuffer:
        """P1."""
        while self._pieces and self._said_chars + len(self._pieces[0].text) <= self._scan.clear:
            piece = self._pieces.pop(0)
            self._said_chars += len(piece.text)
            buffer = add(buffer, piece)
        return buffer
