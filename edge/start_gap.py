"""What was admitted before this edge began to follow the log: it knows of that from the store alone.

From its start on the edge sees every run queued, and lays those that the store lacks over what the store has. Runs queued before
are only in the store, which may lag just then. So until the store has reached, for a chat's partition, the place where admissions
ended at this edge's start, nothing may be said about the chat's newest message.
"""

from __future__ import annotations

from collections.abc import Mapping

from infra.history import History
from schemas.topics import ADMISSIONS


class StartGap:
    """The partitions of chat.admissions in which the store has not reached `ends` yet."""

    def __init__(self, *, history: History, ends: Mapping[int, int]) -> None:
        self._history = history
        self._open = {partition: end for partition, end in ends.items() if end > 0}

    async def closed(self, partition: int) -> bool:
        """Whether the store has what was admitted before this edge's start. Once true, always true."""
        end = self._open.get(partition)
        if end is None:
            return True
        if await self._history.projected(ADMISSIONS.name, partition) < end:
            return False
        self._open.pop(partition, None)
        return True
