"""An in-memory partitioned log with a broker's clock and consumer groups: what the simulated processes share.

Nothing is ever removed (no retention, no compaction), so the checks can read everything afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Generic, TypeVar

import msgspec

from schemas.events import Event
from schemas.events.tokens import PartitionTick
from schemas.topics import Topic

# 2026-03-05 23:59:57 UTC: three seconds before a quota window ends.
START_MS = 1_772_755_197_000


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A record as the broker keeps it. `seq` orders all records of all partitions; no process may look at it, checks do."""

    offset: int
    appended_ms: int
    seq: int
    event_id: str
    cause_id: str
    writer: str
    event: Event


@dataclass(slots=True)
class PartitionLog:
    """One partition. Its stamps step when its leader moves (`skew_ms`)."""

    records: list[Record] = field(default_factory=list)
    skew_ms: int = 0

    @property
    def end(self) -> int:
        """The offset of the next record."""
        return len(self.records)


class Log:
    """All topics. `now_ms` is the broker's clock; the scheduler moves it."""

    def __init__(self, partitions: Mapping[Topic, int]) -> None:
        self.now_ms = START_MS
        self._topics = {
            topic.name: [PartitionLog() for _ in range(count)]
            for topic, count in partitions.items()
        }
        self._seq = 0
        # Records but ticks: whether the system gets on.
        self.written = 0

    def partition(self, topic: Topic, number: int) -> PartitionLog:
        """One partition of a topic."""
        return self._topics[topic.name][number]

    def partitions(self, topic: Topic) -> list[PartitionLog]:
        """All partitions of a topic, by number."""
        return self._topics[topic.name]

    @property
    def all_topics(self) -> list[list[PartitionLog]]:
        """Everything."""
        return list(self._topics.values())

    def records(self, topic: Topic) -> list[Record]:
        """Every record of a topic, in the order of appending."""
        found = [record for each in self._topics[topic.name] for record in each.records]
        return sorted(found, key=lambda record: record.seq)

    def end(self, topic: Topic, number: int) -> int:
        """The end offset."""
        return len(self._topics[topic.name][number].records)

    def append(
        self,
        topic: Topic,
        number: int,
        event: Event,
        *,
        event_id: str,
        cause_id: str = "",
        writer: str,
    ) -> Record:
        """Append one record; the broker stamps it."""
        partition = self._topics[topic.name][number]
        self._seq += 1
        if not isinstance(event, PartitionTick):
            self.written += 1
        record = Record(
            offset=len(partition.records),
            appended_ms=self.now_ms + partition.skew_ms,
            seq=self._seq,
            event_id=event_id,
            cause_id=cause_id,
            writer=writer,
            event=event,
        )
        partition.records.append(record)
        return record


S = TypeVar("S")


class Group(Generic[S]):
    """A consumer group over `sources`. A member acts on the assignment it last heard of; the group fences its commits."""

    def __init__(self, name: str, sources: Iterable[S], *, rng: Random) -> None:
        self.name = name
        self.sources = tuple(sources)
        self.members: list[str] = []
        self.owners: dict[S, str] = {}
        self.committed: dict[S, int] = {}
        self.generation = 0
        self._rng = rng

    def join(self, member: str) -> None:
        """A member comes; everything is assigned anew."""
        self.members.append(member)
        self.rebalance()

    def leave(self, member: str) -> None:
        """A member goes, or its session has expired."""
        if member in self.members:
            self.members.remove(member)
            self.rebalance()

    def rebalance(self) -> None:
        """A new generation. Sources mostly stay with their owner (sticky), some move."""
        self.generation += 1
        if not self.members:
            self.owners.clear()
            return
        for source in self.sources:
            if self.owners.get(source) not in self.members or self._rng.random() < 0.3:
                self.owners[source] = self._rng.choice(self.members)

    def owned(self, member: str) -> list[S]:
        """What the member is assigned now."""
        return [source for source in self.sources if self.owners.get(source) == member]

    def commit(self, member: str, generation: int, offsets: Mapping[S, int]) -> bool:
        """Commit for a member of this generation; False: it was fenced."""
        if generation != self.generation or member not in self.members:
            return False
        for source, offset in offsets.items():
            if self.owners.get(source) == member:
                self.committed[source] = offset
        return True
