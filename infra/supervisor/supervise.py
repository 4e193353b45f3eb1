"""The supervisor: starts the parts in order, keeps them running, and stops them in order."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TextIO

import psutil

from infra.settings import SettingsError
from infra.supervisor.home import (
    FREE_MIB_MIN,
    forget_state,
    free_mib,
    own_state,
    write_state,
)
from infra.supervisor.part import FAILED_EXIT, Part, PartNews, PartPlan, Phase
from infra.supervisor.part_log import LOOK_EVERY_S, turn_over
from infra.supervisor.restarts import USAGE_ERROR_EXIT

# Seconds after the stop was asked by which each phase is gone, edges first, the broker last.
STOP_BY_S: Final = {Phase.EDGE: 3.0, Phase.WORKER: 5.0, Phase.PROCESSOR: 7.0, Phase.BROKER: 9.0}
NAME_WIDTH: Final = 10

Step = Callable[[], Awaitable[str]]


class Supervisor:
    """Runs one system until it is told to stop or until a part cannot be kept running."""

    def __init__(
        self,
        *,
        home: Path,
        plans: Sequence[PartPlan],
        kafka: str,
        urls: Sequence[str],
        forgiven_max: int,
        after_broker: Step | None = None,
    ) -> None:
        self._home = home
        self._kafka = kafka
        self._urls = tuple(urls)
        self._after_broker = after_broker
        # Counted from the start of this process, so that fetching and formatting are in it.
        self._started_at_s = psutil.Process().create_time()
        self._all_ready = False
        self._failure: str | None = None
        self._exit_code = 0
        self._stop = asyncio.Event()
        parts: list[Part] = []
        for plan in sorted(plans, key=lambda plan: plan.phase):
            broker = next((part for part in parts if part.plan.phase is Phase.BROKER), None)
            parts.append(
                Part(
                    plan,
                    forgiven_max=forgiven_max,
                    tell=self._tell,
                    give_up=self._fail,
                    broker=broker if plan.phase is not Phase.BROKER else None,
                )
            )
        self._parts = tuple(parts)

    async def run(self) -> int:
        """Until stopped; 0 when that was asked for, else 1 or 2 with the reason on stderr."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop.set)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._bound_logs(), name="logs")
                try:
                    await self._start(group)
                    await self._stop.wait()
                finally:
                    await self._stop_all()
        finally:
            forget_state(self._home)
        if self._failure is not None:
            _write(sys.stderr, f"turnlog: {self._failure}")
        return self._exit_code

    async def _start(self, group: asyncio.TaskGroup) -> None:
        broker = [part for part in self._parts if part.plan.phase is Phase.BROKER]
        others = [part for part in self._parts if part.plan.phase is not Phase.BROKER]
        if not await self._launch(group, broker):
            return
        if self._after_broker is not None and not await self._prepare_topics(self._after_broker):
            return
        if await self._launch(group, others):
            self._all_ready = True
            self._write_state()
            seconds = time.time() - self._started_at_s
            say(f"{'all':<{NAME_WIDTH}} ready in {seconds:.1f} s; Ctrl-C stops")
            for url in self._urls[1:]:
                say(f"{'':<{NAME_WIDTH}} also at {url}")
            if self._urls:
                say(f"Turnlog is ready: {self._urls[0]}")

    async def _launch(self, group: asyncio.TaskGroup, parts: Sequence[Part]) -> bool:
        """Start these parts together; True when all are ready, False when stopping began first."""
        for part in parts:
            group.create_task(part.keep_running(), name=part.plan.name)
        return await self._unless_stopped(self._all_of(parts))

    async def _all_of(self, parts: Sequence[Part]) -> None:
        for part in parts:
            await part.was_ready.wait()

    async def _prepare_topics(self, step: Step) -> bool:
        async def prepare() -> None:
            try:
                say(f"{'topics':<{NAME_WIDTH}} {await step()}")
            except SettingsError as error:
                self._fail(f"topics: {error}", USAGE_ERROR_EXIT)
            except (RuntimeError, OSError, ValueError) as error:  # A KafkaError is a RuntimeError.
                self._fail(f"topics: {str(error) or type(error).__name__}", FAILED_EXIT)

        return await self._unless_stopped(prepare()) and self._failure is None

    async def _unless_stopped(self, work: Awaitable[None]) -> bool:
        """Await the work, but not beyond a stop; True when it was done."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            return task.done() and not self._stop.is_set()
        finally:
            task.cancel()
            stop.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    async def _stop_all(self) -> None:
        asked = time.monotonic()
        if any(part.state() is not None for part in self._parts):
            say(f"{'all':<{NAME_WIDTH}} stopping")
        for phase in sorted(Phase, reverse=True):
            parts = [part for part in self._parts if part.plan.phase is phase]
            deadline_s = asked + STOP_BY_S[phase]
            async with asyncio.TaskGroup() as group:
                for part in parts:
                    group.create_task(part.stop(deadline_s=deadline_s))
        say(f"{'all':<{NAME_WIDTH}} stopped in {time.monotonic() - asked:.1f} s")

    async def _bound_logs(self) -> None:
        """Until the stop."""
        while not self._stop.is_set():
            for part in self._parts:
                # A full disk must not end the system; what cannot be written does not make a log longer either.
                with suppress(OSError):
                    await asyncio.to_thread(turn_over, part.plan.log)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), LOOK_EVERY_S)

    def _fail(self, reason: str, exit_code: int) -> None:
        """The first reason counts; what follows it is mostly its consequence."""
        if not self._stop.is_set():
            self._failure = reason + self._short_of_disk()
            self._exit_code = USAGE_ERROR_EXIT if exit_code == USAGE_ERROR_EXIT else FAILED_EXIT
        self._stop.set()

    def _short_of_disk(self) -> str:
        """A full disk is what most parts cannot say themselves: there is no room for their last words."""
        free = free_mib(self._home)
        return f"; only {free} MiB are free for {self._home}" if free < FREE_MIB_MIN else ""

    def _tell(self, news: PartNews) -> None:
        self._write_state()
        if news.line:
            say(f"{news.name:<{NAME_WIDTH}} {news.line}")

    def _write_state(self) -> None:
        processes = [found for part in self._parts if (found := part.state()) is not None]
        state = own_state(
            started_at_s=self._started_at_s,
            ready=self._all_ready,
            kafka=self._kafka,
            urls=self._urls,
            parts=processes,
        )
        # A full disk must not end the system; `status` is then behind, and the next write mends it.
        with suppress(OSError):
            write_state(self._home, state)


def say(line: str) -> None:
    """A line of progress, at once also where stdout is a pipe. A reader that left, or a full disk under a file, is no failure."""
    _write(sys.stdout, line)


def _write(stream: TextIO, line: str) -> None:
    """Past the stream's buffer: what it could not get rid of would fail once more at the end, and change the exit code."""
    with suppress(OSError):
        os.write(stream.fileno(), f"{line}\n".encode())
