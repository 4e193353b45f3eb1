"""An account as the account fold keeps it, its inputs and outputs, and the row that saves it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from processors.decisions.seats import Seats
from schemas.events.account_snapshots import (
    AccountSnapshot,
    OpenReservation,
    RateBucket,
    WindowUse,
)
from schemas.events.accounts import PromptSubmitted, UsageMeasured
from schemas.events.admissions import PromptAdmitted, PromptRefused
from schemas.events.quotas import QuotaReleased, QuotaReserved
from schemas.events.tokens import RunCancelled, RunEnded, RunQueued, RunRedirected
from schemas.events.usage import UsageSettled
from schemas.ids import derived_event_id

AccountInput = PromptSubmitted | UsageMeasured
AccountOutput = (
    RunCancelled
    | QuotaReserved
    | RunQueued
    | PromptAdmitted
    | PromptRefused
    | RunEnded
    | RunRedirected
    | UsageSettled
    | QuotaReleased
)


NO_SEATS: Final = Seats()


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountState:
    """An account after the record at `applied_offset`. Immutable: a reference is a copy as of that offset.

    `open` is in order of admission. `requests` and `tokens` are the buckets of its rates, None until first used.
    """

    account_id: str
    applied_offset: int = -1
    windows: tuple[WindowUse, ...] = ()
    open: tuple[OpenReservation, ...] = ()
    requests: RateBucket | None = None
    tokens: RateBucket | None = None
    seats: Seats = NO_SEATS


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One record of the account log, as it lies there. `appended_ms` is the broker's stamp."""

    offset: int
    appended_ms: int
    event_id: str
    event: AccountInput


def output_id(source_id: str, output: AccountOutput) -> str:
    """The id of an output of the record with the event id `source_id`: the same whenever and wherever it is decided.

    No record has two outputs of one type, but for cancels, of which it has one a run.
    """
    kind = type(output).__name__
    if isinstance(output, RunCancelled):
        kind = f"{kind} {output.run_id}"
    return derived_event_id(source_id, kind)


def held_tokens(run: OpenReservation) -> int:
    """What is reserved for an open run."""
    return run.input_tokens + run.output_tokens


def ended(run: OpenReservation) -> OpenReservation:
    """The run with its concurrency slot free."""
    return run if run.ended else msgspec.structs.replace(run, ended=True)


def may_generate(live: list[OpenReservation]) -> int:
    """How many of these runs, none of which has ended, may generate at once: one of each chat, since the others wait for it (Q6)."""
    return len({run.chat_id for run in live})


def snapshot(account: AccountState) -> AccountSnapshot:
    """The row that keeps this state."""
    return AccountSnapshot(
        account_id=account.account_id,
        applied_offset=account.applied_offset,
        windows=account.windows,
        open=account.open,
        requests=account.requests,
        tokens=account.tokens,
        seats_window=account.seats.window,
        seats=account.seats.uses,
    )


def restored(row: AccountSnapshot) -> AccountState:
    """The state that the row keeps."""
    return AccountState(
        account_id=row.account_id,
        applied_offset=row.applied_offset,
        windows=row.windows,
        open=row.open,
        requests=row.requests,
        tokens=row.tokens,
        seats=Seats(window=row.seats_window, uses=row.seats),
    )
