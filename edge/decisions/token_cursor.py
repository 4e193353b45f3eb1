"""Event ids: the opaque cursors from which a client resumes a run on any edge process.

An id holds a position in the run's stream and a short digest of the run's id, so an id names its run: after a redirect the ids
belong to the target, and an id of another run is refused instead of being read as a place in this one.

A position is twice the offset of the record on the token log, plus one for the run's end: one record may both queue a run and end
it (a cancel that came first), and two events must never share an id.
"""

from __future__ import annotations

import hashlib
from typing import Final

START: Final = -1
CURSOR_CHARS_MAX: Final = 40
_DIGEST_BYTES: Final = 4
_OFFSET_BITS: Final = 49


class BadCursor(ValueError):
    """The text is no event id of this run."""


def event_position(offset: int) -> int:
    """The position of what a record said, other than the run's end."""
    return 2 * offset


def end_position(offset: int) -> int:
    """The position of the run's end at `offset`."""
    return 2 * offset + 1


def cursor_offset(position: int) -> int:
    """The offset of the record that a position belongs to."""
    return position // 2


def run_digest(run_id: str) -> str:
    """What an event id carries of its run's id."""
    return hashlib.blake2b(run_id.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def write_cursor(digest: str, position: int) -> str:
    """The event id of `position` in the run with this digest."""
    return f"{position:x}-{digest}"


def cursor_digest(text: str) -> str:
    """The digest in an event id. Raises BadCursor."""
    return _split(text)[1]


def read_cursor(text: str, run_id: str) -> int:
    """The position in an event id of `run_id`. Raises BadCursor, also for an id of another run."""
    position, digest = _split(text)
    if digest != run_digest(run_id):
        raise BadCursor("an event id of another run")
    return position


def _split(text: str) -> tuple[int, str]:
    number, dash, digest = text.partition("-")
    if len(text) > CURSOR_CHARS_MAX or not dash or not number or not digest:
        raise BadCursor("no event id")
    try:
        position = int(number, 16)
    except ValueError:
        raise BadCursor("no event id") from None
    # Only the one spelling that was handed out.
    if f"{position:x}" != number or position >> _OFFSET_BITS:
        raise BadCursor("no event id")
    return position, digest
