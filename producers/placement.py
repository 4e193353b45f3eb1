"""Which key and partition a record gets: derived from the event alone, so no caller can put one in the wrong stream."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.events import Event
from schemas.events.account_snapshots import (
    AccountSnapshot,
    IdempotencyKeyBound,
    LadderKept,
    LimitsKept,
    RunKnown,
)
from schemas.events.accounts import LimitsChanged
from schemas.events.tokens import PartitionTick
from schemas.ids import partition_for_key, run_address
from schemas.topics import Key, Topic


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a record goes. `key` None: the record belongs to the partition as a whole."""

    key: str | None
    partition: int


def place(topic: Topic, event: Event, partitions: int) -> Place:
    """The place of `event` in a topic of `partitions` partitions.

    Raises AttributeError where the event lacks the topic's key field (a defect of the caller) and BadId for a run id that is none.
    LimitsChanged, LimitsKept, LadderKept and PartitionTick name no key: their sender states the partition itself.
    """
    assert not isinstance(event, LimitsChanged | LimitsKept | LadderKept | PartitionTick), (
        "place it explicitly"
    )
    if topic.key is Key.RUN:
        run_id: str = event.run_id  # type: ignore[attr-defined]
        return Place(key=run_id, partition=run_address(run_id).partition)
    owner: str = getattr(event, topic.key.value)
    return Place(key=_row_key(event, owner), partition=partition_for_key(owner, partitions))


def _row_key(event: Event, owner: str) -> str:
    """Compacted rows of one account lie in its partition under keys of their own."""
    match event:
        case AccountSnapshot():
            return f"account/{owner}"
        case RunKnown():
            return f"run/{event.run_id}"
        case IdempotencyKeyBound():
            return f"idempotency/{owner}/{event.idempotency_key}"
        case _:
            return owner


LIMITS_ROW_KEY = "limits"
LADDER_ROW_KEY = "ladder"
