"""The fast path of a stream: frames go straight to the connection's transport, without a task turn and a queue for each write.

`EdgeProtocol` is uvicorn's HTTP protocol with limits of ours, and puts an opener into each request's scope. A stream opens its writer
once its headers are on the wire; from then on `offer` writes synchronously, and the transport tells when the viewer does not read.

It leans on names of uvicorn that are not documented: the version is pinned, `missing_names` checks them at the start, and without
them streams go through plain ASGI.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from typing import Any, Final

import orjson
import uvicorn
from starlette.types import Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from edge.decisions.problems import INVALID, SERVER, Problem
from edge.streams import ARREARS_WAIT_S_MAX, VIEWER_BYTES_MAX, Streams, ViewerGone

UVICORN_VERSION: Final = "0.54.0"
EXTENSION: Final = "turnlog.direct"
CONNECTIONS_MAX: Final = 10_000
HEADER_BYTES_MAX: Final = 32_768
HEADER_WAIT_S_MAX: Final = 10.0
UNREAD_BYTES_MAX: Final = 8 * 1024 * 1024
"""How much of a body is still taken after its answer, so that the client comes to read it, before the connection is closed."""
LINGER_S_MAX: Final = 2.0
"""How long a client that was turned away is heard out."""
NOTSENT_LOWAT_BYTES: Final = 16_384
"""Without it the kernel takes megabytes for a viewer that does not read, before anybody notices."""
USER_TIMEOUT_MS: Final = 14_000
"""How long written bytes may stay unacknowledged. With a keepalive every 16 s a peer that is gone silently is found in 30 s."""
_CYCLE_NAMES: Final = (
    "response_started",
    "response_complete",
    "disconnected",
    "chunked_encoding",
    "keep_alive",
    "message_event",
    "transport",
    "on_response",
    "scope",
)
_PROTOCOL_NAMES: Final = (
    "connection_made",
    "connection_lost",
    "data_received",
    "on_message_begin",
    "on_headers_complete",
    "on_body",
    "on_message_complete",
    "pause_writing",
    "resume_writing",
    "send_400_response",
    "shutdown",
)


def missing_names() -> list[str]:
    """What this module leans on and the installed uvicorn does not have; empty when all is as it was tried."""
    missing = [name for name in _PROTOCOL_NAMES if not hasattr(HttpToolsProtocol, name)]
    code = RequestResponseCycle.__init__.__code__
    missing += [name for name in _CYCLE_NAMES if name not in {*code.co_names, *code.co_varnames}]
    if uvicorn.__version__ != UVICORN_VERSION:
        missing.append(f"uvicorn {UVICORN_VERSION}")
    return missing


class DirectWriter:
    """A StreamWriter on the transport of one response."""

    __slots__ = (
        "_chunked",
        "_clock",
        "_cycle",
        "_feeding",
        "_finished",
        "_gone",
        "_protocol",
        "_room",
        "_send",
        "_streams",
        "_transport",
        "written_at",
    )

    def __init__(self, protocol: EdgeProtocol, cycle: Any, streams: Streams, send: Send) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self._transport: asyncio.Transport = cycle.transport
        self._streams = streams
        self._send = send
        self._chunked: bool = cycle.chunked_encoding
        self._clock = protocol.loop.time
        self._feeding = False
        self._gone = False
        self._room = asyncio.Event()
        self._room.set()
        self._finished: asyncio.Future[None] = protocol.loop.create_future()
        self.written_at = self._clock()
        protocol.writer = self
        self._transport.set_write_buffer_limits(high=VIEWER_BYTES_MAX)
        _set_option(self._transport, "TCP_NOTSENT_LOWAT", NOTSENT_LOWAT_BYTES)

    def offer(self, data: bytes) -> None:
        """See StreamWriter."""
        if self._finished.done():
            return
        self.written_at = self._clock()
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def write(self, data: bytes) -> None:
        """See StreamWriter."""
        self._feeding = True
        try:
            self.offer(data)
            async with asyncio.timeout(ARREARS_WAIT_S_MAX):
                await self._room.wait()
        except TimeoutError:
            self._drop()
        finally:
            self._feeding = False
        if self._gone:
            raise ViewerGone

    def end(self) -> None:
        """See StreamWriter."""
        if not self._finished.done():
            self._finished.set_result(None)

    async def closed(self) -> None:
        """See StreamWriter."""
        try:
            await self._finished
            if self._gone:
                raise ViewerGone
            if self._chunked:
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            else:
                # HTTP/1.0: the end of the connection is the end of the body.
                self._cycle.response_complete = True
                self._transport.close()
                self._cycle.on_response()
        finally:
            self._release()

    # What the transport says, through the protocol.

    def paused(self) -> None:
        """The viewer has VIEWER_BYTES_MAX outstanding. In arrears we wait for it; a live one is dropped (I16)."""
        if self._feeding:
            self._room.clear()
        else:
            self._drop()

    def resumed(self) -> None:
        """There is room again."""
        self._room.set()

    def lost(self) -> None:
        """The connection is closed."""
        self._gone = True
        # The connection may have gone on to a pipelined successor; this response's own cycle must know.
        self._cycle.disconnected = True
        self._cycle.message_event.set()
        self._room.set()
        self.end()

    def _drop(self) -> None:
        if not self._gone:
            self._streams.dropped += 1
            self.lost()
            self._transport.abort()

    def _release(self) -> None:
        if self._protocol.writer is self:
            self._protocol.writer = None


class DirectOpener:
    """What a request's scope carries: opens the writer of that request's response."""

    __slots__ = ("_cycle", "_protocol")

    def __init__(self, protocol: EdgeProtocol, cycle: Any) -> None:
        self._protocol = protocol
        self._cycle = cycle

    def before_start(self) -> None:
        """Call it before the response starts: an HTTP/1.0 client knows no chunks."""
        if self._cycle.scope["http_version"] == "1.0":
            self._cycle.chunked_encoding = False
            self._cycle.keep_alive = False

    def open(self, streams: Streams, send: Send) -> DirectWriter | None:
        """The writer; None where the headers are not on the wire (something buffers them) or the response has no such body."""
        cycle = self._cycle
        usable = (
            cycle.response_started
            and not cycle.response_complete
            and not cycle.disconnected
            and cycle.scope["method"] != "HEAD"
            and not cycle.transport.is_closing()
            and self._protocol.writer is None
        )
        return DirectWriter(self._protocol, cycle, streams, send) if usable else None


class EdgeProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with bounds on what a client may send before it is served, and with direct writers."""

    writer: DirectWriter | None = None
    _header_bytes = 0
    _unread_bytes = 0
    _in_headers = True
    _turned_away = False
    _linger_timer: asyncio.TimerHandle | None = None
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection in, or turn it away."""
        super().connection_made(transport)
        _set_option(transport, "TCP_USER_TIMEOUT", USER_TIMEOUT_MS)
        if len(self.connections) > CONNECTIONS_MAX:
            self._turn_away(503, SERVER, "overloaded", "This server has too many connections.")
            self.transport.close()  # And nobody is heard out.
            return
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the writer."""
        self._stop_timer()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        if self.writer is not None:
            self.writer.lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, within the bounds of a request's head."""
        if self._turned_away:
            self._unread(len(data))
            return
        if self._in_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        if (
            self._in_headers
            and self._header_bytes > HEADER_BYTES_MAX
            and not self.transport.is_closing()
        ):
            self._headers_too_large()

    def on_message_begin(self) -> None:
        """A request's head begins."""
        if self._turned_away:
            return
        super().on_message_begin()
        self._unread_bytes = 0
        self._expect_headers()

    def on_headers_complete(self) -> None:
        """A request's head is complete: hand it on, with the opener of its direct writer."""
        if self._turned_away:
            return
        self._in_headers = False
        self._header_bytes = 0
        self._stop_timer()
        # A head that came in one piece was never seen growing.
        head = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if head > HEADER_BYTES_MAX:
            self._headers_too_large()
            return
        super().on_headers_complete()
        self.scope["extensions"] = {EXTENSION: DirectOpener(self, self.cycle)}  # type: ignore[dict-item]

    def on_body(self, body: bytes) -> None:
        """A piece of a request's body; what comes after the answer is thrown away, within bounds."""
        if self._turned_away:
            return
        super().on_body(body)
        if self.cycle.response_complete:
            self._unread(len(body))

    def on_message_complete(self) -> None:
        """A request is complete; the next head may follow."""
        if self._turned_away:
            return
        super().on_message_complete()
        self._in_headers = True
        self._header_bytes = 0

    def pause_writing(self) -> None:
        """The client does not take what was written."""
        super().pause_writing()
        if self.writer is not None:
            self.writer.paused()

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        if self.writer is not None:
            self.writer.resumed()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP."""
        self._turn_away(400, INVALID, "bad_http", "This is not a valid HTTP request.")

    def _expect_headers(self) -> None:
        self._stop_timer()
        self._in_headers = True
        self._header_timer = self.loop.call_later(HEADER_WAIT_S_MAX, self._headers_late)

    def _headers_late(self) -> None:
        if self._in_headers and not self.transport.is_closing():
            self._turn_away(408, INVALID, "headers_timeout", "The headers did not arrive in time.")

    def _headers_too_large(self) -> None:
        self._turn_away(
            431, INVALID, "headers_too_large", f"Headers exceed {HEADER_BYTES_MAX} bytes."
        )

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _turn_away(self, status: int, kind: str, code: str, message: str) -> None:
        """Answer outside of the application, in the one error shape, and close; silently where a response is under way."""
        if self._turned_away:
            return
        self._turned_away = True
        self._stop_timer()
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete:
            problem = Problem(status=status, type=kind, code=code, message=message)
            body = orjson.dumps(problem.body())
            self.transport.write(
                b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                b"x-request-id: %b\r\nconnection: close\r\n\r\n%b"
                % (status, len(body), secrets.token_hex(12).encode(), body)
            )
            # A client that still sends would lose the answer if the connection were closed over what it sent: it is heard out first.
            self._unread_bytes = 0
            self._linger_timer = self.loop.call_later(LINGER_S_MAX, self.transport.close)
            with contextlib.suppress(OSError):  # It is gone already.
                self.transport.write_eof()
        else:
            self.transport.close()

    def _unread(self, size: int) -> None:
        """What comes after the answer is thrown away, within bounds."""
        self._unread_bytes += size
        if self._unread_bytes > UNREAD_BYTES_MAX:
            self.transport.close()


def opener_of(scope: Scope) -> DirectOpener | None:
    """The request's opener, where EdgeProtocol serves it."""
    found = scope.get("extensions", {}).get(EXTENSION)
    return found if isinstance(found, DirectOpener) else None


def _set_option(transport: asyncio.Transport, name: str, value: int) -> None:
    option = getattr(socket, name, None)
    sock = transport.get_extra_info("socket")
    if option is not None and sock is not None:
        with contextlib.suppress(OSError):  # Closed already; it is only a bound on memory.
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
