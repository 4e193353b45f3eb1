"""The command's client of the edge comes back after what an edge that drains, restarts or is full answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from infra.command.edge_client import EdgeClient, EdgeRefusedError

DEADLINE_S = 60.0
DRAINING = (
    b"HTTP/1.1 503 x\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
    b'{"error": {"message": "going away", "code": "draining"}}'
)
CUT = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
HALF = b'event: message.delta\nid: 1-a\ndata: {"text": "Hel"}\n\n'
REST = (
    b'event: message.delta\nid: 2-a\ndata: {"text": "lo"}\n\n'
    b'event: run.ended\nid: 3-a\ndata: {"finish_reason": "stop"}\n\n'
)


@asynccontextmanager
async def _edge(*answers: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Gives each connection the next answer and closes it. Gives its address and the requests."""
    requests: list[bytes] = []
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(left.pop(0))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", requests
    finally:
        server.close()


async def _text(client: EdgeClient) -> str:
    return "".join([event.data.get("text", "") async for event in client.follow("chat_x", "run_x")])


async def test_a_stream_is_resumed_past_an_edge_that_drains() -> None:
    async with (
        _edge(CUT + HALF, DRAINING, CUT + REST) as (url, requests),
        EdgeClient(url=url, token="t") as client,
        asyncio.timeout(DEADLINE_S),
    ):
        assert await _text(client) == "Hello"
        assert b"Last-Event-ID: 1-a" in requests[1]
        assert b"Last-Event-ID: 1-a" in requests[2]


async def test_a_run_that_does_not_exist_is_not_asked_for_again() -> None:
    missing = DRAINING.replace(b"503", b"404")
    async with (
        _edge(missing) as (url, _),
        EdgeClient(url=url, token="t") as client,
        asyncio.timeout(DEADLINE_S),
    ):
        with pytest.raises(EdgeRefusedError, match="draining"):
            await _text(client)
