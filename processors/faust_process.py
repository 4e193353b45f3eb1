"""What both Faust processes share: how the app is set up, how it runs inside our own loop, and how it ends.

Agents only, no table, concurrency 1, raw bytes. An exception inside an agent would be skipped and its record committed, so whatever goes
wrong ends the process by `die` before anything is committed; the records come again to whoever starts next.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import faust
from faust.topics import Topic as FaustTopic

from infra.log.broker_wait import broker_listens
from infra.log.group import METADATA_AGE_MS_MAX
from infra.log.records import BadRecord, LogRecord, read_record
from infra.process import DEFECT_EXIT
from producers.log_writer import LogWriter
from producers.parking import park
from schemas.topics import Topic

log = logging.getLogger(__name__)

STOP_WAIT_MS_MAX: Final = 1_500
COMMIT_INTERVAL_S: Final = 0.5
REQUEST_WAIT_S_MAX: Final = 20.0
PRODUCER_WAIT_S_MAX: Final = 30.0
# The stream buffers this many records between fetch and agent.
BUFFERED_RECORDS_MAX: Final = 1_024

T = TypeVar("T")


def die(event: str, error: BaseException | None = None) -> NoReturn:
    """End the process now, without committing. Logs the event and where the error came from, no content."""
    log.critical("%s", event, exc_info=error)
    logging.shutdown()
    os._exit(DEFECT_EXIT)


def run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and end the process with code 0.

    A stop that was cut off leaves Faust's consumer thread behind, and the interpreter would wait for it for ever; and tasks of Faust that
    take no cancellation, for which the loop would wait.
    """

    async def to_end() -> None:
        await work
        logging.shutdown()
        os._exit(0)

    asyncio.run(to_end())


async def or_die(event: str, work: Awaitable[T]) -> T:
    """Await `work`; any failure but a cancellation ends the process."""
    try:
        return await work
    except Exception as error:  # noqa: BLE001 - whatever it is, nothing may be committed after it
        die(event, error)


class HeldTopic(FaustTopic):
    """A topic whose records are acknowledged by us alone.

    A stream acknowledges by itself what it skips during a rebalance, which lets a commit pass a record that nobody decided. One more
    reference on each message makes that harmless: `acknowledge` gives back both.
    """

    async def decode(self, message: Any, *, propagate: bool = False) -> Any:
        message.incref()
        return await super().decode(message, propagate=propagate)


REFERENCES: Final = 2


def acknowledge(app: faust.App, message: Any) -> None:
    """Let the record be committed. In order within a partition, and only when its outputs are acknowledged.

    A record of an earlier assignment comes again; acknowledging it now could let a commit pass those before it.
    """
    if message.generation_id == app.consumer_generation_id:
        message.ack(app.consumer, n=REFERENCES)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaustSettings:
    """How a Faust app reaches its cluster. `session_ms`: after this long without a heartbeat its partitions go to another."""

    group: str
    bootstrap: str
    session_ms: int
    home: Path


def build_app(settings: FaustSettings) -> faust.App:
    """An app that declares no topic, keeps no table and serves no web page."""
    session_s = settings.session_ms / 1000
    data = settings.home / "faust" / settings.group  # Faust wants a folder, and leaves it empty.
    data.mkdir(parents=True, exist_ok=True)
    return faust.App(
        settings.group,
        broker=[f"kafka://{address}" for address in settings.bootstrap.split(",")],
        datadir=str(data),
        store="memory://",
        autodiscover=False,
        web_enabled=False,
        topic_allow_declare=False,
        topic_disable_leader=True,
        key_serializer="raw",
        value_serializer="raw",
        Topic=HeldTopic,
        broker_session_timeout=session_s,
        broker_heartbeat_interval=session_s / 4,
        broker_rebalance_timeout=session_s,
        broker_request_timeout=REQUEST_WAIT_S_MAX,
        broker_commit_interval=COMMIT_INTERVAL_S,
        producer_request_timeout=PRODUCER_WAIT_S_MAX,
        consumer_auto_offset_reset="earliest",
        consumer_metadata_max_age_ms=METADATA_AGE_MS_MAX,
        stream_buffer_maxsize=BUFFERED_RECORDS_MAX,
        stream_wait_empty=False,
    )


def consume(
    app: faust.App, topic: Topic, take: Callable[[Any, LogRecord | BadRecord], Awaitable[None]]
) -> None:
    """Feed each record of `topic`, with the message to acknowledge, to `take`, one after the other, until the app is told to stop.

    A stop that takes too long is cut off, and then the streams are still there: what they bring is left to whoever comes next.
    """
    source = app.topic(topic.name, key_type=bytes, value_type=bytes)

    async def agent(stream: Any) -> None:
        async for event in stream.noack().events():
            message = event.message
            if _stopping(app):
                return
            try:
                await take(message, _record(topic, message))
            except Exception as error:  # noqa: BLE001 - whatever it is, nothing may be committed after it
                if _stopping(app):
                    log.warning(
                        "left a record of %s to the next: %s", topic.name, type(error).__name__
                    )
                    return
                die("a record could not be taken", error)

    app.agent(source, name=f"take-{topic.name}", concurrency=1)(agent)


def _stopping(app: faust.App) -> bool:
    return bool(app.should_stop)


@dataclass(frozen=True, slots=True)
class _Raw:
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]


def _record(topic: Topic, message: Any) -> LogRecord | BadRecord:
    raw = _Raw(
        message.partition,
        message.offset,
        round(message.timestamp * 1000),
        message.key,
        message.value,
        tuple(message.headers or ()),
    )
    return read_record(topic, raw)


def bad_record(message: Any, record: LogRecord, reason: str) -> BadRecord:
    """A record that decodes, and yet nobody can act on, for the reason given."""
    return BadRecord(
        record.partition,
        record.offset,
        record.appended_ms,
        message.key,
        message.value,
        tuple(message.headers or ()),
        reason,
    )


def log_bad(topic: Topic, bad: BadRecord) -> None:
    """Say that a record was passed over, which the topic's named reader parks (I19)."""
    log.error("passed over %s/%d/%d: %s", topic.name, bad.partition, bad.offset, bad.reason)


async def park_bad(writer: LogWriter, topic: Topic, bad: BadRecord) -> None:
    """Set a record aside, as the topic's named reader or because only we see what is wrong, and wait for it (I19)."""
    log.error("parked %s/%d/%d: %s", topic.name, bad.partition, bad.offset, bad.reason)
    await park(writer, topic, bad)


async def broker_or_stop(bootstrap: str, stop: asyncio.Event) -> bool:
    """Wait for a broker that is being started (again); False when `stop` came first. Without a broker the process ends."""
    listening = asyncio.ensure_future(broker_listens(bootstrap))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({listening, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not listening.done():
        listening.cancel()
        return False
    if not listening.result():
        die(f"no Kafka broker answers at {bootstrap}")
    return True


async def run_until(app: faust.App, stop: asyncio.Event) -> None:
    """Run the app until `stop`, then leave the group. Whatever ends it earlier is a defect.

    A start may last for ever, where the broker goes in the middle of it; so a stop ends that too. Stopping the app may last as long, and
    Faust goes on with it when it is cancelled; so that is left alone after STOP_WAIT_MS_MAX.
    """
    starting, stopping = asyncio.ensure_future(app.start()), asyncio.ensure_future(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not stop.is_set():
        await or_die("the app did not start", starting)
        outcome = await app.wait(stop.wait())
        if outcome.stopped:
            die("the app ended by itself", app.crash_reason)
    starting.cancel()
    leaving = asyncio.ensure_future(app.stop())
    _, late = await asyncio.wait({starting, leaving}, timeout=STOP_WAIT_MS_MAX / 1000)
    if late:
        log.warning("left the group without saying so")
    leaving.cancel()
    if leaving.done() and not leaving.cancelled():
        leaving.result()
