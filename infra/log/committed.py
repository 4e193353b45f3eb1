"""How far a group has come in a topic, asked from outside the group."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from aiokafka.structs import OffsetAndMetadata

from schemas.topics import Topic

COMMITTED_WAIT_MS_MAX: Final = 20_000
RETRY_WAIT_MS: Final = 100


class CommittedUnknown(Exception):
    """The cluster did not say in time."""


async def committed_offsets(
    bootstrap: str, group: str, topic: Topic, partitions: Iterable[int]
) -> dict[int, int]:
    """The next offset that the group will read, for those partitions where it has committed one. Raises CommittedUnknown."""
    wanted = [TopicPartition(topic.name, partition) for partition in partitions]
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        async with asyncio.timeout(COMMITTED_WAIT_MS_MAX / 1000):
            await admin.start()
            try:
                found = await _ask(admin, group, wanted)
            finally:
                await admin.close()
    except (KafkaError, TimeoutError) as error:
        raise CommittedUnknown(f"{group}: {type(error).__name__}") from error
    return {
        source.partition: entry.offset
        for source, entry in found.items()
        if source.topic == topic.name and entry.offset >= 0
    }


async def _ask(
    admin: AIOKafkaAdminClient, group: str, wanted: list[TopicPartition]
) -> dict[TopicPartition, OffsetAndMetadata]:
    """Ask until the coordinator is there: the first question on a new cluster makes its topic."""
    while True:
        try:
            found: dict[
                TopicPartition, OffsetAndMetadata
            ] = await admin.list_consumer_group_offsets(group, partitions=wanted)
        except KafkaError as error:
            if not error.retriable:
                raise
            await asyncio.sleep(RETRY_WAIT_MS / 1000)
        else:
            return found
