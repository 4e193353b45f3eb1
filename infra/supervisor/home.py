"""What one system keeps about itself in its home: the lock of its supervisor and its state file.

The state file `supervisor.json` names every process with its pid and its time of creation, which
together identify it: a pid alone may long be somebody else's. The time is counted from the machine's
start, which the file names too: the clock may be set while the system runs.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TextIO

import psutil

STATE_NAME: Final = "supervisor.json"
LOCK_NAME: Final = "supervisor.lock"
LOCK_TRIES_MAX: Final = 200
"""Tries, not time: a process that stands still for a moment itself gives up none of them."""
LOCK_POLL_S: Final = 0.01
LEFTOVER_TERM_S: Final = 4.0
LEFTOVER_KILL_S: Final = 2.0
SAME_PROCESS_S: Final = 0.05
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
CREATED_FIELD: Final = 19
"""Of /proc/PID/stat behind the name: ticks from the machine's start to the process's."""
# With less a broker dies at its first segment.
FREE_MIB_MIN: Final = 32


class HomeInUseError(RuntimeError):
    """Another supervisor has this home. The message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """One process. `created_s` is the kernel's time of its creation, as `created_s()` says it."""

    name: str
    pid: int
    created_s: float
    started_at_s: float
    ready: bool
    restarts: int
    port: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemState:
    """The whole: `ready` once every part has been ready. `boot` names the machine's start in which it was written."""

    boot: str
    supervisor_pid: int
    supervisor_created_s: float
    started_at_s: float
    ready: bool
    kafka: str
    urls: tuple[str, ...]
    parts: tuple[ProcessState, ...]


def free_mib(home: Path) -> int:
    """Whole MiB that are free where the home lies."""
    return shutil.disk_usage(home).free // (1024 * 1024)


@contextmanager
def locked_home(home: Path) -> Iterator[None]:
    """Hold the home for this process; raise HomeInUseError when another one holds it."""
    home.mkdir(parents=True, exist_ok=True)
    # Never inherited by a child: the kernel gives it back when this process dies, however it dies.
    with (home / LOCK_NAME).open("a") as lock:
        _take(lock, home)
        lock.truncate(0)
        lock.write(f"{os.getpid()} {created_s(os.getpid())}\n")
        lock.flush()
        yield


def _take(lock: TextIO, home: Path) -> None:
    pause = threading.Event()
    for left in reversed(range(LOCK_TRIES_MAX)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Whoever asks about a home holds it for a moment; a supervisor says who it is.
            by_process = holder(home)
            if by_process is None and left:
                pause.wait(LOCK_POLL_S)
                continue
            by = f" (pid {by_process.pid})" if by_process else ""
            raise HomeInUseError(
                f"{home} is in use by a running system{by}; stop it with `turnlog down` "
                "or set TURNLOG_HOME to another folder"
            ) from None
        else:
            return


def is_locked(home: Path) -> bool:
    """Whether a supervisor holds this home now."""
    path = home / LOCK_NAME
    if not path.exists():
        return False
    with path.open("a") as lock:
        try:
            # Shared: who asks at the same time is no supervisor.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def holder(home: Path) -> psutil.Process | None:
    """The supervisor that holds this home, also one that has not written a state yet; None where none does."""
    if not is_locked(home):
        return None
    try:
        pid, created = (home / LOCK_NAME).read_text("utf-8").split()
        return live_process(int(pid), float(created))
    except (OSError, ValueError):
        return None


def write_state(home: Path, state: SystemState) -> None:
    """Replace the state file as a whole: a reader sees the old one or the new one."""
    scratch = home / f"{STATE_NAME}.new"
    scratch.write_text(json.dumps(asdict(state), indent=1), "utf-8")
    scratch.replace(home / STATE_NAME)


def read_state(home: Path) -> SystemState | None:
    """The last state that was written since the machine's start; None where there is none that can be read."""
    try:
        raw: dict[str, Any] = json.loads((home / STATE_NAME).read_text("utf-8"))
        parts = tuple(ProcessState(**part) for part in raw.pop("parts"))
        state = SystemState(**{**raw, "urls": tuple(raw["urls"]), "parts": parts})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return state if state.boot == _boot() else None


def running_system(home: Path) -> SystemState | None:
    """The state of the system that runs in this home; None where none does, or none that has started a part."""
    state = read_state(home)
    if state is None or live_process(state.supervisor_pid, state.supervisor_created_s) is None:
        return None
    return state


def forget_state(home: Path) -> None:
    """Remove the state file: nothing runs any more."""
    (home / STATE_NAME).unlink(missing_ok=True)


def created_s(pid: int) -> float:
    """When the kernel made this process, in seconds from the machine's start where that can be told; 0.0 when it is gone already."""
    try:
        return _created_s(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return 0.0


def _created_s(process: psutil.Process) -> float:
    if sys.platform != "linux":
        return process.create_time()
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(process.pid) from None
    return int(stat.rpartition(b")")[2].split()[CREATED_FIELD]) / os.sysconf("SC_CLK_TCK")


def _boot() -> str:
    """Another one after each start of the machine, where that can be told."""
    with suppress(OSError):
        return BOOT_ID.read_text("ascii").strip()
    return ""


def live_process(pid: int, created: float) -> psutil.Process | None:
    """The process with this pid, if it is still the one that was created then."""
    try:
        process = psutil.Process(pid)
        same = abs(_created_s(process) - created) < SAME_PROCESS_S
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def end_leftovers(home: Path) -> tuple[str, ...]:
    """End what a supervisor that was killed left behind; return the names of the parts ended.

    The tie of each part has already sent SIGTERM; this waits for it, and ends with SIGKILL what
    does not go, for example because it is stopped. Call it with the home locked.
    """
    state = read_state(home)
    if state is None:
        return ()
    found = {
        part.name: process
        for part in state.parts
        if (process := live_process(part.pid, part.created_s)) is not None
    }
    _end(list(found.values()))
    forget_state(home)
    return tuple(found)


def _end(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=LEFTOVER_TERM_S)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=LEFTOVER_KILL_S)


def own_state(
    *,
    started_at_s: float,
    ready: bool,
    kafka: str,
    urls: Sequence[str],
    parts: Sequence[ProcessState],
) -> SystemState:
    """The state of the system that this process supervises."""
    return SystemState(
        boot=_boot(),
        supervisor_pid=os.getpid(),
        supervisor_created_s=created_s(os.getpid()),
        started_at_s=started_at_s,
        ready=ready,
        kafka=kafka,
        urls=tuple(urls),
        parts=tuple(parts),
    )
