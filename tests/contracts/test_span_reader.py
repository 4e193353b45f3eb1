"""A pool of readers keeps its places whatever becomes of who takes one. No broker is needed: none of these brokers answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from infra.log.span_reader import SpanFailed, SpanReader
from schemas.topics import TOKENS

DEADLINE_S = 60.0


@asynccontextmanager
async def mute_broker() -> AsyncIterator[tuple[str, asyncio.Queue[None]]]:
    """Takes connections and never answers. Gives its address, and a queue with one entry a connection."""
    connections: asyncio.Queue[None] = asyncio.Queue()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.put_nowait(None)
        await reader.read()  # To its end: nothing is answered.
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"127.0.0.1:{port}", connections
    finally:
        server.close()


async def _read(reader: SpanReader) -> None:
    async for _ in reader.span(TOKENS, 0, 0, 1):
        pass


async def test_a_reader_that_cannot_connect_says_so_each_time_it_is_asked() -> None:
    reader = SpanReader(bootstrap="127.0.0.1:1", client_id="test", readers_max=1)
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(3):
            with pytest.raises(SpanFailed):
                await _read(reader)


async def test_who_gives_up_while_a_reader_connects_gives_its_place_back() -> None:
    async with mute_broker() as (bootstrap, connections), asyncio.timeout(DEADLINE_S):
        reader = SpanReader(bootstrap=bootstrap, client_id="test", readers_max=1)
        for _ in range(3):
            reading = asyncio.create_task(_read(reader))
            await connections.get()  # It has the one place, and connects.
            reading.cancel()
            await asyncio.wait([reading])
            assert reading.cancelled()


async def test_who_finds_no_place_for_too_long_is_told_so() -> None:
    async with mute_broker() as (bootstrap, connections), asyncio.timeout(DEADLINE_S):
        reader = SpanReader(
            bootstrap=bootstrap, client_id="test", readers_max=1, place_wait_ms_max=100
        )
        first = asyncio.create_task(_read(reader))
        await connections.get()
        with pytest.raises(SpanFailed):
            await _read(reader)
        first.cancel()
        await asyncio.wait([first])
