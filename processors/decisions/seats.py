"""The seats of one account: what each may use of the shared window, and how many may use it at all.

Rules (cited by assertions and tests):
  T1  Seats are counted in one window, the newest that a prompt was reserved in; with a newer one all begin anew.
  T2  A prompt of an older window (the broker's stamps may step back) is counted for no seat, and neither is its settlement.
  T3  A run is settled for its seat in the window in which it was counted, or not at all; so what a seat has reserved is what its open
      runs hold there.
  T4  Who has no seat shares the nameless one.
  T5  A long name is kept by its digest: so the row that holds all seats has a bound.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from hashlib import blake2b

from schemas.events.account_snapshots import SEAT_NAME_CHARS_MAX, SeatUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Seats:
    """All seats of the account that used the window, by name."""

    window: str = ""
    uses: tuple[SeatUse, ...] = ()


def seat_name(seat_id: str | None) -> str:
    """T4, T5."""
    if seat_id is None or len(seat_id) <= SEAT_NAME_CHARS_MAX:
        return seat_id or ""
    return blake2b(seat_id.encode(), digest_size=SEAT_NAME_CHARS_MAX // 2).hexdigest()


def in_window(seats: Seats, window: str) -> Seats | None:
    """T1, T2. The seats as a prompt of this window finds them; None: the window is an older one."""
    if seats.window == window:
        return seats
    same_kind = len(seats.window) == len(window)
    if same_kind and window < seats.window:
        return None
    return Seats(window=window)


def use_of(seats: Seats, name: str) -> SeatUse | None:
    """What the seat has used; None: nothing in this window."""
    at = _place(seats.uses, name)
    found = seats.uses[at] if at < len(seats.uses) else None
    return found if found is not None and found.seat == name else None


def reserved(seats: Seats, name: str, tokens: int) -> Seats:
    """The seats after `tokens` were set aside for one of them."""
    use = use_of(seats, name) or SeatUse(seat=name, settled=0, reserved=0)
    return _with(seats, SeatUse(seat=name, settled=use.settled, reserved=use.reserved + tokens))


def settled(
    seats: Seats, name: str, window: str, *, reserved_tokens: int, used_tokens: int
) -> Seats:
    """T3. The seats after a run that was counted in `window` was settled."""
    if not window or window != seats.window:
        return seats
    use = use_of(seats, name)
    assert use is not None, "T3: a run that was counted has its seat"
    assert use.reserved >= reserved_tokens, "T3: what is settled was reserved"
    return _with(
        seats,
        SeatUse(
            seat=name,
            settled=use.settled + used_tokens,
            reserved=use.reserved - reserved_tokens,
        ),
    )


def _place(uses: tuple[SeatUse, ...], name: str) -> int:
    return bisect_left(uses, name, key=lambda use: use.seat)


def _with(seats: Seats, use: SeatUse) -> Seats:
    at = _place(seats.uses, use.seat)
    uses = list(seats.uses)
    if at < len(uses) and uses[at].seat == use.seat:
        uses[at] = use
    else:
        uses.insert(at, use)
    return Seats(window=seats.window, uses=tuple(uses))
