"""A record as it lies on the log: position, the broker's append time, and the event or the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from schemas.codec import Envelope, Undecodable, decode
from schemas.events import Event
from schemas.topics import Topic


class RawRecord(Protocol):
    """What aiokafka hands out."""

    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def timestamp(self) -> int: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def headers(self) -> Iterable[tuple[str, bytes]]: ...


class LogRecord(msgspec.Struct, frozen=True, gc=False):
    """A decoded record. `appended_ms` is the broker's append time."""

    partition: int
    offset: int
    appended_ms: int
    envelope: Envelope

    @property
    def event(self) -> Event:
        """The event itself."""
        return self.envelope.event


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that is no event of its topic. The reader parks it or counts it, and goes on."""

    partition: int
    offset: int
    appended_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    reason: str


def bad_record(raw: RawRecord, reason: str) -> BadRecord:
    """The raw record with the reason why nobody can act on it."""
    return BadRecord(
        raw.partition, raw.offset, raw.timestamp, raw.key, raw.value, tuple(raw.headers), reason
    )


def read_record(topic: Topic, raw: RawRecord) -> LogRecord | BadRecord:
    """Decode one raw record of `topic`. Never raises for what the bytes hold."""
    try:
        envelope = decode(topic, raw.headers, raw.value)
    except Undecodable as error:
        return bad_record(raw, str(error))
    return LogRecord(raw.partition, raw.offset, raw.timestamp, envelope)
