"""A worker's ticks: what is overdue is judged by a process that was there to hear of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import pytest

from inference_workers.worker import LATE_TICKS_MAX, TICK_S, keep_ticking

DEADLINE_S = 60.0
IN_TIME_MS = int(TICK_S * 1000)


class Ticked(Exception):
    """Ends the ticking at its first tick."""


def clock(steps_ms: Iterable[int]) -> Callable[[], int]:
    """A clock that shows for each step when it began and when it ended."""
    shown: list[int] = []
    for step_ms in steps_ms:
        now = shown[-1] if shown else 0
        shown += [now, now + step_ms]
    times = iter(shown)
    return lambda: next(times)


async def ticks_after(steps_ms: list[int]) -> int:
    """How many of these steps are taken before the first tick."""
    taken = 0

    def tick() -> None:
        raise Ticked

    read = clock(steps_ms)

    def now_ms() -> int:
        nonlocal taken
        taken += 1
        return read()

    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(Ticked):
            await keep_ticking(tick, now_ms)
    return taken // 2


async def test_a_process_that_stood_still_listens_before_it_judges() -> None:
    assert await ticks_after([IN_TIME_MS]) == 1
    assert await ticks_after([5_000, IN_TIME_MS]) == 2


async def test_a_process_that_is_always_late_judges_all_the_same() -> None:
    assert await ticks_after([5_000] * (LATE_TICKS_MAX + 1)) == LATE_TICKS_MAX + 1
