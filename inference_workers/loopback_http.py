"""A small HTTP client for the engine's own port, cheap per token: bytes go from the socket through
httptools' parser straight to a callback, without a task or an object for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import httptools

# Bounds of what one answer of the engine's port may hold, in bytes.
EVENT_BYTES_MAX: Final = 1_048_576
BODY_BYTES_MAX: Final = 4_194_304
_DATA: Final = b"data: "


class LoopbackCall(asyncio.Protocol):
    """One request on a connection of its own.

    A 200 event stream goes to `on_event`, one call for each event's data, in order. Any other
    answer is kept in `body`. `done` ends when the answer is complete (True) or cut off (False),
    and raises what `on_event` raised.
    """

    def __init__(self, request: bytes, on_event: Callable[[bytes], None] | None) -> None:
        self.status = 0
        self.body = b""
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._request = request
        self._on_event = on_event
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._rest = b""

    def abort(self) -> None:
        """Close the connection now: the engine takes it for a cancel."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            # A defect of ours, not of the other side: whoever awaits the call has to hear of it.
            self._fail(error.__context__ or error)
        except httptools.HttpParserError:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle(complete=False)

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.status != 200 or self._on_event is None:
            self.body += body
            if len(self.body) > BODY_BYTES_MAX:
                self.abort()
            return
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            if event.startswith(_DATA):
                self._on_event(event[len(_DATA) :])
        if len(self._rest) > EVENT_BYTES_MAX:
            self.abort()

    def on_message_complete(self) -> None:
        self._settle(complete=True)
        self.abort()

    def _fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)
        self.abort()

    def _settle(self, *, complete: bool) -> None:
        if not self.done.done():
            self.done.set_result(complete)


class LoopbackPort:
    """Where the engine listens, and the key it wants."""

    def __init__(self, *, host: str, port: int, key: str) -> None:
        self.host = host
        self.port = port
        self._head = f"Host: {host}:{port}\r\nAuthorization: Bearer {key}\r\n"

    async def open(
        self, path: str, body: bytes = b"", on_event: Callable[[bytes], None] | None = None
    ) -> LoopbackCall:
        """POST the body, or GET where it is empty. Raises OSError where nobody listens."""
        head = (
            f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\n{self._head}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        _, call = await asyncio.get_running_loop().create_connection(
            lambda: LoopbackCall(head.encode() + body, on_event), self.host, self.port
        )
        return call

    async def ask(self, path: str, body: bytes = b"", *, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of a short answer. Raises OSError, also where it is cut off or late."""
        async with asyncio.timeout(timeout_s):
            call = await self.open(path, body)
            try:
                if not await call.done:
                    raise ConnectionResetError(f"{path}: the answer was cut off")
            finally:
                call.abort()
        return call.status, call.body
