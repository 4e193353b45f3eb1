"""One answer on its way from an engine to its reader: rule E1, and no unbounded buffer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from inference_workers.engine import Dead, Delta, EngineStep, Finish, SlotFreed


class AnswerStream:
    """The reader's side is the EngineStream protocol; the engine's side is push, finish, freed.

    What waits for the reader is joined: at most one delta with exact ids and one without, so a slow
    reader costs the answer's own size and holds up nobody.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._waiting: list[Delta] = []
        self._finish: Finish | None = None
        self._taken = False
        self._reader: asyncio.Future[None] | None = None
        self._freed: asyncio.Future[SlotFreed] = asyncio.get_running_loop().create_future()

    @property
    def request_id(self) -> str:
        return self._request_id

    @property
    def ended(self) -> bool:
        return self._finish is not None

    @property
    def waiting_tokens(self) -> int:
        """Tokens that the reader has not taken yet."""
        return sum(delta.count for delta in self._waiting)

    def __aiter__(self) -> AsyncIterator[EngineStep]:
        return self

    async def __anext__(self) -> EngineStep:
        while not self._waiting and self._finish is None:
            assert self._reader is None, "a stream has one reader"
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if self._waiting:
            return self._waiting.pop(0)
        if self._finish is None or self._taken:
            raise StopAsyncIteration
        self._taken = True
        return self._finish

    async def wait_freed(self) -> SlotFreed:
        return await asyncio.shield(self._freed)

    def push(self, delta: Delta) -> None:
        """The next piece. After the end it is dropped: E1."""
        if self._finish is not None:
            return
        last = self._waiting[-1] if self._waiting else None
        if last is not None and (last.ids is None) == (delta.ids is None):
            self._waiting[-1] = _joined(last, delta)
        else:
            self._waiting.append(delta)
        self._wake()

    def finish(self, finish: Finish, *, drop_waiting: bool = False) -> bool:
        """End it; False where it had ended. A cancelled reader wants the end, not what waits."""
        if self._finish is not None:
            return False
        if drop_waiting:
            self._waiting.clear()
        self._finish = finish
        self._wake()
        return True

    def freed(self, freed: SlotFreed) -> None:
        """The engine confirmed the slot free."""
        if not self._freed.done():
            self._freed.set_result(freed)

    def never_freed(self, why: str) -> None:
        """The engine is gone: nobody will confirm."""
        if not self._freed.done():
            self._freed.set_exception(Dead(why))
            self._freed.exception()  # Not every stream has somebody who waits.

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _joined(first: Delta, second: Delta) -> Delta:
    assert first.end == second.index, "deltas are dense"
    ids = None
    if first.ids is not None and second.ids is not None:
        ids = first.ids + second.ids
    return Delta(
        text=first.text + second.text,
        ids=ids,
        index=first.index,
        count=first.count + second.count,
    )
