"""The topic plan: what `schemas/topics.py` wants against what the cluster has. `plan` shows, `apply` makes.

Partition counts are never changed: account and chat keys would move away from their state. A cluster whose counts differ is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, for_code

from schemas.topics import DEAD_RETENTION_MS, Cleanup, Topic, all_topics

ADMIN_WAIT_S_MAX: Final = 30.0
REPLICAS_MAX: Final = 3
COMPACTION_LAG_MS: Final = 24 * 3_600_000
_NO_ERROR: Final = 0
_TOPIC_EXISTS: Final = 36


class TopicPlanError(Exception):
    """The plan cannot be applied. The message is one line."""


class PlanRefused(TopicPlanError):
    """The cluster has what is never changed: the settings do not fit it, and trying again does not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedTopic:
    """A topic as the cluster should have it."""

    name: str
    partitions: int
    configs: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTopic:
    """A topic as the cluster has it. `configs` holds only the names that the plan speaks of."""

    partitions: int
    configs: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What is to be done. `refused` are lines that say what must not be changed."""

    create: tuple[WantedTopic, ...]
    configure: tuple[WantedTopic, ...]
    refused: tuple[str, ...]

    @property
    def empty(self) -> bool:
        """Whether the cluster is as the plan wants it."""
        return not (self.create or self.configure or self.refused)


def wanted_topics(models: tuple[str, ...], partitions: int, replicas: int) -> list[WantedTopic]:
    """Every topic of the registry and the `.dead` beside it."""
    wanted = []
    for topic in all_topics(models):
        wanted.append(
            WantedTopic(name=topic.name, partitions=partitions, configs=_configs(topic, replicas))
        )
        dead = {
            "cleanup.policy": "delete",
            "retention.ms": str(DEAD_RETENTION_MS),
            "message.timestamp.type": "LogAppendTime",
        }
        wanted.append(WantedTopic(name=topic.dead, partitions=partitions, configs=dead))
    return wanted


def _configs(topic: Topic, replicas: int) -> dict[str, str]:
    configs = {
        "cleanup.policy": topic.cleanup.value,
        "message.timestamp.type": "LogAppendTime",
        "max.message.bytes": str(topic.record_bytes_max + 48_576),
        "min.insync.replicas": "2" if replicas >= REPLICAS_MAX else "1",
    }
    if topic.cleanup is Cleanup.DELETE:
        configs["retention.ms"] = str(topic.retention_ms)
        configs["retention.bytes"] = "-1"  # Never by size: a deadline must outlive no byte count.
    else:
        configs["min.compaction.lag.ms"] = str(COMPACTION_LAG_MS)
    return configs


def difference(wanted: list[WantedTopic], found: Mapping[str, FoundTopic]) -> Difference:
    """Compare. Pure."""
    create, configure, refused = [], [], []
    for topic in wanted:
        there = found.get(topic.name)
        if there is None:
            create.append(topic)
        elif there.partitions != topic.partitions:
            refused.append(
                f"{topic.name} has {there.partitions} partitions and the plan says {topic.partitions}: "
                "a partition count is never changed (set TURNLOG_PARTITIONS to what is there)"
            )
        elif any(there.configs.get(name) != value for name, value in topic.configs.items()):
            configure.append(topic)
    return Difference(create=tuple(create), configure=tuple(configure), refused=tuple(refused))


async def plan_topics(bootstrap: str, *, models: tuple[str, ...], partitions: int) -> Difference:
    """What `apply_topics` would do. Raises TopicPlanError where the cluster does not answer."""
    return await _with_admin(bootstrap, models, partitions, apply=False)


async def apply_topics(bootstrap: str, *, models: tuple[str, ...], partitions: int) -> Difference:
    """Make the cluster as the plan wants it; gives what was done. Raises TopicPlanError and then has changed nothing."""
    return await _with_admin(bootstrap, models, partitions, apply=True)


async def _with_admin(
    bootstrap: str, models: tuple[str, ...], partitions: int, *, apply: bool
) -> Difference:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=20_000)
    try:
        async with asyncio.timeout(ADMIN_WAIT_S_MAX):
            await admin.start()
            try:
                brokers = len((await admin.describe_cluster())["brokers"])
                replicas = min(REPLICAS_MAX, brokers)
                wanted = wanted_topics(models, partitions, replicas)
                todo = difference(wanted, await _found(admin, wanted))
                if apply:
                    if todo.refused:
                        raise PlanRefused(todo.refused[0])
                    await _create(admin, todo.create, replicas)
                    await _configure(admin, todo.configure)
                return todo
            finally:
                await admin.close()
    except (KafkaError, TimeoutError) as error:
        raise TopicPlanError(
            f"the Kafka cluster at {bootstrap} did not answer: {type(error).__name__}"
        ) from error


async def _found(admin: AIOKafkaAdminClient, wanted: list[WantedTopic]) -> dict[str, FoundTopic]:
    there = set(await admin.list_topics())
    names = [topic.name for topic in wanted if topic.name in there]
    if not names:
        return {}
    counts = {
        description["topic"]: len(description["partitions"])
        for description in await admin.describe_topics(names)
    }
    speaks_of = {topic.name: set(topic.configs) for topic in wanted}
    responses = await admin.describe_configs(
        [ConfigResource(ConfigResourceType.TOPIC, name) for name in names]
    )
    configs: dict[str, dict[str, str]] = {name: {} for name in names}
    for response in responses:
        for _code, _message, _kind, name, entries in response.resources:
            for entry in entries:
                if entry[0] in speaks_of[name]:
                    configs[name][entry[0]] = entry[1]
    return {name: FoundTopic(partitions=counts[name], configs=configs[name]) for name in names}


async def _create(
    admin: AIOKafkaAdminClient, topics: tuple[WantedTopic, ...], replicas: int
) -> None:
    if not topics:
        return
    response = await admin.create_topics(
        [
            NewTopic(
                name=topic.name,
                num_partitions=topic.partitions,
                replication_factor=replicas,
                topic_configs=dict(topic.configs),
            )
            for topic in topics
        ]
    )
    for name, code, *message in response.topic_errors:
        if code not in (_NO_ERROR, _TOPIC_EXISTS):
            why = message[0] if message and message[0] else for_code(code).__name__
            raise TopicPlanError(f"{name} could not be created: {why}")


async def _configure(admin: AIOKafkaAdminClient, topics: tuple[WantedTopic, ...]) -> None:
    if topics:
        await admin.alter_configs(
            [
                ConfigResource(ConfigResourceType.TOPIC, topic.name, configs=dict(topic.configs))
                for topic in topics
            ]
        )
