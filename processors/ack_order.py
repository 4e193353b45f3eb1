"""Acknowledging source records in order, while the work for them ends in any order.

A commit passes everything below it, so a record that is done waits here for those before it in its partition.

Work that does nothing but wait for something else, perhaps for minutes, is *set aside*: then it leaves its place to others, and what is
done behind it is held back within a bound of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

IN_FLIGHT_RECORDS_MAX: Final = 2_000
SET_ASIDE_RECORDS_MAX: Final = 10_000
HELD_RECORDS_MAX: Final = 50_000

Done = asyncio.Future[None]


class TooManyAside(Exception):
    """As many records wait for something else as may."""


class AckOrder:
    """The records in work, by partition, of one topic. `acknowledge` lets a record be committed."""

    def __init__(
        self,
        acknowledge: Callable[[Any], None],
        *,
        in_flight_max: int = IN_FLIGHT_RECORDS_MAX,
        set_aside_max: int = SET_ASIDE_RECORDS_MAX,
        held_max: int = HELD_RECORDS_MAX,
    ) -> None:
        self._acknowledge = acknowledge
        self._in_flight_max = in_flight_max
        self._set_aside_max = set_aside_max
        self._held_max = held_max
        self._working = 0
        self._aside = 0
        self._queues: dict[int, deque[tuple[Any, Done | None]]] = {}
        self._count = 0
        self._room = asyncio.Event()

    async def room(self) -> None:
        """Wait until another record may be taken into work."""
        while (
            self._working - self._aside >= self._in_flight_max
            or self._count - self._working >= self._held_max
        ):
            self._room.clear()
            await self._room.wait()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """While the work of a record only waits. Raises TooManyAside."""
        if self._aside >= self._set_aside_max:
            raise TooManyAside
        self._aside += 1
        self._room.set()
        try:
            yield
        finally:
            self._aside -= 1

    def add(self, message: Any, work: Done | None = None) -> None:
        """The next record of its partition; `work` None: it is done. Its failure must end the process elsewhere."""
        self._queues.setdefault(message.partition, deque()).append((message, work))
        self._count += 1
        if work is None:
            self._drain(message.partition)
        else:
            self._working += 1
            work.add_done_callback(lambda _: self._done(message.partition))

    def _done(self, partition: int) -> None:
        self._working -= 1
        self._drain(partition)

    def forget(self, partitions: Iterable[int]) -> None:
        """Stop the work of partitions that were taken away, and acknowledge nothing of them any more."""
        for partition in partitions:
            for _, work in self._queues.pop(partition, ()):
                self._count -= 1
                if work is not None:
                    work.cancel()
        self._room.set()

    def _drain(self, partition: int) -> None:
        queue = self._queues.get(partition)
        while queue:
            message, work = queue[0]
            if work is not None and (
                not work.done() or work.cancelled() or work.exception() is not None
            ):
                break
            queue.popleft()
            self._count -= 1
            self._acknowledge(message)
        self._room.set()
