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
from infra.supervisor import tether
from infra.supervisor.home import ProcessState, SystemState, live_process, read_state
from tests.integration.waiting import eventually

REPOSITORY: Final = Path(__file__).parents[2]
# Below the range that the kernel gives to outgoing connections, so that a restart finds it free.
PORTS: Final = range(20_000, 32_000)
BROKER_START_S: Final = 60.0
SYSTEM_START_S: Final = 120.0
SYSTEM_STOP_S: Final = 12.0
LOG_TAIL_LINES: Final = 15
COMMAND_WAIT_S: Final = 60.0


def shared_jar_cache() -> Path:
    """The jars of TURNLOG_CACHE, else of the default home of this checkout, fetched once."""
    return Path(os.environ.get("TURNLOG_CACHE") or REPOSITORY / ".turnlog" / "cache").absolute()


def free_ports(count: int) -> tuple[int, ...]:
    """Ports on which nothing listens now; different ones at every call."""
    found: list[int] = []
    while len(found) < count:
        port = random.choice(PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return tuple(found)


def environment(overrides: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, with no TURNLOG_ variable but those given and the cache."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TURNLOG_")}
    return {**kept, "TURNLOG_CACHE": str(shared_jar_cache()), **overrides}


def turnlog(*words: str, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the command as a person would, to its end."""
    return subprocess.run(
        (sys.executable, "-m", "infra.command.main", *words),
        cwd=REPOSITORY,
        env=environment(variables),
        capture_output=True,
        text=True,
        timeout=COMMAND_WAIT_S,
        check=False,
    )


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
        tied = (sys.executable, "-I", "-S", tether.__file__, str(os.getpid()))
        with (self.plan.logs / "kafka.out").open("ab") as log:
            self._process = subprocess.Popen((*tied, *command.argv), stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal and wait until the process is gone."""
        if self._process is not None:
            self._process.send_signal(number)
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


class RunningSystem:
    """`turnlog up` as a process, with a home of its own, free ports, and a handle on each part.

    Variables given to `start` win over what is chosen here. Parts are named as `turnlog status`
    names them: kafka, admission, context, recorder, projector, worker-0…, edge-0….
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self._output = home.with_name(home.name + ".out")
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = free_ports(2)
        self._edge_ports: tuple[int, ...] = ()

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
        }
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                (sys.executable, "-m", "infra.command.main", "up"),
                cwd=REPOSITORY,
                env=environment({**chosen, **given}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self, *, within_s: float = SYSTEM_START_S) -> None:
        """Return when every part has been ready; fail when the supervisor ends first."""

        def ready() -> bool:
            if self.supervisor.poll() is not None:
                raise RuntimeError(f"turnlog up ended early:\n{self.report()}")
            state = self.state()
            return state is not None and state.ready and state.supervisor_pid == self.pid

        try:
            eventually(ready, within_s=within_s, what="the system is ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.report()}") from None

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

        return eventually(found, within_s=30, what=f"a process is the part {name}")

    def parts(self) -> tuple[str, ...]:
        """The names of the parts that have a process now."""
        state = self.state()
        return tuple(part.name for part in state.parts) if state is not None else ()

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to a part; return the pid that it was sent to."""
        pid = self.part(name).pid
        os.kill(pid, number)
        return pid

    def wait_restarted(self, name: str, *, old_pid: int, within_s: float = 60) -> int:
        """Return the pid of the part once another process than old_pid is it, and is ready."""

        def fresh() -> int | None:
            part = self.part(name)
            return part.pid if part.pid != old_pid and part.ready else None

        return eventually(fresh, within_s=within_s, what=f"{name} runs again")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, float]:
        """Stop everything; return the exit code and the seconds it took."""
        process = self.supervisor
        asked = time.monotonic()
        process.send_signal(number)
        try:
            code = process.wait(timeout=SYSTEM_STOP_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not stop in {SYSTEM_STOP_S} s:\n{self.report()}") from None
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

    def report(self) -> str:
        """The output and the end of every log, for a failure."""
        pieces = [self.output()]
        for path in sorted((self.home / "logs").glob("*.*")):
            lines = path.read_text("utf-8", "replace").splitlines()[-LOG_TAIL_LINES:]
            pieces.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(pieces)

    def end(self) -> None:
        """However it stands, leave nothing behind. For the end of a test."""
        process = self._process
        state = self.state()
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout=SYSTEM_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for part in state.parts if state is not None else ():
            left = live_process(part.pid, part.created_s)
            if left is not None:
                left.kill()
        self._process = None
