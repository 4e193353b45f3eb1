"""Waiting for a broker that is being started again, instead of dying of its absence at every attempt."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

# Shorter than the supervisor's patience with a part that starts.
BROKER_WAIT_MS_MAX: Final = 45_000
TRY_WAIT_MS_MAX: Final = 1_000
TRY_AGAIN_MS: Final = 200


async def broker_listens(bootstrap: str, *, wait_ms_max: int = BROKER_WAIT_MS_MAX) -> bool:
    """Return when one of the brokers (`host:port,host:port`) takes connections; False when none did in `wait_ms_max`."""
    addresses = [entry.rpartition(":") for entry in bootstrap.split(",")]
    try:
        async with asyncio.timeout(wait_ms_max / 1000):
            while True:
                for host, _, port in addresses:
                    if await _listens(host, int(port)):
                        return True
                await asyncio.sleep(TRY_AGAIN_MS / 1000)
    except TimeoutError:
        return False


async def _listens(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(TRY_WAIT_MS_MAX / 1000):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True
