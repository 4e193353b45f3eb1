"""chat.account-snapshots (compacted): where the account fold stood, so that a new owner need not fold from zero.

Kinds of row, told apart by their key: an account's state, a run id already decided, an idempotency key already bound, and the
partition's versions of the limits and moves of the ladder. Per key the row with the highest source offset counts, not the one
written last.
"""

from __future__ import annotations

from typing import Final

from schemas.events import Event, Part
from schemas.events.accounts import LimitsChanged

# Of one account: its snapshot is one record, which has to fit its topic, with all of them at their longest.
OPEN_RESERVATIONS_MAX: Final = 1_000
SEATS_MAX: Final = 5_000
SEAT_NAME_CHARS_MAX: Final = 32
KNOWN_MS_MAX: Final = 24 * 3_600_000
"""So long a run id or a bound key is known, by append times."""


class OpenReservation(Part, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens held for one admitted run until its usage is measured. `ended`: its concurrency slot is free already.

    `queued_ms` is the append time of its prompt. `seat` is the name of its seat, empty where it has none; `seat_counted`: the seat's use
    of the run's window counts it.
    """

    run_id: str
    chat_id: str
    window: str
    model: str
    tier: str
    input_tokens: int
    output_tokens: int
    ended: bool = False
    assistant_message_id: str = ""
    after_run_id: str | None = None
    queued_ms: int = 0
    deadline_ms: int = 0
    seat: str = ""
    seat_counted: bool = False


class WindowUse(Part, frozen=True, kw_only=True):
    """Tokens of one window: settled for good, and reserved by open runs."""

    window: str
    settled: int
    reserved: int


class SeatUse(Part, frozen=True, kw_only=True, array_like=True):
    """Tokens of one seat in the account's newest window with seats. Written as an array: a team may have SEATS_MAX of them."""

    seat: str
    settled: int
    reserved: int


class RateBucket(Part, frozen=True, kw_only=True):
    """What was in a token bucket at `at_ms`, in 60,000ths, so that a flow per minute adds whole numbers each millisecond."""

    level: int
    at_ms: int


class AccountSnapshot(Event, frozen=True, kw_only=True):
    """An account as it was after the source record at `applied_offset`."""

    account_id: str
    applied_offset: int
    windows: tuple[WindowUse, ...] = ()
    open: tuple[OpenReservation, ...] = ()
    requests: RateBucket | None = None
    tokens: RateBucket | None = None
    seats_window: str = ""
    seats: tuple[SeatUse, ...] = ()


class RunKnown(Event, frozen=True, kw_only=True):
    """`run_id` was decided by the record at `source_offset`, appended at `appended_ms`."""

    account_id: str
    run_id: str
    source_offset: int
    appended_ms: int


class IdempotencyKeyBound(Event, frozen=True, kw_only=True):
    """The key belongs to `run_id` and to requests with this fingerprint."""

    account_id: str
    idempotency_key: str
    run_id: str
    fingerprint: str
    source_offset: int
    appended_ms: int


class LimitsVersion(Part, frozen=True, kw_only=True):
    """Limits that hold for records above `source_offset`. `event_id` is their record's, so that a copy of it is known ("": unknown)."""

    source_offset: int
    limits: LimitsChanged
    event_id: str = ""


class LimitsKept(Event, frozen=True, kw_only=True):
    """The newest versions of the limits of one partition, oldest first."""

    source_offset: int
    versions: tuple[LimitsVersion, ...]


class LadderMoved(Part, frozen=True, kw_only=True):
    """The prompt at `source_offset`, appended at `moved_ms`, and all above it are judged at `level`."""

    source_offset: int
    level: int
    moved_ms: int


class LadderKept(Event, frozen=True, kw_only=True):
    """The newest moves of the ladder's level in one partition, oldest first."""

    source_offset: int
    moves: tuple[LadderMoved, ...]


AccountSnapshotEvent = AccountSnapshot | RunKnown | IdempotencyKeyBound | LimitsKept | LadderKept
