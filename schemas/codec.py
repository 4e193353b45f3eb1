"""Bytes to events and back. The body is JSON; headers say the type, schema number, event id, cause id and trace.

Bytes from outside raise `Undecodable` at the rim, with a reason: the caller parks the record in the topic's `.dead` and goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from schemas.events import Event
from schemas.events.account_snapshots import (
    AccountSnapshot,
    IdempotencyKeyBound,
    LadderKept,
    LimitsKept,
    RunKnown,
)
from schemas.events.accounts import LimitsChanged, PromptSubmitted, UsageMeasured
from schemas.events.admissions import PromptAdmitted, PromptRefused
from schemas.events.chats import ChatCreated, ChatDeleted, ChatRenamed, LeafChosen
from schemas.events.generations import GenerationRequested
from schemas.events.outcomes import RunConcluded
from schemas.events.quotas import QuotaReleased, QuotaReserved
from schemas.events.tokens import (
    AttemptStarted,
    PartitionTick,
    RunCancelled,
    RunEnded,
    RunQueued,
    RunRedirected,
    TokensGenerated,
)
from schemas.events.usage import UsageSettled
from schemas.events.workers import WorkerLoadReported
from schemas.topics import FIXED, Topic

Headers = list[tuple[str, bytes]]

H_TYPE: Final = "t"
H_SCHEMA: Final = "v"
H_EVENT_ID: Final = "id"
H_CAUSE_ID: Final = "cause"
H_TRACE: Final = "trace"

# Schema number of each event: raised only when a field changes its meaning, with an upcast from the number before.
SCHEMA_OF: Final[dict[type[Event], int]] = dict.fromkeys(
    (
        ChatCreated,
        ChatRenamed,
        ChatDeleted,
        LeafChosen,
        PromptSubmitted,
        UsageMeasured,
        LimitsChanged,
        AccountSnapshot,
        RunKnown,
        IdempotencyKeyBound,
        LimitsKept,
        LadderKept,
        PromptAdmitted,
        PromptRefused,
        QuotaReserved,
        QuotaReleased,
        UsageSettled,
        GenerationRequested,
        RunQueued,
        RunRedirected,
        AttemptStarted,
        TokensGenerated,
        RunCancelled,
        RunEnded,
        PartitionTick,
        RunConcluded,
        WorkerLoadReported,
    ),
    1,
)
TYPE_OF_NAME: Final = {kind.__name__: kind for kind in SCHEMA_OF}

_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = {kind: msgspec.json.Decoder(kind) for kind in SCHEMA_OF}
_TYPE_HEADER: Final = {kind: (H_TYPE, kind.__name__.encode()) for kind in SCHEMA_OF}
_TYPE_OF_HEADER: Final = {kind.__name__.encode(): kind for kind in SCHEMA_OF}
_SCHEMA_HEADER: Final = {kind: (H_SCHEMA, b"%d" % number) for kind, number in SCHEMA_OF.items()}


class Undecodable(ValueError):
    """The record is not an event of its topic. `str(error)` is the reason, without any of the record's content."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An event with what its headers say. `cause_id` is empty for an event that came from outside."""

    event: Event
    event_id: str
    cause_id: str
    trace: str


def encode(
    event: Event, *, event_id: str, cause_id: str = "", trace: str = ""
) -> tuple[bytes, Headers]:
    """The record value and headers of an event."""
    kind = type(event)
    headers = [_TYPE_HEADER[kind], _SCHEMA_HEADER[kind], (H_EVENT_ID, event_id.encode())]
    if cause_id:
        headers.append((H_CAUSE_ID, cause_id.encode()))
    if trace:
        headers.append((H_TRACE, trace.encode()))
    return _ENCODER.encode(event), headers


def decode(topic: Topic, headers: Iterable[tuple[str, bytes]], value: bytes | None) -> Envelope:
    """The event in a record of `topic`. Raises Undecodable with a reason that holds no content."""
    event_id = cause_id = trace = ""
    kind: type[Event] | None = None
    schema = b""
    try:
        for name, content in headers:
            if name == H_TYPE:
                kind = _TYPE_OF_HEADER.get(content)
                if kind is None:
                    content.decode()  # Tells what is no text from what is no type.
            elif name == H_SCHEMA:
                schema = content
            elif name == H_EVENT_ID:
                event_id = content.decode()
            elif name == H_CAUSE_ID:
                cause_id = content.decode()
            elif name == H_TRACE:
                trace = content.decode()
    except (UnicodeDecodeError, AttributeError) as error:
        raise Undecodable("a header is not text") from error
    if kind is None or kind not in topic.events:
        raise Undecodable("no known event type for this topic in the headers")
    if schema != _SCHEMA_HEADER[kind][1]:
        raise Undecodable(f"{kind.__name__}: unknown schema number")
    if not event_id:
        raise Undecodable(f"{kind.__name__}: no event id")
    if value is None:
        raise Undecodable(f"{kind.__name__}: no body")
    try:
        event = _DECODER[kind].decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Undecodable(f"{kind.__name__}: {_without_content(str(error))}") from error
    return Envelope(event=event, event_id=event_id, cause_id=cause_id, trace=trace)


def _without_content(reason: str) -> str:
    """msgspec names the path and the expected type; of an enum it also quotes the value, which may be anything."""
    what, at, path = reason.partition(" - at ")
    return ("unknown word" if what.startswith("Invalid enum value") else what) + at + path


assert all(kind in SCHEMA_OF for topic in FIXED for kind in topic.events), "every event is coded"
assert len(TYPE_OF_NAME) == len(SCHEMA_OF), "type names are unique"
