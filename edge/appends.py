"""What this edge appends to the log, and the end of a producer that cannot go on.

An idempotent producer whose sequence is lost fails every later send. Then the process has to end and start anew: its streams resume
by event id, and no prompt is appended twice.
"""

from __future__ import annotations

import asyncio
import logging

from aiokafka.errors import KafkaError, MessageSizeTooLargeError

from producers.log_writer import Appended, AppendFailed, LogWriter
from schemas.events import Event
from schemas.topics import Topic

log = logging.getLogger(__name__)


class ProducerBroken(Exception):
    """The producer takes nothing any more."""


class Appends:
    """The write side of the routes."""

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer
        self._broken = asyncio.Event()

    async def append(
        self,
        topic: Topic,
        event: Event,
        *,
        event_id: str,
        wait_ms_max: int,
        partition: int | None = None,
    ) -> Appended:
        """Append and wait for the acknowledgement. Raises AppendFailed: then it may or may not be on the log."""
        try:
            return await self._writer.append(
                topic, event, event_id=event_id, wait_ms_max=wait_ms_max, partition=partition
            )
        except AppendFailed as error:
            self._note(error.__cause__)
            raise

    async def partitions_of(self, topic: Topic) -> int:
        """How many partitions the topic has."""
        return await self._writer.partitions_of(topic)

    async def hand_over(self, topic: Topic, event: Event, *, event_id: str) -> None:
        """Append without waiting: who needs to know looks at the log. Raises RecordTooLarge, or AppendFailed when nothing was sent."""
        try:
            appending = await self._writer.send(topic, event, event_id=event_id)
        except AppendFailed as error:
            self._note(error.__cause__)
            raise
        appending.add_done_callback(self._note_fate)

    async def watch(self) -> None:
        """Raise ProducerBroken once there is no use in going on."""
        await self._broken.wait()
        raise ProducerBroken

    def _note_fate(self, appending: asyncio.Future[Appended]) -> None:
        if not appending.cancelled():
            self._note(appending.exception())

    def _note(self, error: BaseException | None) -> None:
        if error is None:
            return
        log.warning("not acknowledged: %s", type(error).__name__)
        if (
            isinstance(error, KafkaError)
            and not error.retriable
            and not isinstance(error, MessageSizeTooLargeError)
        ):
            self._broken.set()
