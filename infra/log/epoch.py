"""The topic epoch in run ids: another cluster means other offsets, so ids of another epoch are answered from history."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Final

from aiokafka.admin import AIOKafkaAdminClient

EPOCH_WAIT_S_MAX: Final = 30.0


async def topic_epoch(bootstrap: str) -> int:
    """The epoch of this cluster's topics, 0 to 65535: a hash of the cluster's id. Raises KafkaError or TimeoutError."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    async with asyncio.timeout(EPOCH_WAIT_S_MAX):
        await admin.start()
        try:
            cluster_id = str((await admin.describe_cluster())["cluster_id"])
        finally:
            await admin.close()
    return int.from_bytes(hashlib.blake2b(cluster_id.encode(), digest_size=2).digest(), "big")
