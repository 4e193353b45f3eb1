"""How a consumer is let go: for so long and no longer, since a broker that is away would keep it from stopping."""

from __future__ import annotations

import asyncio
from typing import Final

from aiokafka import AIOKafkaConsumer

STOP_WAIT_MS_MAX: Final = 3_000
CLOSE_WAIT_MS_MAX: Final = 1_000
"""For the connections of one that does not stop."""


async def stop_consumer(consumer: AIOKafkaConsumer, *, wait_ms_max: int = STOP_WAIT_MS_MAX) -> bool:
    """Whether it has stopped within `wait_ms_max`. Raises what stopping it raises, but no cancellation that is not ours."""
    stopping = asyncio.ensure_future(_stopped(consumer))
    try:
        done, _ = await asyncio.wait([stopping], timeout=wait_ms_max / 1000)
    finally:
        stopping.cancel()
    await asyncio.wait([stopping], timeout=CLOSE_WAIT_MS_MAX / 1000)
    if stopping.done() and not stopping.cancelled():
        stopping.result()
    return bool(done)


async def _stopped(consumer: AIOKafkaConsumer) -> None:
    try:
        await consumer.stop()
    finally:
        # A fetch that has failed just now pauses; cancelled in its pause, it lets its cancellation out of `stop`, which is then left half
        # done. Closed twice is closed once.
        await consumer._client.close()  # noqa: SLF001
