"""A supervisor over trivial children, as a program: `python -m tests.integration.trivial_system HOME CASE`.

Each child writes what happens to it into HOME/journal, so a test can read the order of things.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Final

from infra.settings import exit_with_usage_error
from infra.supervisor.home import HomeInUseError, end_leftovers, locked_home
from infra.supervisor.part import PartPlan, Phase
from infra.supervisor.supervise import Supervisor, say

FORGIVEN_MAX: Final = 2

_OBEDIENT: Final = """
import os, pathlib, signal, sys
journal, name = sys.argv[1:]
def note(what):
    with open(journal, "a") as file:
        file.write(f"{name} {what}\\n")
# Held until it is waited for: one that came just before a pause would be slept through.
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
note("started")
pathlib.Path(os.environ["TURNLOG_READY_FILE"]).touch()
while True:
    signal.sigwait([signal.SIGTERM])
    note("stopped")
    sys.exit(0)
"""
_DEAF: Final = _OBEDIENT.replace("    sys.exit(0)\n", "")
_DIES: Final = "import sys; print('the reason of it', file=sys.stderr); sys.exit(70)"
_MISUSED: Final = "import sys; print('turnlog: the file is broken', file=sys.stderr); sys.exit(2)"
_NEVER_READY: Final = _OBEDIENT.replace("pathlib.Path(", "str(").replace(".touch()", "")

CASES: Final = {
    "obedient": {"edge-0": _OBEDIENT},
    "deaf": {"edge-0": _DEAF},
    "dying": {"edge-0": _DIES},
    "misused": {"edge-0": _MISUSED},
    "never-ready": {"edge-0": _NEVER_READY},
}
PHASES: Final = {
    "kafka": Phase.BROKER,
    "recorder": Phase.PROCESSOR,
    "worker-0": Phase.WORKER,
    "edge-0": Phase.EDGE,
}


def plans(home: Path, case: str) -> list[PartPlan]:
    """One part a phase, all obedient but those that the case names."""
    return [
        PartPlan(
            name=name,
            argv=(
                sys.executable,
                "-c",
                CASES[case].get(name, _OBEDIENT),
                str(home / "journal"),
                name,
            ),
            phase=phase,
            log=home / "logs" / f"{name}.log",
            ready_file=home / "run" / f"{name}.ready",
        )
        for name, phase in PHASES.items()
    ]


def main() -> None:
    """Run the case until stopped."""
    home, case = Path(sys.argv[1]), sys.argv[2]
    try:
        with locked_home(home):
            ended = end_leftovers(home)
            if ended:
                say("ended " + ", ".join(sorted(ended)))
            supervisor = Supervisor(
                home=home,
                plans=plans(home, case),
                kafka="nowhere:1",
                urls=("http://127.0.0.1:1",),
                forgiven_max=FORGIVEN_MAX,
            )
            raise SystemExit(asyncio.run(supervisor.run()))
    except HomeInUseError as error:
        exit_with_usage_error(str(error))


if __name__ == "__main__":
    main()
