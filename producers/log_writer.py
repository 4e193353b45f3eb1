"""One idempotent producer with bounded waits. `send` gives a future, `append` waits for the broker's acknowledgement.

Acks from all replicas, no linger: latency matters more than batch size here, and a backlog batches by itself. An idempotent send
waits for ever in an outage, so every wait for an acknowledgement has a deadline of its own: what happened to the record is then
unknown, and the caller must treat it so.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final, Self

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError, UnknownTopicOrPartitionError

from infra.log.broker_wait import broker_listens
from producers.placement import place
from schemas.codec import encode
from schemas.events import Event
from schemas.topics import Topic

ACK_WAIT_MS_MAX: Final = 10_000
BUFFER_WAIT_MS_MAX: Final = 5_000
START_WAIT_MS_MAX: Final = 30_000
STOP_WAIT_MS_MAX: Final = 3_000
STOOD_STILL_S: Final = 1.0
"""A wait that ends so late: the process was stopped, or its machine slept."""
UNKNOWN_TOPIC_PAUSE_S: Final = 0.1
# Room for headers, key and batch framing inside the topic's own limit.
RECORD_OVERHEAD_BYTES: Final = 2_048


class AppendFailed(Exception):
    """The record was not acknowledged in time or was refused. It may or may not be on the log."""


class RecordTooLarge(ValueError):
    """The event does not fit its topic. Nothing was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """Where the broker put the record, and its append time (ms, the broker's clock)."""

    partition: int
    offset: int
    appended_ms: int


class LogWriter:
    """Appends events. One per process; after an unrecoverable error the process ends and a new one is built."""

    def __init__(self, *, bootstrap: str, client_id: str) -> None:
        self._bootstrap = bootstrap
        self._client_id = client_id
        self._producer: AIOKafkaProducer | None = None
        self._partitions: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        await broker_listens(self._bootstrap)  # Where it does not, what follows says so.
        producer = AIOKafkaProducer(
            bootstrap_servers=self._bootstrap,
            client_id=self._client_id,
            acks="all",
            enable_idempotence=True,
            linger_ms=0,
            max_request_size=1_048_576,
            request_timeout_ms=10_000,
            metadata_max_age_ms=60_000,
        )
        async with asyncio.timeout(START_WAIT_MS_MAX / 1000):
            await producer.start()
        self._producer = producer
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._producer is not None:
            try:
                async with asyncio.timeout(STOP_WAIT_MS_MAX / 1000):
                    await self._producer.stop()
            except TimeoutError:
                pass  # An outage: what was not acknowledged is unknown, as for every reader of `append`.

    async def partitions_of(self, topic: Topic) -> int:
        """How many partitions the topic has. Read once; keyed topics never change it."""
        known = self._partitions.get(topic.name)
        if known is None:
            async with asyncio.timeout(START_WAIT_MS_MAX / 1000):
                known = await self._asked_partitions_of(topic)
            self._partitions[topic.name] = known
        return known

    async def _asked_partitions_of(self, topic: Topic) -> int:
        while True:
            try:
                return len(await self._ready().partitions_for(topic.name))
            except UnknownTopicOrPartitionError:
                # Also what the client library says where the broker was too busy to answer.
                await asyncio.sleep(UNKNOWN_TOPIC_PAUSE_S)

    async def send(
        self,
        topic: Topic,
        event: Event,
        *,
        event_id: str,
        cause_id: str = "",
        trace: str = "",
        partition: int | None = None,
        key: str | None = None,
    ) -> asyncio.Future[Appended]:
        """Hand the event to the producer, in order; the future resolves at the acknowledgement.

        Waits for buffer space, and the first time for the topic's partitions. `partition` (with `key`) is for events that name no key
        of their own. Raises RecordTooLarge, or AppendFailed when either does not come. The future raises aiokafka's KafkaError; bound
        your wait for it.
        """
        value, headers = encode(event, event_id=event_id, cause_id=cause_id, trace=trace)
        if len(value) > topic.record_bytes_max - RECORD_OVERHEAD_BYTES:
            raise RecordTooLarge(
                f"{type(event).__name__} has {len(value)} bytes; {topic.name} takes less"
            )
        if partition is None:
            try:
                async with asyncio.timeout(ACK_WAIT_MS_MAX / 1000):
                    partitions = await self.partitions_of(topic)
            except (KafkaError, TimeoutError) as error:
                raise AppendFailed(f"{topic.name}: its partitions are not known") from error
            found = place(topic, event, partitions)
            partition, key = found.partition, found.key
        return await self._send_bytes(
            topic.name, value, key.encode() if key is not None else None, partition, headers
        )

    async def append(
        self,
        topic: Topic,
        event: Event,
        *,
        event_id: str,
        cause_id: str = "",
        trace: str = "",
        partition: int | None = None,
        key: str | None = None,
        wait_ms_max: int = ACK_WAIT_MS_MAX,
    ) -> Appended:
        """Send and wait for the acknowledgement. Raises RecordTooLarge or AppendFailed."""
        future = await self.send(
            topic,
            event,
            event_id=event_id,
            cause_id=cause_id,
            trace=trace,
            partition=partition,
            key=key,
        )
        return await acknowledged(future, wait_ms_max=wait_ms_max)

    async def send_raw(
        self,
        topic_name: str,
        value: bytes | None,
        *,
        key: bytes | None,
        partition: int | None,
        headers: list[tuple[str, bytes]],
    ) -> asyncio.Future[Appended]:
        """Bytes as they are; only for parking and for tests that inject what no event can hold."""
        return await self._send_bytes(topic_name, value, key, partition, headers)

    async def _send_bytes(
        self,
        topic_name: str,
        value: bytes | None,
        key: bytes | None,
        partition: int | None,
        headers: list[tuple[str, bytes]],
    ) -> asyncio.Future[Appended]:
        try:
            async with asyncio.timeout(BUFFER_WAIT_MS_MAX / 1000):
                sent = await self._ready().send(
                    topic_name, value=value, key=key, partition=partition, headers=headers
                )
        except (KafkaError, TimeoutError) as error:
            raise AppendFailed(f"{topic_name}: {type(error).__name__}") from error
        appended: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        sent.add_done_callback(lambda done: _copy(done, appended))
        return appended

    def _ready(self) -> AIOKafkaProducer:
        assert self._producer is not None, "enter the LogWriter first"
        return self._producer


def _copy(sent: asyncio.Future[object], appended: asyncio.Future[Appended]) -> None:
    if appended.done():
        _taken(sent)
        return
    if sent.cancelled():
        appended.cancel()
    elif (error := sent.exception()) is not None:
        appended.set_exception(error)
    else:
        metadata = sent.result()
        appended.set_result(
            Appended(
                partition=metadata.partition,  # type: ignore[attr-defined]
                offset=metadata.offset,  # type: ignore[attr-defined]
                appended_ms=metadata.timestamp or 0,  # type: ignore[attr-defined]
            )
        )


def _taken(done: asyncio.Future[Any]) -> None:
    """Nobody may wait for it any more: then its failure is no news."""
    if not done.cancelled():
        done.exception()


async def acknowledged(
    future: asyncio.Future[Appended], *, wait_ms_max: int = ACK_WAIT_MS_MAX
) -> Appended:
    """Wait for an acknowledgement. Raises AppendFailed; the record's fate is then unknown.

    Where the whole process stood still meanwhile, nothing that came could be seen: then it waits once more.
    """
    future.add_done_callback(_taken)  # Also where it fails only after we have given up.
    clock = asyncio.get_running_loop().time
    until = clock() + wait_ms_max / 1000
    await asyncio.wait([future], timeout=wait_ms_max / 1000)
    if not future.done() and clock() - until > STOOD_STILL_S:
        await asyncio.wait([future], timeout=wait_ms_max / 1000)
    if not future.done():
        raise AppendFailed("TimeoutError") from TimeoutError()
    try:
        return future.result()
    except KafkaError as error:
        raise AppendFailed(type(error).__name__) from error
