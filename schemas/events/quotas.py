"""chat.quotas: reservations and their release, keyed by account."""

from __future__ import annotations

from schemas.events import Event


class QuotaReserved(Event, frozen=True, kw_only=True):
    """Tokens set aside for a run in the window of its prompt. `seat_id`: they count for this seat of the account, too."""

    run_id: str
    account_id: str
    window: str
    input_tokens: int
    output_tokens: int
    seat_id: str | None = None
    ladder_level: int = 0
    downgraded_from: str | None = None


class QuotaReleased(Event, frozen=True, kw_only=True):
    """What the run did not use goes back to its window: reserved = settled + `tokens`."""

    run_id: str
    account_id: str
    window: str
    tokens: int


QuotaEvent = QuotaReserved | QuotaReleased
