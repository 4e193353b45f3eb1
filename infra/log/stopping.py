"""How a consumer is let go: for so long and no longer, since a broker that is away would keep it from stopping."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from aiokafka import AIOKafkaConsumer

STOP_WAIT_MS_MAX: Final = 3_000


async def stop_consumer(consumer: AIOKafkaConsumer) -> None:
    """Return when it has stopped, or after STOP_WAIT_MS_MAX."""
    with suppress(TimeoutError):
        async with asyncio.timeout(STOP_WAIT_MS_MAX / 1000):
            await consumer.stop()
