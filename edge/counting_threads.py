"""The threads that count the tokens of long prompts, so that the event loop serves others meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

COUNTS_AT_ONCE_MAX: Final = 4
COUNTS_WAITING_MAX: Final = 64
"""Of the longest prompts that is some two seconds' work."""

T = TypeVar("T")


class CountingFull(Exception):
    """As many prompts wait to be counted as can be counted soon."""


class CountingThreads:
    """COUNTS_AT_ONCE_MAX at a time."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(COUNTS_AT_ONCE_MAX)
        self._waiting = 0

    async def run(self, count: Callable[[], T]) -> T:
        """Count in a thread. Raises CountingFull."""
        if self._waiting >= COUNTS_WAITING_MAX:
            raise CountingFull
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        try:
            return await asyncio.to_thread(count)
        finally:
            self._places.release()
