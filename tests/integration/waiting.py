"""Waiting on a condition with a deadline: the only place in the tests that passes time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

POLL_S: Final = 0.02
PATIENCE_S: Final = 60.0
"""How long what must come may take on a machine that is ten times slower than a desk's. Nothing is shown by coming sooner."""
ACK_WAIT_MS: Final = int(PATIENCE_S * 1000)
"""How long a test waits until a broker has taken what it appends: a starved one took more than the product's ten seconds."""

T = TypeVar("T")


def eventually(condition: Callable[[], T | None], *, what: str, within_s: float = PATIENCE_S) -> T:
    """The condition's first true value; fails with `what` when none comes in time.

    An AssertionError or OSError from the condition counts as "not yet", and is shown at the end. Anything else ends the wait:
    raise a RuntimeError where nothing can come any more.
    """
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while True:
        last: object = None
        try:
            value = condition()
            if value:
                return value
        except (AssertionError, OSError) as error:
            last = error
        if time.monotonic() >= deadline:
            detail = f" ({last})" if last is not None else ""
            raise AssertionError(f"not within {within_s:g} s: {what}{detail}")
        pause.wait(POLL_S)


async def eventually_async(
    condition: Callable[[], Awaitable[T | None]], *, what: str, within_s: float = PATIENCE_S
) -> T:
    """As `eventually`, for a condition that is awaited."""
    deadline = time.monotonic() + within_s
    while True:
        last: object = None
        try:
            value = await condition()
            if value:
                return value
        except (AssertionError, OSError) as error:
            last = error
        if time.monotonic() >= deadline:
            detail = f" ({last})" if last is not None else ""
            raise AssertionError(f"not within {within_s:g} s: {what}{detail}")
        await asyncio.sleep(POLL_S)
