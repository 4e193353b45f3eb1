"""A run's events as a streamed response: first what the viewer is in arrears, in pieces that it takes, then live.

The writer is a seam. `QueueWriter` works over any ASGI server; `edge/direct_writer.py` writes to the transport. Both bound what a
viewer that does not read may cost (I16): beyond VIEWER_BYTES_MAX its connection is closed, and its client resumes by event id.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Final, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edge.decisions.token_cursor import run_digest
from edge.decisions.viewer import Shown
from edge.runs import LiveRun
from edge.sse import HEADERS, KEEPALIVE, KEEPALIVE_EVERY_S, frame

VIEWER_BYTES_MAX: Final = 65_536
ARREARS_WAIT_S_MAX: Final = 20.0
"""A viewer that takes no piece of its arrears for so long is dropped."""


class ViewerGone(Exception):
    """The viewer's connection is closed or too slow."""


class StreamWriter(Protocol):
    """One response body. `offer` and `end` are a FrameSink's; `written_at` is when something was last written."""

    written_at: float

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the status line and the headers."""

    async def write(self, data: bytes) -> None:
        """Write and wait until the viewer has room again. Raises ViewerGone."""

    def offer(self, data: bytes) -> None:
        """Write without waiting; close the connection when the viewer has too much outstanding."""

    def end(self) -> None:
        """Nothing follows."""

    async def closed(self) -> None:
        """Wait until `end` was called and all is written, or the viewer is gone; then complete the response."""


class Streams:
    """All open streams of this process."""

    def __init__(self) -> None:
        self.open: set[StreamWriter] = set()
        self.draining = False
        self.dropped = 0
        """Viewers that were closed because they did not read."""

    def keep_alive(self, now: float) -> None:
        """Write a comment to every stream that was quiet for KEEPALIVE_EVERY_S. Call it about once a second."""
        for writer in tuple(self.open):
            if now - writer.written_at >= KEEPALIVE_EVERY_S:
                writer.offer(KEEPALIVE)

    def drain(self) -> None:
        """End every stream after the event it has written last; clients resume elsewhere."""
        self.draining = True
        for writer in tuple(self.open):
            writer.end()


class EventStream(Response):
    """The events of `run` after `cursor`. `first` are events that stand before them, such as a snapshot."""

    def __init__(
        self,
        *,
        run: LiveRun,
        cursor: int,
        streams: Streams,
        headers: Mapping[str, str],
        first: tuple[Shown, ...] = (),
    ) -> None:
        self.status_code = 200
        self.background = None
        self._run = run
        self._cursor = cursor
        self._first = first
        self._streams = streams
        self.init_headers({**dict(HEADERS), **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the run ends, the viewer goes, or this edge drains."""
        writer: StreamWriter = QueueWriter(self._streams, receive, send)
        await writer.start(self.raw_headers)
        if scope["method"] == "HEAD":
            writer.end()
        self._streams.open.add(writer)
        try:
            await self._feed(writer)
            await writer.closed()
        except ViewerGone:
            pass
        finally:
            self._streams.open.discard(writer)
            self._run.sinks.discard(writer)

    async def _feed(self, writer: StreamWriter) -> None:
        """Bring the viewer up to date, then join it to the live run at that exact position."""
        run, cursor = self._run, self._cursor
        if self._first:
            await writer.write(run.frames(self._first))
        while not self._streams.draining:
            shown = run.transcript.after(cursor) if run.transcript.end > cursor else ()
            reached = max(cursor, run.transcript.end)
            if shown and shown[-1].position < reached:
                cursor = shown[-1].position
                await writer.write(run.frames(shown))
                continue
            # No wait between these lines: what is accepted from here on comes by the sink, and nothing twice.
            if shown:
                writer.offer(run.frames(shown))
            if run.transcript.state.ended:
                break
            run.sinks.add(writer)
            return
        writer.end()


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

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        """See StreamWriter."""
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

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


class FinishedStream(Response):
    """The events of a run that nothing more is added to, as one body."""

    def __init__(self, run_id: str, shown: tuple[Shown, ...], headers: Mapping[str, str]) -> None:
        digest = run_digest(run_id)
        super().__init__(
            b"".join(frame(run_id, digest, one) for one in shown),
            headers={**dict(HEADERS), **headers},
        )
