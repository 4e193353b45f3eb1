"""A process of its own that makes load, so that what is measured does not share an interpreter with it; and the pipe to it."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Final, TypeVar

from infra.bench.system import BenchError

SAY_WAIT_S: Final = 120.0

LoadT = TypeVar("LoadT")


class LoadProcess:
    """The process, from its parent's side."""

    def __init__(self, pipe: Connection, *, name: str) -> None:
        self._pipe = pipe
        self._name = name

    def tell(self, word: str) -> None:
        """Say something to it."""
        self._pipe.send(word)

    async def until(self, word: str) -> None:
        """Wait until it says this word."""
        said = await self.said()
        assert said == word, said

    async def said(self, *, wait_s: float = SAY_WAIT_S) -> object:
        """The next thing that it says. Raises BenchError where it says nothing for so long, or died."""
        if not await asyncio.to_thread(self._pipe.poll, wait_s):
            raise BenchError(f"{self._name} says nothing")
        try:
            return self._pipe.recv()
        except EOFError:
            raise BenchError(f"{self._name} died") from None


@contextmanager
def load_process(
    name: str, work: Callable[[Connection, LoadT], None], asked: LoadT
) -> Iterator[LoadProcess]:
    """Start `work(pipe, asked)`; it is gone afterwards. `name` is for a person."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=work, args=(theirs, asked), daemon=True)
    process.start()
    theirs.close()
    try:
        yield LoadProcess(ours, name=name)
    finally:
        process.kill()
        process.join()
