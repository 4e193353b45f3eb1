"""Waiting for a broker: as long as stated, and no longer than needed."""

from __future__ import annotations

import asyncio

from infra.log.broker_wait import broker_listens
from tests.integration.running import free_ports


async def serve(port: int) -> asyncio.Server:
    return await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", port)


async def test_a_broker_that_listens_is_not_waited_for() -> None:
    (port,) = free_ports(1)
    async with await serve(port):
        assert await broker_listens(f"127.0.0.1:1,127.0.0.1:{port}", wait_ms_max=30_000)


async def test_a_broker_that_comes_later_is_waited_for() -> None:
    (port,) = free_ports(1)
    waiting = asyncio.create_task(broker_listens(f"127.0.0.1:{port}", wait_ms_max=30_000))
    await asyncio.wait([waiting], timeout=0.05)
    assert not waiting.done()
    async with await serve(port):
        assert await waiting


async def test_a_broker_that_never_comes_is_given_up_in_time() -> None:
    (port,) = free_ports(1)
    async with asyncio.timeout(30):
        assert not await broker_listens(f"127.0.0.1:{port}", wait_ms_max=300)
