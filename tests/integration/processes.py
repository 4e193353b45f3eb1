"""Processes that tests start: tied to the test run, and what they said at hand for a failure.

When the test run dies, however it dies, the kernel ends them: nothing is left that would take a port or a core from the next run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infra.supervisor import tether

REPOSITORY: Final = Path(__file__).parents[2]
# The test itself may take 900 s.
COMMAND_WAIT_S: Final = 400.0
LINES_EACH_MAX: Final = 8
LINES_ALL_MAX: Final = 60


@dataclass(frozen=True, slots=True)
class _Spoken:
    """Where a process, or those that it starts, write: a file or a folder."""

    place: Path
    process: subprocess.Popen[bytes]


_spoken: list[_Spoken] = []
"""In the order of their starts."""


def shared_jar_cache() -> Path:
    """The jars of TURNLOG_CACHE, else of the default home of this checkout, fetched once."""
    return Path(os.environ.get("TURNLOG_CACHE") or REPOSITORY / ".turnlog" / "cache").absolute()


def environment(overrides: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, with no TURNLOG_ variable but those given and the cache."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TURNLOG_")}
    return {**kept, "TURNLOG_CACHE": str(shared_jar_cache()), **overrides}


def start_process(
    *argv: str,
    log: Path,
    variables: Mapping[str, str],
    logs: Path | None = None,
    own_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a command whose output is appended to `log`; those that it starts write into the folder `logs`.

    `own_session`: it gets no Ctrl-C from our terminal.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            (sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *argv),
            cwd=REPOSITORY,
            env=environment(variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=own_session,
        )
    _spoken.append(_Spoken(log, process))
    if logs is not None:
        _spoken.append(_Spoken(logs, process))
    return process


def start_module(
    module: str, *arguments: str, log: Path, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """`python -m <module>`, as `start_process`."""
    return start_process(*(sys.executable, "-m", module, *arguments), log=log, variables=variables)


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


def end_process(process: subprocess.Popen[bytes]) -> None:
    """However it stands, stopped too: it is gone when this returns."""
    if process.poll() is None:
        process.kill()
        os.kill(process.pid, signal.SIGCONT)
        process.wait()


def started_so_far() -> int:
    """A mark for `last_words`."""
    return len(_spoken)


def last_words(since: int) -> str:
    """The ends of the logs, short: of processes started since then, and what went wrong in older ones that still run."""
    found: dict[Path, list[str]] = {}
    for number, spoken in enumerate(_spoken):
        newer = number >= since
        if not newer and spoken.process.poll() is not None:
            continue
        place = spoken.place
        for file in sorted(place.glob("*.log")) if place.is_dir() else [place]:
            # A broker talks much of what is well.
            lines = _wanted(file, all_lines=newer and file.name != "kafka.log")
            if lines:
                found[file] = [f"--- {file.parent.name}/{file.name}", *lines]
    return "\n".join([line for lines in found.values() for line in lines][-LINES_ALL_MAX:])


def _wanted(file: Path, *, all_lines: bool) -> list[str]:
    try:
        lines = file.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    kept = lines if all_lines else [line for line in lines if _is_wrong(line)]
    return [line[:300] for line in kept[-LINES_EACH_MAX:]]


def _is_wrong(line: str) -> bool:
    return any(word in line for word in (" ERROR", " CRITICAL", "FATAL", "Error: ", "turnlog: "))
