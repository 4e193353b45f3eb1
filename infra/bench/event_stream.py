"""A lean HTTP/1.1 client for event streams: one request a connection, arrival times, little CPU.

A general client costs several times the CPU of the server that it measures; on two cores that would be measured instead.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

CONNECT_WAIT_S: Final = 10.0
IDLE_WAIT_S: Final = 60.0
LIMIT_BYTES: Final = 1 << 20


class BadAnswerError(Exception):
    """The server's answer was not an event stream. The message holds the status line and the start of the body."""


@dataclass(slots=True)
class Arrived:
    """One frame as it came: `at_s` is `time.time()` when the bytes were read."""

    at_s: float
    name: str
    id: str
    data: bytes

    def json(self) -> Any:
        """The parsed data."""
        return json.loads(self.data)


@dataclass(slots=True)
class Answer:
    """A response: status, headers in lower case, and its frames."""

    status: int
    headers: dict[str, str]
    frames: AsyncIterator[Arrived]


async def request(
    host: str,
    port: int,
    method: str,
    path: str,
    *,
    token: str,
    body: bytes = b"",
    headers: str = "",
) -> Answer:
    """Send one request and read the response's head. Close it by reading or dropping `frames`."""
    reader, writer = await _sent(host, port, method, path, token=token, body=body, headers=headers)
    async with asyncio.timeout(IDLE_WAIT_S):
        raw = await reader.readuntil(b"\r\n\r\n")
    status_line, *lines = raw.decode("latin-1").split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines if ": " in line)
    return Answer(
        status=int(status_line.split(" ", 2)[1]),
        headers=fields,
        frames=_frames(reader, writer, chunked=fields.get("transfer-encoding") == "chunked"),
    )


async def _sent(
    host: str, port: int, method: str, path: str, *, token: str, body: bytes, headers: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A new connection on which this request was sent. `headers` are whole lines."""
    async with asyncio.timeout(CONNECT_WAIT_S):
        reader, writer = await asyncio.open_connection(host, port, limit=LIMIT_BYTES)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    )
    writer.write(head.encode() + body)
    return reader, writer


async def get_json(
    host: str, port: int, method: str, path: str, *, token: str, body: bytes = b""
) -> Any:
    """One small JSON request on a connection of its own. Raises BadAnswerError for an error status."""
    reader, writer = await _sent(
        host, port, method, path, token=token, body=body, headers="Connection: close\r\n"
    )
    async with asyncio.timeout(IDLE_WAIT_S):
        raw = await reader.read(-1)
    writer.close()
    status_line, _, rest = raw.partition(b"\r\n")
    content = rest.partition(b"\r\n\r\n")[2]
    if int(status_line.split(b" ")[1]) >= 400:
        raise BadAnswerError(f"{status_line.decode()}: {content[:200].decode(errors='replace')}")
    return json.loads(content)


async def _frames(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, chunked: bool
) -> AsyncIterator[Arrived]:
    rest = b""
    try:
        while True:
            async with asyncio.timeout(IDLE_WAIT_S):
                chunk = await (_chunk(reader) if chunked else reader.read(65_536))
            if not chunk:
                return
            at_s = time.time()
            *whole, rest = (rest + chunk).split(b"\n\n")
            for block in whole:
                if (frame := _frame(block, at_s)) is not None:
                    yield frame
    finally:
        writer.close()


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
    body = await reader.readexactly(size + 2)
    return body[:-2]


def _frame(block: bytes, at_s: float) -> Arrived | None:
    name = event_id = ""
    data = b""
    for line in block.split(b"\n"):
        if line.startswith(b"data: "):
            data = line[6:]
        elif line.startswith(b"event: "):
            name = line[7:].decode()
        elif line.startswith(b"id: "):
            event_id = line[4:].decode()
    return Arrived(at_s, name, event_id, data) if data else None
