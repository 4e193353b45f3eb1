"""A stream's writer over plain ASGI, for servers that are not ours."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import Receive, Send

from edge.streams import ARREARS_WAIT_S_MAX, VIEWER_BYTES_MAX, Streams, ViewerGone


class QueueWriter:
    """A writer over plain ASGI: frames wait in a queue of at most VIEWER_BYTES_MAX, joined into one body message a turn."""

    def __init__(self, streams: Streams, receive: Receive, send: Send) -> None:
        self._streams = streams
        self._receive = receive
        self._send = send
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._ended = False
        self._dropped = asyncio.Event()
        self._wake = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self.written_at = self._clock()

    async def write(self, data: bytes) -> None:
        """See StreamWriter."""
        try:
            async with asyncio.timeout(ARREARS_WAIT_S_MAX):
                await self._body(data)
        except TimeoutError:
            self._drop()
            raise ViewerGone from None

    def offer(self, data: bytes) -> None:
        """See StreamWriter."""
        if self._ended or self._dropped.is_set():
            return
        # What is offered to an empty queue is taken whatever its size: it may be one long piece of arrears.
        if self._queued_bytes and self._queued_bytes + len(data) > VIEWER_BYTES_MAX:
            self._drop()
            return
        self._queue.append(data)
        self._queued_bytes += len(data)
        self._wake.set()

    def end(self) -> None:
        """See StreamWriter."""
        self._ended = True
        self._wake.set()

    async def closed(self) -> None:
        """See StreamWriter."""
        tasks = [
            asyncio.ensure_future(wait)
            for wait in (self._pump(), self._watch(), self._dropped.wait())
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._dropped.is_set():
            raise ViewerGone

    async def _pump(self) -> None:
        while not self._dropped.is_set():
            if self._queue:
                data = b"".join(self._queue)
                self._queue.clear()
                await self._body(data)
                self._queued_bytes -= len(data)
            elif self._ended:
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _body(self, data: bytes) -> None:
        self.written_at = self._clock()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def _drop(self) -> None:
        if not self._dropped.is_set():
            self._dropped.set()
            self._streams.dropped += 1
            self._queue.clear()
            self._wake.set()
