"""`make uneven`: the tests on a machine where any process may stand still for a moment at any place.

A test that passes only while one process is quicker than another passes for years on one machine and fails once on another. Here
every process that the run starts, the broker and the test itself among them, is stopped at random for up to STOP_S_MAX, and one at
a time is made slow for some seconds. Read what fails as a schedule: a race of the product or of the test. Two things fail here
without being one: a test that stops a process itself and finds it running again, and a time limit that the stops exhaust.

The seed is printed. It repeats the pauses, not the schedule of the machine.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Final

import psutil

STOP_S_MAX: Final = 0.4
BETWEEN_STOPS_S: Final = 0.08
"""On average."""
SLOW_S_MAX: Final = 4.0
SLOW_STOP_S_MAX: Final = 0.15
SLOW_RUN_S_MAX: Final = 0.04
SEEDS: Final = 1_000_000


class Unevenness:
    """Stops what `root` started, and `root` itself, until `ended` is set. Nothing is left stopped."""

    def __init__(self, root: psutil.Process, *, seed: int, ended: threading.Event) -> None:
        self._root = root
        self._random = random.Random(seed)
        self._ended = ended

    def pause_any(self) -> None:
        """Short stops, each of another process."""
        while not self._ended.wait(self._random.expovariate(1 / BETWEEN_STOPS_S)):
            process = self._any()
            if process is not None:
                self._stop(process, self._random.uniform(0, STOP_S_MAX))

    def slow_one(self) -> None:
        """One process at a time stands still for most of some seconds."""
        while not self._ended.wait(BETWEEN_STOPS_S):
            process = self._any()
            until = time.monotonic() + self._random.uniform(0, SLOW_S_MAX)
            while process is not None and time.monotonic() < until:
                if not self._stop(process, self._random.uniform(0, SLOW_STOP_S_MAX)):
                    break
                if self._ended.wait(self._random.uniform(0, SLOW_RUN_S_MAX)):
                    return

    def _any(self) -> psutil.Process | None:
        with suppress(psutil.Error):
            return self._random.choice([self._root, *self._root.children(recursive=True)])
        return None

    def _stop(self, process: psutil.Process, seconds: float) -> bool:
        """False: it is gone, or somebody else has stopped it, who decides when it goes on."""
        try:
            if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                return False
            process.suspend()
            self._ended.wait(seconds)
            process.resume()
        except psutil.Error:
            return False
        return True


def main() -> int:
    """The exit code of the command."""
    parser = argparse.ArgumentParser(description="Run a command on an uneven machine.")
    parser.add_argument("--seed", type=int, default=random.randrange(SEEDS))
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    print(f"uneven: seed {given.seed}", flush=True)
    command = subprocess.Popen(given.command)
    ended = threading.Event()
    root = psutil.Process(command.pid)
    makers = [
        threading.Thread(target=Unevenness(root, seed=given.seed, ended=ended).pause_any),
        threading.Thread(target=Unevenness(root, seed=given.seed + 1, ended=ended).slow_one),
    ]
    for maker in makers:
        maker.start()
    try:
        return command.wait()
    finally:
        ended.set()
        for maker in makers:
            maker.join()
        print(f"uneven: seed {given.seed}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
