"""What one attempt has heard from its engine and what of it may be said now: held, joined and judged.

The rules lie where each part is decided: P1 to P4 in `held_phrases.py`, F1 to F3 in `delta_buffer.py`, R1 to R4 in `repetition.py`.
"""

from __future__ import annotations

from inference_workers.decisions.delta_buffer import EMPTY, DeltaBuffer, Piece, take
from inference_workers.decisions.held_phrases import HeldPieces
from inference_workers.decisions.repetition import repeats, said_so_far, say
from schemas.blocked_phrases import Phrases


class Speech:
    """The pieces of one attempt, from the engine to the record. What the attempts before said belongs to the answer (P4, R4)."""

    def __init__(self, phrases: Phrases, *, said_ids: tuple[int, ...] | None, said: str) -> None:
        self._held = HeldPieces(phrases, said=said)
        self._buffer: DeltaBuffer = EMPTY
        self._newest = said_so_far(ids=said_ids, text=said)

    @property
    def blocked(self) -> bool:
        """The answer holds a blocked phrase: it is over, but for what was clear before it (P2)."""
        return self._held.blocked

    @property
    def repeats(self) -> bool:
        """What was said by now repeats itself (R1)."""
        return repeats(self._newest)

    @property
    def waiting(self) -> int:
        """Pieces that may be said and were not."""
        return len(self._buffer.pieces)

    @property
    def due_ms(self) -> int | None:
        """When they are to be said (0: now); None where there are none."""
        return self._buffer.due_ms

    def hear(self, piece: Piece) -> None:
        """The engine made this piece."""
        self._buffer = self._held.hear(piece, self._buffer)

    def end(self) -> None:
        """It makes no more (P3)."""
        self._buffer = self._held.end(self._buffer)

    def take(self, *, now_ms: int) -> Piece:
        """All that may be said, as one piece that is said now."""
        piece, self._buffer = take(self._buffer, now_ms=now_ms)
        self._newest = say(self._newest, ids=piece.ids, text=piece.text)
        return piece
