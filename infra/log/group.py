"""Reading as a member of a consumer group: batches, rebalances, and commits that the owner decides on.

What `read` returns belongs to the assignment of that moment. A rebalance runs while the owner awaits something else: it changes
`assignments`, so a loop compares that number after each await and drops the rest of its batch when it moved. Eager rebalancing only:
everything is revoked, and comes again from the committed offsets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import KafkaError

from infra.log.records import RawRecord
from infra.log.stopping import stop_consumer
from schemas.topics import Topic

START_WAIT_MS_MAX: Final = 30_000
COMMIT_WAIT_MS_MAX: Final = 5_000
POLL_WAIT_MS: Final = 200
# A broker that has just started may not know its topics yet: a group that forms at that moment gets an empty assignment, and keeps
# it until its leader looks at the metadata again. So it looks often.
METADATA_AGE_MS_MAX: Final = 3_000
FETCH_WAIT_MS: Final = 500
# In one read, over all sources: what is left comes with the next.
BATCH_RECORDS_MAX: Final = 5_000
REBALANCE_WAIT_MS_MAX: Final = 6_000

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One partition of a topic."""

    topic: Topic
    partition: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Records of one source, in order, at least one."""

    source: Source
    records: Sequence[RawRecord]


class GroupReader:
    """A member of `group_id` on `topics`. `on_assigned` and `on_revoked` are called by the rebalance and must not raise."""

    def __init__(
        self,
        *,
        bootstrap: str,
        client_id: str,
        group_id: str,
        topics: Sequence[Topic],
        session_ms: int,
        on_assigned: Callable[[Sequence[Source]], None],
        on_revoked: Callable[[Sequence[Source]], None],
    ) -> None:
        self._topics = {topic.name: topic for topic in topics}
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self.assignments = 0
        self._joining = True
        self._committing = asyncio.Lock()
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=bootstrap,
            client_id=client_id,
            group_id=group_id,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            session_timeout_ms=session_ms,
            heartbeat_interval_ms=session_ms // 4,
            rebalance_timeout_ms=REBALANCE_WAIT_MS_MAX,
            fetch_max_wait_ms=FETCH_WAIT_MS,
            metadata_max_age_ms=METADATA_AGE_MS_MAX,
            max_partition_fetch_bytes=2_097_152,
        )

    async def __aenter__(self) -> Self:
        self._consumer.subscribe(list(self._topics), listener=_Rebalance(self))
        async with asyncio.timeout(START_WAIT_MS_MAX / 1000):
            await self._consumer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop_consumer(self._consumer)

    async def read(self, *, wait_ms: int = POLL_WAIT_MS) -> list[Batch]:
        """What is there, or an empty list after `wait_ms`. Raises KafkaError where the group cannot be joined."""
        found = await self._consumer.getmany(timeout_ms=wait_ms, max_records=BATCH_RECORDS_MAX)
        return [
            Batch(source=self._source(position), records=records)
            for position, records in found.items()
        ]

    def seek(self, source: Source, offset: int) -> None:
        """Read this source from `offset` on, in place of what was fetched."""
        self._consumer.seek(TopicPartition(source.topic.name, source.partition), offset)

    async def bounds(self, source: Source) -> tuple[int, int]:
        """First offset kept, and the next one to be given. Waits behind a running fetch: for rare needs.

        Raises KafkaError or TimeoutError.
        """
        position = TopicPartition(source.topic.name, source.partition)
        async with asyncio.timeout(START_WAIT_MS_MAX / 1000):
            first = await self._consumer.beginning_offsets([position])
            end = await self._consumer.end_offsets([position])
        return int(first[position]), int(end[position])

    async def commit(self, offsets: Mapping[Source, int]) -> bool:
        """Commit the next offset to read of each source. False: not done, and whoever owns the source now reads it again."""
        if not offsets:
            return True
        wanted = {
            TopicPartition(source.topic.name, source.partition): offset
            for source, offset in offsets.items()
        }
        try:
            async with self._committing, asyncio.timeout(COMMIT_WAIT_MS_MAX / 1000):
                if self._joining:
                    return False
                await self._consumer.commit(wanted)
        except (KafkaError, TimeoutError) as error:
            _log.warning("commit failed: %s", type(error).__name__)
            return False
        return True

    def _source(self, position: TopicPartition) -> Source:
        return Source(topic=self._topics[position.topic], partition=position.partition)

    async def revoked(self, positions: set[TopicPartition]) -> None:
        """Called by the rebalance, which joins the group anew when this returns.

        A refused commit makes the client forget its generation, and in the middle of a join that undoes the join: so none is
        under way or begun before the new assignment.
        """
        self._joining = True
        self.assignments += 1
        self._on_revoked([self._source(position) for position in positions])
        async with self._committing:
            pass

    def assigned(self, positions: set[TopicPartition]) -> None:
        """Called by the rebalance."""
        self._joining = False
        self._on_assigned([self._source(position) for position in positions])


class _Rebalance(ConsumerRebalanceListener):  # type: ignore[misc]
    """aiokafka swallows what a listener raises, so this one says it."""

    def __init__(self, reader: GroupReader) -> None:
        self._reader = reader

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        await self._reader.revoked(revoked)

    def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        self._reader.assigned(assigned)
