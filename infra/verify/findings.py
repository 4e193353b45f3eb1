"""What an audit found: violations, what is still under way, and counts."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import msgspec

from schemas.events import Event

# What may still be missing after its cause, on the brokers' clock, where a process died meanwhile (I6).
GRACE_MS: Final = 15_000
# How long past its deadline a run may live (I1).
DEADLINE_SLACK_MS: Final = 30_000
BUCKET_MS: Final = 2_500


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A decoded record of any topic."""

    partition: int
    offset: int
    appended_ms: int
    event_id: str
    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """An invariant (`I5`) that does not hold for `subject`, mostly a run id. `detail` holds no text of a user."""

    invariant: str
    subject: str
    detail: str


@dataclass(slots=True, kw_only=True)
class Findings:
    """`pending` are things that are missing, and were caused too short ago to be missed."""

    violations: list[Violation] = field(default_factory=list)
    pending: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    grace_ms: int = GRACE_MS

    def broken(self, invariant: str, subject: str, detail: str) -> None:
        """It does not hold, now or ever."""
        self.violations.append(Violation(invariant=invariant, subject=subject, detail=detail))

    def missing(self, invariant: str, subject: str, detail: str, *, age_ms: int) -> None:
        """It does not hold yet: a violation from `grace_ms` on."""
        if age_ms > self.grace_ms:
            self.broken(invariant, subject, f"{detail} ({age_ms / 1000:.0f} s after its cause)")
        else:
            self.pending.append(Violation(invariant=invariant, subject=subject, detail=detail))


@dataclass(slots=True)
class LogTime:
    """The brokers' clock as records show it. Time in which nothing at all was appended does not count: nobody was there to be late."""

    newest_ms: int = 0
    waited_ms: int = 0
    _buckets: set[int] = field(default_factory=set)

    def saw(self, appended_ms: int) -> None:
        """A record of any topic."""
        self.newest_ms = max(self.newest_ms, appended_ms)
        self._buckets.add(appended_ms // BUCKET_MS)

    def between(self, start_ms: int, end_ms: int) -> int:
        """How long the system was running from start to end, in ms."""
        if end_ms - start_ms <= BUCKET_MS:
            return end_ms - start_ms
        alive = sum(
            bucket in self._buckets
            for bucket in range(start_ms // BUCKET_MS, end_ms // BUCKET_MS + 1)
        )
        return min(end_ms - start_ms, alive * BUCKET_MS)

    def age_ms(self, appended_ms: int) -> int:
        """How long ago that was for a system that runs, with the time that the audit itself has waited."""
        return self.between(appended_ms, self.newest_ms) + self.waited_ms


def digest(event: msgspec.Struct) -> bytes:
    """Equal for equal events."""
    return hashlib.blake2b(msgspec.json.encode(event), digest_size=16).digest()


@dataclass(slots=True)
class Copies:
    """The events of one topic by id. A record written twice is one; an id with two contents is a contradiction (I12)."""

    first: dict[str, Record] = field(default_factory=dict)
    copies: int = 0
    contradicted: list[Record] = field(default_factory=list)

    def take(self, record: Record) -> bool:
        """Whether this is the first with its id."""
        known = self.first.setdefault(record.event_id, record)
        if known is record:
            return True
        self.copies += 1
        if known.event != record.event:
            self.contradicted.append(record)
        return False
