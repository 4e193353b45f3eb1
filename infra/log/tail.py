"""Following partitions without a group: from given offsets, for as long as the owner likes.

aiokafka has one fetch in flight for each connection, so a seek or a new assignment waits behind a long poll: a tail is assigned
once and never seeked. Who needs other partitions or older records opens another reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, Self

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import OffsetOutOfRangeError

from infra.log.records import BadRecord, LogRecord, read_record
from infra.log.stopping import stop_consumer
from schemas.topics import Topic

START_WAIT_MS_MAX: Final = 30_000
POLL_WAIT_MS: Final = 500
BATCH_RECORDS_MAX: Final = 2_000


class OffsetsGone(Exception):
    """Records that the reader still needed were removed by retention. Starting over from what is left would hide a hole."""


class Tail:
    """All records of `topic` in the partitions of `starts`, each from its offset on, in order within a partition."""

    def __init__(
        self, *, bootstrap: str, client_id: str, topic: Topic, starts: Mapping[int, int]
    ) -> None:
        self._topic = topic
        self._starts = dict(starts)
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=bootstrap,
            client_id=client_id,
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="none",
            fetch_max_wait_ms=POLL_WAIT_MS,
            max_partition_fetch_bytes=2_097_152,
        )
        self.positions: dict[int, int] = dict(starts)

    async def __aenter__(self) -> Self:
        async with asyncio.timeout(START_WAIT_MS_MAX / 1000):
            await self._consumer.start()
            self._consumer.assign([TopicPartition(self._topic.name, p) for p in self._starts])
            for partition, offset in self._starts.items():
                self._consumer.seek(TopicPartition(self._topic.name, partition), offset)
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop_consumer(self._consumer)

    async def read(self, *, wait_ms: int = POLL_WAIT_MS) -> list[LogRecord | BadRecord]:
        """The next records, or an empty list after `wait_ms`. Raises OffsetsGone."""
        try:
            found = await self._consumer.getmany(timeout_ms=wait_ms, max_records=BATCH_RECORDS_MAX)
        except OffsetOutOfRangeError as error:
            raise OffsetsGone(self._topic.name) from error
        records: list[LogRecord | BadRecord] = []
        for source, batch in found.items():
            records.extend(read_record(self._topic, raw) for raw in batch)
            self.positions[source.partition] = batch[-1].offset + 1
        return records
