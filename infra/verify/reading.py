"""All topics of a cluster, read from the first offset that is kept and then further, into the audits."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Final, Self

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from infra.log.epoch import topic_epoch
from infra.log.records import LogRecord
from infra.log.span_reader import Bounds, SpanReader
from infra.models.registry import MODELS
from infra.verify.findings import GRACE_MS, Findings, Record
from infra.verify.history_audit import HistoryAudit
from infra.verify.judgement import Audit
from schemas.topics import (
    ACCOUNT_SNAPSHOTS,
    ACCOUNTS,
    ADMISSIONS,
    CHATS,
    FIXED,
    OUTCOMES,
    QUOTAS,
    TOKENS,
    USAGE,
    WORKERS,
    Cleanup,
    Topic,
    all_topics,
)

ADMIN_WAIT_MS_MAX: Final = 30_000
READERS: Final = 4
AGAIN_AFTER_MS: Final = 500
# Results before their causes, so that most of what is read is explained by what is read after it.
READ_ORDER: Final = (
    WORKERS,
    ACCOUNT_SNAPSHOTS,
    USAGE,
    QUOTAS,
    OUTCOMES,
    ADMISSIONS,
    TOKENS,
    ACCOUNTS,
    CHATS,
)
HISTORY_TOPICS: Final = (CHATS, ADMISSIONS, OUTCOMES)
assert set(READ_ORDER) == set(FIXED), "every topic is read"
# Requests for engines are not audited, yet what is parked of them is counted.
EVERY_TOPIC: Final = all_topics(tuple(MODELS))


class NoTopics(Exception):
    """The cluster does not have the topics of a system. The message is one line."""


class RecordedSystem:
    """The topics of one cluster under audit."""

    def __init__(self, bootstrap: str, *, history: Path, grace_ms: int = GRACE_MS) -> None:
        self._bootstrap = bootstrap
        self._grace_ms = grace_ms
        self._history = history
        self._reader = SpanReader(
            bootstrap=bootstrap, client_id="turnlog-verify", readers_max=READERS
        )
        self._partitions: dict[str, int] = {}
        self._positions: dict[tuple[str, int], int] = {}
        self._grew_at = time.monotonic()
        self.counts: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        self._partitions = await partition_counts(self._bootstrap)
        epoch = await topic_epoch(self._bootstrap)
        self.audit = Audit(
            partitions=self._partitions[ACCOUNTS.name], epoch=epoch, grace_ms=self._grace_ms
        )
        self.past = HistoryAudit(self.audit.time)
        await self._reader.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._reader.__aexit__()

    async def advance(self) -> int:
        """Read what is new; how many records. Raises SpanFailed or OffsetsGone."""
        before = self.counts["records"]
        ends = [
            (topic, await self._reader.bounds(topic, list(range(self._partitions[topic.name]))))
            for topic in READ_ORDER
        ]
        async with asyncio.TaskGroup() as tasks:
            for topic, bounds in ends:
                for partition, kept in bounds.items():
                    tasks.create_task(self._partition(topic, partition, kept))
        await self._parked()
        grew = self.counts["records"] - before
        if grew:
            self._grew_at = time.monotonic()
        self.audit.time.waited_ms = int((time.monotonic() - self._grew_at) * 1000)
        return grew

    async def judge(self) -> Findings:
        """Everything that is to be said of what was read."""
        findings = self.audit.judge()
        await asyncio.to_thread(self.past.judge, findings, self._history)
        findings.counts.update(self.counts)
        return findings

    async def settle(self, wait_ms_max: int) -> Findings:
        """Read and judge until no run is open and nothing is pending, or `wait_ms_max` has passed."""
        deadline = time.monotonic() + wait_ms_max / 1000
        while True:
            await self.advance()
            began = time.monotonic()
            findings = await self.judge()
            now = time.monotonic()
            open_runs = findings.counts["open runs"]
            if (not open_runs and not findings.pending) or now >= deadline:
                return findings
            # Judging a long log again must not take all of the machine.
            pause = max(AGAIN_AFTER_MS / 1000, 3 * (now - began))
            await asyncio.sleep(min(pause, deadline - now))

    async def _partition(self, topic: Topic, partition: int, kept: Bounds) -> None:
        at = (topic.name, partition)
        if at not in self._positions:
            self._positions[at] = kept.first
            if topic is TOKENS:
                self.audit.runs.begins(partition, kept.first)
            elif topic is ACCOUNTS:
                self.audit.accounts.begins(partition, kept.first)
            elif topic in HISTORY_TOPICS:
                self.past.begins(kept.first)
        async for records in self._reader.span(topic, partition, self._positions[at], kept.end):
            for record in records:
                self.counts["records"] += 1
                if isinstance(record, LogRecord):
                    self._take(topic, record)
                elif record.value is not None or topic.cleanup is not Cleanup.COMPACT:
                    self.counts["undecodable records"] += 1
                    self.audit.time.saw(record.appended_ms)
        self._positions[at] = max(self._positions[at], kept.end)

    def _take(self, topic: Topic, record: LogRecord) -> None:
        if topic in HISTORY_TOPICS:
            self.past.take(topic, record)
        if topic in (CHATS, WORKERS):
            self.audit.time.saw(record.appended_ms)
            return
        plain = Record(
            partition=record.partition,
            offset=record.offset,
            appended_ms=record.appended_ms,
            event_id=record.envelope.event_id,
            event=record.event,
        )
        if topic is TOKENS:
            self.audit.runs.take(plain)
        else:
            self.audit.take(topic, plain)

    async def _parked(self) -> None:
        parked = 0
        for topic in EVERY_TOPIC:
            partitions = list(range(self._partitions.get(topic.dead, 0)))
            bounds = await self._reader.bounds(replace(topic, name=topic.dead), partitions)
            parked += sum(kept.end - kept.first for kept in bounds.values())
        self.counts["parked records"] = parked


async def partition_counts(bootstrap: str) -> dict[str, int]:
    """How many partitions each topic has, `.dead` ones too. Raises NoTopics."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    needed = [name for topic in FIXED for name in (topic.name, topic.dead)]
    try:
        async with asyncio.timeout(ADMIN_WAIT_MS_MAX / 1000):
            await admin.start()
            try:
                there = set(await admin.list_topics())
                if missing := [name for name in needed if name not in there]:
                    raise NoTopics(f"{bootstrap} has no topic {missing[0]}: is this the cluster?")
                wanted = {*needed, *(topic.dead for topic in EVERY_TOPIC)}
                described = await admin.describe_topics(sorted(wanted & there))
            finally:
                await admin.close()
    except (KafkaError, TimeoutError) as error:
        raise NoTopics(f"{bootstrap} does not answer: {type(error).__name__}") from error
    return {entry["topic"]: len(entry["partitions"]) for entry in described}
