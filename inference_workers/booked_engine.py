"""What every engine that keeps a `SlotBook` does alike: its tasks live as long as it does, and the book answers for it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from inference_workers.engine import EngineCaps, EngineHealth, EngineLoad
from inference_workers.slot_book import SlotBook


class BookedEngine(ABC):
    """The Engine protocol but for `submit` and `close`: what an engine makes, and how it is let go, is its own."""

    def __init__(self, caps: EngineCaps, *, stalled_after_s: float) -> None:
        self._book = SlotBook(caps, stalled_after_s=stalled_after_s)
        self._tasks = asyncio.TaskGroup()
        self._watch: asyncio.Task[None] | None = None

    @property
    def caps(self) -> EngineCaps:
        return self._book.caps

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._book.ready()
        self._watch = self._tasks.create_task(self._book.watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close(drain_s=0)
        # An error of the body is its own; only a cancel has to be known to the group.
        cancelled = isinstance(error, asyncio.CancelledError)
        await self._tasks.__aexit__(*((kind, error, trace) if cancelled else (None, None, None)))

    @abstractmethod
    async def close(self, *, drain_s: float) -> None:
        """As the protocol has it; it also ends the watch."""

    def cancel(self, request_id: str) -> bool:
        return self._book.cancel(request_id)

    def load(self) -> EngineLoad:
        return self._book.load()

    def health(self) -> EngineHealth:
        return self._book.health

    async def wait_failed(self) -> EngineHealth:
        return await self._book.wait_failed()

    async def _drain(self, *, drain_s: float, confirm_s: float) -> None:
        """Empty the book, and end the watch."""
        await self._book.drain(drain_s=drain_s, confirm_s=confirm_s)
        if self._watch is not None:
            self._watch.cancel()
