"""One part of the system: a child process that is started, watched, restarted and stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Final, assert_never

from infra.process import READY_FILE_VARIABLE
from infra.supervisor.home import ProcessState, created_s
from infra.supervisor.restarts import (
    GiveUp,
    Restart,
    after_death,
    death_in_words,
    last_reason,
)

START_DEADLINE_S: Final = 120.0
FAILED_EXIT: Final = 1
READY_POLL_S: Final = 0.02
DEATHS_KEPT_MAX: Final = 10_001
LOG_TAIL_BYTES: Final = 16_384
_TETHER: Final = Path(__file__).with_name("tether.py")


class Phase(IntEnum):
    """Parts start phase by phase upward and stop phase by phase downward."""

    BROKER = 0
    PROCESSOR = 1
    WORKER = 2
    EDGE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """How a part is started. Without a probe it is ready when it has made its ready file.

    What it prints goes to `log`; `own_log` is where it says more than that.
    """

    name: str
    argv: tuple[str, ...]
    phase: Phase
    log: Path
    ready_file: Path
    own_log: Path | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    port: int | None = None
    probe: Callable[[], Awaitable[None]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartNews:
    """Something to tell a person about a part, in one line."""

    name: str
    line: str


class Part:
    """A part as it runs. One task calls `keep_running`; others look, and may call `stop`."""

    def __init__(
        self,
        plan: PartPlan,
        *,
        forgiven_max: int,
        tell: Callable[[PartNews], None],
        give_up: Callable[[str, int], None],
        broker: Part | None = None,
    ) -> None:
        self.plan = plan
        self.was_ready = asyncio.Event()
        self.serving = asyncio.Event()
        self._broker = broker
        self._forgiven_max = forgiven_max
        self._tell = tell
        self._give_up = give_up
        self._process: asyncio.subprocess.Process | None = None
        self._created_s = 0.0
        self._started_at_s = 0.0
        self._ready = False
        self._restarts = 0
        self._deaths_s: deque[float] = deque(maxlen=DEATHS_KEPT_MAX)
        self._stopping = asyncio.Event()
        # Held while a process is being made, so that a stop cannot miss one.
        self._spawning = asyncio.Lock()

    def state(self) -> ProcessState | None:
        """What to write into the state file; None while no process is there."""
        if self._process is None:
            return None
        return ProcessState(
            name=self.plan.name,
            pid=self._process.pid,
            created_s=self._created_s,
            started_at_s=self._started_at_s,
            ready=self._ready,
            restarts=self._restarts,
            port=self.plan.port,
        )

    async def keep_running(self) -> None:
        """Start the process, and start it again when it dies, until `stop` or until given up."""
        while not self._stopping.is_set():
            code = await self._run_once()
            if code is None or self._stopping.is_set():
                return
            now_s = time.monotonic()
            if self._broker is not None and not self._broker.serving.is_set():
                self._say(f"died ({death_in_words(code)}); starting it again after the broker")
                self._restarts += 1
                await self._first_of(self._broker.serving, self._stopping)  # R4
                continue
            self._deaths_s.append(now_s)
            decision = after_death(
                deaths_s=self._deaths_s,
                now_s=now_s,
                exit_code=code,
                forgiven_max=self._forgiven_max,
            )
            match decision:
                case GiveUp(reason=reason):
                    self._give_up(self._last_words(f"{self.plan.name} {reason}", code), code)
                    return
                case Restart(delay_s=delay_s):
                    self._say(f"died ({death_in_words(code)}); starting it again")
                    self._restarts += 1
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._stopping.wait(), delay_s)
                case _:
                    assert_never(decision)

    async def stop(self, *, deadline_s: float) -> None:
        """SIGTERM now, SIGKILL at the deadline (time.monotonic), return when it is gone."""
        self._stopping.set()
        async with self._spawning:
            process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), max(0.0, deadline_s - time.monotonic()))
        except TimeoutError:
            self._say("did not stop in time; killed")
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            await process.wait()

    @staticmethod
    async def _first_of(*events: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _run_once(self) -> int | None:
        """One life of the process, to its exit code; None when a stop came before its start."""
        started = time.monotonic()
        async with self._spawning:
            if self._stopping.is_set():
                return None
            process = self._process = await self._spawn()
        self._created_s = created_s(process.pid)
        self._started_at_s = time.time()
        self._say(None)
        try:
            await self._watch_start(process, started)
            return await process.wait()
        finally:
            self._ready = False
            self.serving.clear()
            self._process = None

    async def _spawn(self) -> asyncio.subprocess.Process:
        plan = self.plan
        plan.ready_file.parent.mkdir(parents=True, exist_ok=True)
        plan.ready_file.unlink(missing_ok=True)
        plan.log.parent.mkdir(parents=True, exist_ok=True)
        environ = {**os.environ, **plan.environ, READY_FILE_VARIABLE: str(plan.ready_file)}
        with plan.log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), *plan.argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ,
                # A Ctrl-C at the terminal goes to the supervisor alone, which stops in order.
                start_new_session=True,
            )

    async def _watch_start(self, process: asyncio.subprocess.Process, started: float) -> None:
        """Return when the process is ready or has ended; give up at the deadline."""
        ended = asyncio.ensure_future(process.wait())
        ready = asyncio.ensure_future(self._until_ready())
        try:
            await asyncio.wait(
                {ended, ready}, timeout=START_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED
            )
            if ready.done() and not ended.done():
                ready.result()
                self._ready = True
                self.was_ready.set()
                self.serving.set()
                self._say(f"pid {process.pid}, ready in {time.monotonic() - started:.1f} s")
            elif not ended.done():
                self._give_up(
                    f"{self.plan.name} is not ready after {START_DEADLINE_S:g} s; "
                    f"see {self.plan.log}",
                    FAILED_EXIT,
                )
        finally:
            ended.cancel()
            ready.cancel()
            await asyncio.gather(ended, ready, return_exceptions=True)

    async def _until_ready(self) -> None:
        if self.plan.probe is not None:
            await self.plan.probe()
            return
        while not self.plan.ready_file.exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(READY_POLL_S)

    def _say(self, line: str | None) -> None:
        """Tell a person, or with None only that the state has changed."""
        self._tell(PartNews(name=self.plan.name, line=line or ""))

    def _last_words(self, failure: str, code: int) -> str:
        """The failure with its reason, as far as the process has said one, and where to read on."""
        path = self.plan.own_log or self.plan.log
        try:
            with path.open("rb") as log:
                log.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
                lines = log.read().decode("utf-8", "replace").strip().splitlines()
        except OSError:
            lines = []
        last = last_reason(lines)
        return f"{failure} ({death_in_words(code)}){': ' + last if last else ''}; see {path}"
