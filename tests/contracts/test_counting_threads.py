"""Counting long prompts is bounded: at once, and in how many wait for it."""

from __future__ import annotations

import asyncio
import threading

from edge.counting_threads import (
    COUNTS_AT_ONCE_MAX,
    COUNTS_WAITING_MAX,
    CountingFull,
    CountingThreads,
)

DEADLINE_S = 60.0


async def test_who_would_wait_behind_too_many_is_refused_and_the_others_are_counted() -> None:
    threads, release = CountingThreads(), threading.Event()
    most = COUNTS_AT_ONCE_MAX + COUNTS_WAITING_MAX
    async with asyncio.timeout(DEADLINE_S):
        asked = [
            asyncio.create_task(threads.run(lambda: release.wait(DEADLINE_S)))
            for _ in range(most + 1)
        ]
        done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert [type(task.exception()) for task in done] == [CountingFull]
        release.set()
        assert await asyncio.gather(*waiting) == [True] * most
        assert await threads.run(lambda: 7) == 7, "there is room again"


async def test_who_goes_while_waiting_leaves_its_place() -> None:
    threads, release = CountingThreads(), threading.Event()
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(3):
            asked = [
                asyncio.create_task(threads.run(lambda: release.wait(DEADLINE_S)))
                for _ in range(COUNTS_AT_ONCE_MAX + COUNTS_WAITING_MAX)
            ]
            await asyncio.sleep(0)
            for task in asked[COUNTS_AT_ONCE_MAX:]:
                task.cancel()
            await asyncio.wait(asked[COUNTS_AT_ONCE_MAX:])
            release.set()
            await asyncio.wait(asked)
            release.clear()
        release.set()
        assert await threads.run(lambda: 7) == 7
