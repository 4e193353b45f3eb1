"""Real parts for tests: a broker alone, and a whole system behind `turnlog up`."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from infra.embedded.kafka import BrokerPlan, prepare_broker, wait_until_serving
from infra.supervisor.home import ProcessState, SystemState, read_state
from tests.integration.processes import end_process, shared_jar_cache, start_process
from tests.integration.waiting import PATIENCE_S, eventually

# Below the range that the kernel gives to outgoing connections, so that a restart finds it free. Each of the runs at once has its own.
_RUNS_AT_ONCE_MAX: Final = 4
_RUN: Final = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS: Final = range(20_000 + _RUN % _RUNS_AT_ONCE_MAX, 32_000, _RUNS_AT_ONCE_MAX)
BROKER_START_S: Final = 180.0
SYSTEM_START_S: Final = 240.0


_given: set[int] = set()


def free_ports(count: int) -> tuple[int, ...]:
    """Ports on which nothing listens now; different ones at every call."""
    found: list[int] = []
    while len(found) < count:
        port = random.choice(PORTS)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.add(port)
        found.append(port)
    return tuple(found)


def processes_of(home: Path) -> list[int]:
    """Every process that was started for this home, however it came about."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TURNLOG_HOME") == str(home):
                found.append(process.pid)
    return found


class RunningBroker:
    """An embedded broker under a folder of its own. `start` returns when clients can work."""

    def __init__(self, folder: Path) -> None:
        port, controller_port = free_ports(2)
        self.plan = BrokerPlan(
            data=folder / "kafka",
            logs=folder / "logs",
            jars=shared_jar_cache() / "kafka",
            port=port,
            controller_port=controller_port,
            heap_mb=384,
        )
        self.bootstrap = f"127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start on the same data and wait. Not within a running event loop: see `launch`."""
        self.launch()
        asyncio.run(wait_until_serving(self.bootstrap, deadline_s=BROKER_START_S))

    def launch(self) -> None:
        """Start without waiting."""
        assert self._process is None
        command = prepare_broker(self.plan, progress=print)
        logs = self.plan.logs
        self._process = start_process(
            *command.argv, log=logs / "kafka.out", logs=logs, variables={}
        )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def stop(self, number: signal.Signals) -> None:
        """Send the signal and wait until the process is gone."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(timeout=PATIENCE_S)
        self._process = None

    def end(self) -> None:
        """However it stands, leave nothing behind. For the end of a test."""
        if self._process is not None:
            end_process(self._process)
            self._process = None


class RunningSystem:
    """`turnlog up` as a process, with a home of its own, free ports, and a handle on each part.

    Variables given to `start` win over what is chosen here. Parts are named as `turnlog status`
    names them: kafka, admission, context, recorder, projector, worker-0…, edge-0….
    """

    def __init__(self, home: Path, *, output: Path | None = None) -> None:
        """`output`: where `turnlog up` prints; None: beside its home."""
        self.home = home
        self._output = output or home.with_name(home.name + ".out")
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = free_ports(2)
        self._edge_ports: tuple[int, ...] = ()
        self._whole: frozenset[str] = frozenset()

    def start(self, variables: Mapping[str, str] | None = None) -> None:
        """Start with these variables; returns at once. A stopped system may be started again."""
        assert self._process is None
        given = dict(variables or {})
        edges = int(given.get("TURNLOG_EDGES", "1"))
        if len(self._edge_ports) != edges:
            self._edge_ports = free_ports(edges)
        chosen = {
            "TURNLOG_HOME": str(self.home),
            "TURNLOG_KAFKA_PORT": str(self._ports[0]),
            "TURNLOG_KAFKA_CONTROLLER_PORT": str(self._ports[1]),
            "TURNLOG_EDGE_PORTS": ",".join(map(str, self._edge_ports)),
            "TURNLOG_ENGINE": "scripted",
            # As many as every process may have some of; each costs the broker its time at every start.
            "TURNLOG_PARTITIONS": "4",
        }
        self._process = start_process(
            *(sys.executable, "-m", "infra.command.main", "up"),
            log=self._output,
            logs=self.home / "logs",
            variables={**chosen, **given},
            own_session=True,
        )

    def wait_ready(self) -> None:
        """Return when every part has been ready; fail when the supervisor ends first."""

        def ready() -> bool:
            if self.supervisor.poll() is not None:
                raise RuntimeError("turnlog up ended early")
            state = self.state()
            return state is not None and state.ready and state.supervisor_pid == self.pid

        eventually(ready, within_s=SYSTEM_START_S, what="the system is ready")
        self._whole = frozenset(self.parts())

    def wait_whole(self) -> None:
        """Return when every part that it had when it became ready has a process again that is ready."""

        def whole() -> bool:
            state = self.state()
            return state is not None and self._whole == {p.name for p in state.parts if p.ready}

        eventually(whole, within_s=SYSTEM_START_S, what="every part runs again")

    @property
    def supervisor(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "not started"
        return self._process

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        return self.supervisor.pid

    @property
    def bootstrap(self) -> str:
        """Where Kafka is."""
        state = self.state()
        assert state is not None, "not running"
        return state.kafka

    @property
    def urls(self) -> tuple[str, ...]:
        """Of each edge, `http://127.0.0.1:port`."""
        return tuple(f"http://127.0.0.1:{port}" for port in self._edge_ports)

    @property
    def url(self) -> str:
        """Of the first edge."""
        return self.urls[0]

    def state(self) -> SystemState | None:
        """The last state that the supervisor wrote."""
        return read_state(self.home)

    def part(self, name: str) -> ProcessState:
        """The process that is this part now; waits while it is being started again."""

        def found() -> ProcessState | None:
            state = self.state()
            parts = state.parts if state is not None else ()
            return next((part for part in parts if part.name == name), None)

        return eventually(found, what=f"a process is the part {name}")

    def parts(self) -> tuple[str, ...]:
        """The names of the parts that have a process now."""
        state = self.state()
        return tuple(part.name for part in state.parts) if state is not None else ()

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to a part; return the pid that it was sent to. One that has just died is waited for until it runs again."""

        def sent() -> int:
            pid = self.part(name).pid
            os.kill(pid, number)
            return pid

        return eventually(sent, what=f"{name} gets a signal")

    def wait_restarted(self, name: str, *, old_pid: int) -> int:
        """Return the pid of the part once another process than old_pid is it, and is ready."""

        def fresh() -> int | None:
            part = self.part(name)
            return part.pid if part.pid != old_pid and part.ready else None

        return eventually(fresh, what=f"{name} runs again")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, float]:
        """Stop everything; return the exit code and the seconds it took."""
        process = self.supervisor
        asked = time.monotonic()
        process.send_signal(number)
        code = process.wait(timeout=PATIENCE_S)
        self._process = None
        return code, time.monotonic() - asked

    def ended(self) -> int:
        """Wait until it ends by itself; its exit code. It may be started again."""
        code = self.supervisor.wait(timeout=SYSTEM_START_S)
        self._process = None
        return code

    def output(self) -> str:
        """What `turnlog up` has printed, in all its lives."""
        return self._output.read_text("utf-8") if self._output.exists() else ""

    def log(self, name: str) -> str:
        """What a part has logged, in all its lives."""
        path = self.home / "logs" / f"{name}.log"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def end(self) -> None:
        """However it stands, leave nothing behind. For the end of a test, so nobody is asked to drain."""
        if self._process is not None:
            end_process(self._process)
            self._process = None
        eventually(lambda: not self._killed(), what="every process of the home is gone")

    def _killed(self) -> list[int]:
        left = processes_of(self.home)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left
