"""What both Faust processes promise of their end: a stop that was cut off takes no record any more, and is no defect."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import faust
import pytest

from infra.log.records import BadRecord, LogRecord
from processors.faust_process import FaustSettings, build_app, consume, run_until
from schemas.topics import CHATS
from tests.integration.processes import COMMAND_WAIT_S, REPOSITORY


def app_of(home: Path) -> faust.App:
    return build_app(FaustSettings(group="g", bootstrap="127.0.0.1:1", session_ms=6_000, home=home))


class Stream:
    """What Faust hands to an agent."""

    def __init__(self, count: int) -> None:
        self._count = count

    def noack(self) -> Stream:
        return self

    async def events(self) -> AsyncIterator[Any]:
        for offset in range(self._count):
            message = SimpleNamespace(
                partition=0, offset=offset, timestamp=1.0, key=b"k", value=b"{", headers=[]
            )
            yield SimpleNamespace(message=message)


async def run_agent(app: faust.App, stream: Stream) -> None:
    (agent,) = app.agents.values()
    await agent.fun(stream)


async def test_records_that_come_after_the_stop_are_left_to_the_next(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    taken: list[int] = []

    async def take(message: Any, record: LogRecord | BadRecord) -> None:
        assert isinstance(record, BadRecord)
        taken.append(message.offset)
        if message.offset == 1:
            app._stopped_set()

    consume(app, CHATS, take)
    await run_agent(app, Stream(5))
    assert taken == [0, 1]


async def test_a_record_that_a_stop_interrupts_does_not_make_the_end_a_defect(
    tmp_path: Path,
) -> None:
    """A defect would end this very process."""
    app = app_of(tmp_path)

    async def take(message: Any, record: LogRecord | BadRecord) -> None:
        app._stopped_set()
        raise RuntimeError("the task group is finished")

    consume(app, CHATS, take)
    await run_agent(app, Stream(2))


class StartsForEver:
    """A Faust app whose broker has gone while it started, and that may be slow to be cut off as well."""

    def __init__(self, *, deaf: bool) -> None:
        self._deaf = deaf
        self.starts = asyncio.Event()
        self.stopped = False

    async def start(self) -> None:
        while True:
            try:
                self.starts.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if not self._deaf:
                    raise
                self._deaf = False

    async def stop(self) -> None:
        self.stopped = True


@pytest.mark.parametrize("deaf", [False, True])
async def test_a_stop_ends_an_app_that_never_comes_to_its_start(deaf: bool) -> None:
    app, stop = StartsForEver(deaf=deaf), asyncio.Event()
    async with asyncio.timeout(30):
        running = asyncio.ensure_future(run_until(cast("faust.App", app), stop))
        await app.starts.wait()
        stop.set()
        await running
    assert app.stopped


class StopsForEver:
    """A Faust app that does not come to its end, and of whose parts each takes a cancellation for itself alone (`mode.Service.stop`)."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.gone = asyncio.Event()

    async def start(self) -> None:
        pass

    async def wait(self, waited: Coroutine[Any, Any, bool]) -> SimpleNamespace:
        await waited
        return SimpleNamespace(stopped=False)

    async def stop(self) -> None:
        while not self.let_go.is_set():
            with suppress(asyncio.CancelledError):
                await self.let_go.wait()
        self.gone.set()


async def test_a_stop_that_takes_no_cancellation_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("processors.faust_process.STOP_WAIT_MS_MAX", 10)
    app, stop = StopsForEver(), asyncio.Event()
    stop.set()
    running = asyncio.ensure_future(run_until(cast("faust.App", app), stop))
    await asyncio.wait([running], timeout=30)
    ended = running.done()
    app.let_go.set()
    await app.gone.wait()
    assert ended


def test_a_task_that_takes_no_cancellation_does_not_keep_the_process() -> None:
    program = """
import asyncio
from processors.faust_process import run_to_end

async def deaf():
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass

async def main():
    main.left = asyncio.ensure_future(deaf())
    await asyncio.sleep(0)

run_to_end(main())
"""
    ended = subprocess.run(
        (sys.executable, "-c", program), cwd=REPOSITORY, timeout=COMMAND_WAIT_S, check=False
    )
    assert ended.returncode == 0


def test_a_thread_that_a_stop_has_left_behind_does_not_keep_the_process() -> None:
    program = """
import threading
from processors.faust_process import run_to_end

async def main():
    threading.Thread(target=threading.Event().wait).start()

run_to_end(main())
"""
    ended = subprocess.run(
        (sys.executable, "-c", program), cwd=REPOSITORY, timeout=COMMAND_WAIT_S, check=False
    )
    assert ended.returncode == 0
