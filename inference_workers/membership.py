"""The worker's place in its model's group: which queues it owns, reading them, committing them.

Rebalancing is eager: every queue is revoked and then some come back. So a revocation only says "wait", and what did not come back
is dropped when the new assignment is known. After any rebalance reading starts again at what was committed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError

from inference_workers.decisions.request_book import Queue
from infra.log.group import METADATA_AGE_MS_MAX
from infra.log.records import BadRecord, LogRecord, read_record
from infra.log.stopping import stop_consumer
from schemas.topics import Topic, generations
from schemas.vocabulary import Lane

logger = logging.getLogger(__name__)

START_WAIT_MS_MAX: Final = 30_000
STOP_WAIT_MS_MAX: Final = 1_500
COMMIT_WAIT_MS_MAX: Final = 3_000
REBALANCE_WAIT_MS_MAX: Final = 6_000
FETCH_WAIT_MS: Final = 500
BATCH_RECORDS_MAX: Final = 500
# A survivor learns of a rebalance by its next heartbeat, which is part of the time a takeover takes.
HEARTBEATS_PER_SESSION: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRecord:
    """A record of a queue: an event, or bytes that are none."""

    queue: Queue
    topic: Topic
    record: LogRecord | BadRecord


class Membership(ConsumerRebalanceListener):  # type: ignore[misc]
    """`on_revoked` and `on_assigned` are called without waiting, before anything is read under the new assignment."""

    def __init__(
        self,
        *,
        bootstrap: str,
        client_id: str,
        model: str,
        session_ms: int,
        on_revoked: Callable[[], None],
        on_assigned: Callable[[frozenset[Queue]], None],
    ) -> None:
        self._lanes = {generations(model, lane).name: lane for lane in Lane}
        self._topics = {lane: generations(model, lane) for lane in Lane}
        self._on_revoked = on_revoked
        self._on_assigned = on_assigned
        # Raised by every assignment: what was read under an older one is dropped by whoever still holds it.
        self.generation = 0
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopped = False
        self._joining = True
        self._committing = asyncio.Lock()
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=bootstrap,
            client_id=client_id,
            group_id=f"worker.{model}",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            partition_assignment_strategy=(StickyPartitionAssignor,),
            session_timeout_ms=session_ms,
            heartbeat_interval_ms=max(100, session_ms // HEARTBEATS_PER_SESSION),
            rebalance_timeout_ms=REBALANCE_WAIT_MS_MAX,
            fetch_max_wait_ms=FETCH_WAIT_MS,
            metadata_max_age_ms=METADATA_AGE_MS_MAX,
            max_partition_fetch_bytes=2_097_152,
            max_poll_records=BATCH_RECORDS_MAX,
        )

    async def __aenter__(self) -> Self:
        self._consumer.subscribe(topics=sorted(self._lanes), listener=self)
        async with asyncio.timeout(START_WAIT_MS_MAX / 1000):
            await self._consumer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    async def leave(self) -> None:
        """Leave the group at once, so that others take over now and not after the session. Repeatable."""
        if self._stopped:
            return
        self._stopped = True
        left = False
        with suppress(KafkaError, TimeoutError):
            left = await stop_consumer(self._consumer, wait_ms_max=STOP_WAIT_MS_MAX)
        if not left:
            logger.warning("group_left_late")

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        """Called by the consumer, which joins the group anew when this returns."""
        # A commit that is refused makes the client forget who it is in the group. In the middle of a join that undoes the join,
        # and with a commit every half second it never ends (seen). So none is under way or begun before the new assignment.
        self._joining = True
        if revoked:
            self._guarded(self._on_revoked)
        async with self._committing:
            pass

    async def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        """Called by the consumer before it knows where to read."""
        self._joining = False
        self.generation += 1
        queues = frozenset(
            Queue(lane=self._lanes[source.topic], partition=source.partition) for source in assigned
        )
        self._guarded(lambda: self._on_assigned(queues))

    def _guarded(self, call: Callable[[], None]) -> None:
        # The consumer swallows what its listener raises; this process must end on it instead.
        try:
            call()
        except Exception as error:  # noqa: BLE001
            if not self.failure.done():
                self.failure.set_exception(error)

    async def read(self, *, wait_ms: int) -> list[QueueRecord]:
        """The next records, in order within a queue, or none after `wait_ms`."""
        found = await self._consumer.getmany(timeout_ms=wait_ms)
        records: list[QueueRecord] = []
        for source, batch in found.items():
            lane = self._lanes[source.topic]
            queue = Queue(lane=lane, partition=source.partition)
            topic = self._topics[lane]
            records.extend(
                QueueRecord(queue=queue, topic=topic, record=read_record(topic, raw))
                for raw in batch
            )
        return records

    async def position(self, queue: Queue) -> int | None:
        """The offset that is read next; None where the queue is not ours any more."""
        try:
            position: int = await self._consumer.position(self._source(queue))
        except IllegalStateError:
            return None
        return position

    async def commit(self, offsets: Mapping[Queue, int]) -> bool:
        """Commit; True proves that the group counts us as a member. False: it rebalances, or the broker is away."""
        try:
            async with self._committing, asyncio.timeout(COMMIT_WAIT_MS_MAX / 1000):
                if self._joining:
                    return False
                await self._consumer.commit(
                    {self._source(queue): offset for queue, offset in offsets.items()}
                )
        except (CommitFailedError, IllegalStateError, TimeoutError) as error:
            logger.info("commit_failed %s", type(error).__name__)
            return False
        return True

    def pause_lanes(self, lanes: Collection[Lane]) -> None:
        """Read these no further, and the others on; membership goes on."""
        sources = self._consumer.assignment()
        stopped = {source for source in sources if self._lanes[source.topic] in lanes}
        paused = self._consumer.paused()
        if stopped - paused:
            self._consumer.pause(*(stopped - paused))
        if paused - stopped:
            self._consumer.resume(*(paused - stopped))

    def topic_of(self, lane: Lane) -> Topic:
        """The lane's topic."""
        return self._topics[lane]

    def _source(self, queue: Queue) -> TopicPartition:
        return TopicPartition(self._topics[queue.lane].name, queue.partition)
