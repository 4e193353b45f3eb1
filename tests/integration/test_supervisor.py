"""The supervisor over real, trivial children: order, deaths, and that nothing outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from infra.process import READY_FILE_VARIABLE
from infra.supervisor.home import ProcessState, SystemState, live_process, read_state
from tests.integration.processes import REPOSITORY, turnlog
from tests.integration.trivial_system import FORGIVEN_MAX, PHASES
from tests.integration.waiting import PATIENCE_S, eventually

# A part that never goes is killed after 3 to 9 s; the rest is the machine's.
STOP_S_MAX = 30
READY = "Turnlog is ready: http://127.0.0.1:1"


class Trivial:
    """The program of trivial_system, and what it has said."""

    def __init__(self, home: Path, case: str, out: Path | None = None) -> None:
        self.home = home
        self.out = out or home.with_name(f"{home.name}-{time.monotonic_ns()}.out")
        with self.out.open("wb") as output:
            self.process = subprocess.Popen(
                (sys.executable, "-m", "tests.integration.trivial_system", str(home), case),
                cwd=REPOSITORY,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def lines(self) -> list[str]:
        return self.out.read_text("utf-8").splitlines()

    def journal(self) -> list[str]:
        path = self.home / "journal"
        return path.read_text("utf-8").splitlines() if path.exists() else []

    def wait_line(self, part: str) -> str:
        return eventually(
            lambda: next((line for line in self.lines() if part in line), None),
            what=f"a line with {part!r} in {self.lines()}",
        )

    def state(self) -> SystemState:
        return eventually(lambda: read_state(self.home), what="a state file")

    def part(self, name: str) -> ProcessState:
        return eventually(
            lambda: next((part for part in self.state().parts if part.name == name), None),
            what=f"a process of {name}",
        )

    def end(self) -> int:
        return self.process.wait(timeout=PATIENCE_S)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "home"
    yield folder
    state = read_state(folder)
    if state is None:
        return
    left = [live_process(part.pid, part.created_s) for part in state.parts]
    left.insert(0, live_process(state.supervisor_pid, state.supervisor_created_s))
    for process in left:
        if process is not None:
            process.kill()


def left_of(home: Path) -> list[int]:
    """The processes of the home's parts, whatever became of the state file."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(READY_FILE_VARIABLE, "").startswith(f"{home}/"):
                found.append(process.pid)
    return found


def alive(parts: tuple[ProcessState, ...]) -> list[str]:
    return [part.name for part in parts if live_process(part.pid, part.created_s) is not None]


def test_parts_start_broker_first_and_stop_edges_first(home: Path) -> None:
    trivial = Trivial(home, "obedient")
    trivial.wait_line(READY)
    assert trivial.journal()[0] == "kafka started"
    state = trivial.state()
    assert state.ready
    assert {part.name for part in state.parts} == set(PHASES)
    trivial.process.send_signal(signal.SIGTERM)
    assert trivial.end() == 0
    assert trivial.journal()[len(PHASES) :] == [
        "edge-0 stopped",
        "worker-0 stopped",
        "recorder stopped",
        "kafka stopped",
    ]
    assert alive(state.parts) == []
    assert read_state(home) is None


def test_the_ready_line_stands_alone_and_each_part_has_a_line_of_progress(home: Path) -> None:
    trivial = Trivial(home, "obedient")
    trivial.wait_line(READY)
    assert READY in trivial.lines()
    for name in PHASES:
        pid = trivial.part(name).pid
        trivial.wait_line(f"{name:<10} pid {pid}, ready in ")
    trivial.process.send_signal(signal.SIGINT)
    assert trivial.end() == 0


def test_a_part_that_dies_is_started_again_and_its_death_is_told(home: Path) -> None:
    trivial = Trivial(home, "obedient")
    trivial.wait_line(READY)
    killed = trivial.part("worker-0")
    os.kill(killed.pid, signal.SIGKILL)
    trivial.wait_line("died (signal 9); starting it again")

    def again() -> bool:
        part = trivial.part("worker-0")
        return part.pid != killed.pid and part.ready and part.restarts == 1

    eventually(again, what="worker-0 runs again")
    trivial.process.send_signal(signal.SIGTERM)
    assert trivial.end() == 0


def test_a_part_that_keeps_dying_stops_everything_with_its_reason(home: Path) -> None:
    trivial = Trivial(home, "dying")
    assert trivial.end() == 1
    last = trivial.lines()[-1]
    assert last.startswith(f"turnlog: edge-0 died {FORGIVEN_MAX + 1} times within a minute")
    assert "(exit code 70): the reason of it; see " in last
    assert READY not in trivial.lines()
    assert trivial.journal()[-1] == "kafka stopped"
    assert left_of(home) == []


def test_a_part_that_cannot_work_with_its_settings_stops_everything_at_once(home: Path) -> None:
    trivial = Trivial(home, "misused")
    assert trivial.end() == 2
    last = trivial.lines()[-1]
    assert last.startswith("turnlog: edge-0 cannot work with its settings (exit code 2)")
    assert "the file is broken" in last


def test_a_part_that_does_not_obey_is_killed_and_the_stop_is_still_in_time(home: Path) -> None:
    trivial = Trivial(home, "deaf")
    trivial.wait_line(READY)
    parts = trivial.state().parts
    asked = time.monotonic()
    trivial.process.send_signal(signal.SIGTERM)
    assert trivial.end() == 0
    assert time.monotonic() - asked < STOP_S_MAX
    assert alive(parts) == []
    trivial.wait_line("edge-0     did not stop in time; killed")


def test_a_stop_before_everything_is_ready_is_a_stop(home: Path) -> None:
    trivial = Trivial(home, "never-ready")
    eventually(lambda: "edge-0 started" in trivial.journal(), what="the edge has started")
    parts = trivial.state().parts
    trivial.process.send_signal(signal.SIGTERM)
    assert trivial.end() == 0
    assert READY not in trivial.lines()
    assert alive(parts) == []


def test_no_part_outlives_a_supervisor_that_was_killed(home: Path) -> None:
    trivial = Trivial(home, "obedient")
    trivial.wait_line(READY)
    parts = trivial.state().parts
    trivial.process.kill()
    trivial.end()
    eventually(lambda: alive(parts) == [], what=f"{alive(parts)} ended")


def test_what_a_killed_supervisor_left_hanging_is_ended_by_the_next_start(home: Path) -> None:
    trivial = Trivial(home, "deaf")
    trivial.wait_line(READY)
    deaf = trivial.part("edge-0")
    os.kill(deaf.pid, signal.SIGSTOP)
    trivial.process.kill()
    trivial.end()
    after = Trivial(home, "obedient")
    assert "edge-0" in after.wait_line("ended ")
    after.wait_line(READY)
    assert alive((deaf,)) == []
    after.process.send_signal(signal.SIGTERM)
    assert after.end() == 0


def test_a_second_system_on_the_same_home_is_refused_in_one_line(home: Path) -> None:
    first = Trivial(home, "obedient")
    first.wait_line(READY)
    second = Trivial(home, "obedient")
    assert second.end() == 2
    (line,) = second.lines()
    assert line == (
        f"turnlog: {home} is in use by a running system (pid {first.process.pid}); "
        "stop it with `turnlog down` or set TURNLOG_HOME to another folder"
    )
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_under_what_it_prints_ends_no_system(home: Path) -> None:
    trivial = Trivial(home, "obedient", Path("/dev/full"))
    eventually(lambda: trivial.state().ready, what="all parts are ready")
    trivial.process.send_signal(signal.SIGTERM)
    assert trivial.end() == 0
    assert trivial.journal()[-1] == "kafka stopped"


def test_a_terminal_that_closes_stops_the_system(home: Path) -> None:
    trivial = Trivial(home, "obedient")
    trivial.wait_line(READY)
    trivial.process.send_signal(signal.SIGHUP)
    assert trivial.end() == 0


def test_a_system_that_has_only_begun_to_start_can_be_stopped_too(tmp_path: Path) -> None:
    """It fetches or formats before it has a part, and so has no state file yet."""
    held = subprocess.Popen(
        (
            sys.executable,
            "-c",
            (
                "import pathlib, signal, sys\n"
                "from infra.supervisor.home import locked_home\n"
                "with locked_home(pathlib.Path(sys.argv[1])):\n"
                "    print('held', flush=True)\n"
                "    signal.pause()\n"
            ),
            str(tmp_path),
        ),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert held.stdout is not None
        assert held.stdout.readline() == "held\n"
        second = turnlog("up", variables={"TURNLOG_HOME": str(tmp_path)})
        assert f"is in use by a running system (pid {held.pid})" in second.stderr
        done = turnlog("down", variables={"TURNLOG_HOME": str(tmp_path)})
        assert (done.returncode, done.stdout) == (0, "Stopped.\n")
        assert held.wait(timeout=PATIENCE_S) == -signal.SIGTERM
        again = turnlog("down", variables={"TURNLOG_HOME": str(tmp_path)})
        assert again.stdout == f"Nothing runs in {tmp_path}.\n"
    finally:
        held.kill()
        held.wait()
