"""Reading a closed span of one partition: catch-up of a viewer, reading a run back, folding a topic from zero.

Consumers are pooled: building one costs a connection and a metadata request. A pooled consumer waits at most POLL_WAIT_MS on the
broker, so a seek never queues behind a long poll.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, Self

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from infra.log.records import BadRecord, LogRecord, read_record
from infra.log.stopping import stop_consumer
from infra.log.tail import OffsetsGone
from schemas.topics import Topic

POLL_WAIT_MS: Final = 20
SPAN_WAIT_MS_MAX: Final = 30_000
"""As long as a broker may take that is busy making its topics, or shares a core with much else."""
READERS_MAX: Final = 4
PLACE_WAIT_MS_MAX: Final = 30_000
START_WAIT_MS_MAX: Final = 30_000


class SpanFailed(Exception):
    """The broker did not deliver the span in time. Nothing is known about what is in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """First offset kept and the offset that the next record will get."""

    first: int
    end: int


class SpanReader:
    """A pool of READERS_MAX consumers for spans, and one more for offsets."""

    def __init__(
        self,
        *,
        bootstrap: str,
        client_id: str,
        readers_max: int = READERS_MAX,
        place_wait_ms_max: int = PLACE_WAIT_MS_MAX,
        span_wait_ms_max: int = SPAN_WAIT_MS_MAX,
    ) -> None:
        """`place_wait_ms_max`: how long a span waits for one of the `readers_max` consumers; `span_wait_ms_max`: for the broker."""
        self._bootstrap = bootstrap
        self._client_id = client_id
        self._place_wait_ms_max = place_wait_ms_max
        self._span_wait_ms_max = span_wait_ms_max
        self._idle: asyncio.LifoQueue[AIOKafkaConsumer | None] = asyncio.LifoQueue(readers_max)
        for _ in range(readers_max):
            self._idle.put_nowait(None)  # A place for a consumer that is built when first needed.
        self._offsets: AIOKafkaConsumer | None = None
        self._built: list[AIOKafkaConsumer] = []

    async def __aenter__(self) -> Self:
        self._offsets = await self._build()
        return self

    async def __aexit__(self, *_: object) -> None:
        for consumer in self._built:
            await stop_consumer(consumer)

    async def _build(self) -> AIOKafkaConsumer:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap,
            client_id=self._client_id,
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="none",
            fetch_max_wait_ms=POLL_WAIT_MS,
            max_partition_fetch_bytes=4_194_304,
        )
        try:
            async with asyncio.timeout(START_WAIT_MS_MAX / 1000):
                await consumer.start()
        except BaseException:
            await stop_consumer(consumer)
            raise
        self._built.append(consumer)
        return consumer

    async def _take(self, source: TopicPartition) -> AIOKafkaConsumer:
        """An idle consumer, or a new one in a free place. Whoever gives up meanwhile leaves the place free."""
        try:
            async with asyncio.timeout(self._place_wait_ms_max / 1000):
                idle = await self._idle.get()
        except TimeoutError as error:
            raise SpanFailed(f"{source.topic}/{source.partition}: no reader is free") from error
        if idle is not None:
            return idle
        try:
            return await self._build()
        except BaseException as error:
            self._idle.put_nowait(None)
            if isinstance(error, KafkaError | TimeoutError):
                raise SpanFailed(f"{source.topic}/{source.partition}") from error
            raise

    async def bounds(
        self, topic: Topic, partitions: list[int], *, wait_ms_max: int | None = None
    ) -> dict[int, Bounds]:
        """The kept span of each partition. Raises SpanFailed after `wait_ms_max`, else as long as this reader waits for a span."""
        assert self._offsets is not None, "enter the SpanReader first"
        wanted = [TopicPartition(topic.name, partition) for partition in partitions]
        try:
            async with asyncio.timeout((wait_ms_max or self._span_wait_ms_max) / 1000):
                first = await self._offsets.beginning_offsets(wanted)
                end = await self._offsets.end_offsets(wanted)
        except (KafkaError, TimeoutError) as error:
            raise SpanFailed(topic.name) from error
        return {tp.partition: Bounds(first=first[tp], end=end[tp]) for tp in wanted}

    async def ends(self, topic: Topic, partitions: list[int]) -> dict[int, int]:
        """As `bounds`, only where each ends: one question to the broker instead of two. Raises SpanFailed."""
        assert self._offsets is not None, "enter the SpanReader first"
        wanted = [TopicPartition(topic.name, partition) for partition in partitions]
        try:
            async with asyncio.timeout(self._span_wait_ms_max / 1000):
                found = await self._offsets.end_offsets(wanted)
        except (KafkaError, TimeoutError) as error:
            raise SpanFailed(topic.name) from error
        return {tp.partition: end for tp, end in found.items()}

    async def partitions(self, topic: Topic) -> list[int]:
        """The topic's partitions, ascending; empty where there is no such topic. Raises SpanFailed.

        A consumer without an assignment knows no topic, so the cluster is asked over a connection of its own.
        """
        admin = AIOKafkaAdminClient(bootstrap_servers=self._bootstrap, client_id=self._client_id)
        try:
            async with asyncio.timeout(self._span_wait_ms_max / 1000):
                await admin.start()
                (found,) = await admin.describe_topics([topic.name])
        except (KafkaError, TimeoutError) as error:
            raise SpanFailed(topic.name) from error
        finally:
            await admin.close()
        return sorted(partition["partition"] for partition in found["partitions"])

    async def span(
        self,
        topic: Topic,
        partition: int,
        start: int,
        end: int,
        *,
        only_key: bytes | None = None,
    ) -> AsyncIterator[list[LogRecord | BadRecord]]:
        """Batches of the records with start <= offset < end, in order; with `only_key` those that have it (a batch may be empty).

        `end` must not lie beyond the partition's end. Raises OffsetsGone where `start` is older than what is kept, SpanFailed
        after `span_wait_ms_max` without a record, or where no reader is free or none can connect.
        """
        if start >= end:
            return
        source = TopicPartition(topic.name, partition)
        consumer = await self._take(source)
        position = start
        try:
            consumer.assign([source])
            consumer.seek(source, start)
            while position < end:
                batch = await self._next(consumer, source)
                position = batch[-1].offset + 1
                yield [
                    read_record(topic, raw)
                    for raw in batch
                    if raw.offset < end and (only_key is None or raw.key == only_key)
                ]
        finally:
            consumer.unsubscribe()
            self._idle.put_nowait(consumer)

    async def _next(self, consumer: AIOKafkaConsumer, source: TopicPartition) -> list:  # type: ignore[type-arg]
        try:
            async with asyncio.timeout(self._span_wait_ms_max / 1000):
                while True:
                    found = await consumer.getmany(source, timeout_ms=POLL_WAIT_MS * 5)
                    if batch := found.get(source):
                        return batch  # type: ignore[no-any-return]
        except OffsetOutOfRangeError as error:
            raise OffsetsGone(f"{source.topic}/{source.partition}") from error
        except (KafkaError, TimeoutError) as error:
            raise SpanFailed(f"{source.topic}/{source.partition}") from error
