"""Runs a module as `python -m` would, and samples what its CPU time goes into: `python -m infra.bench.sampled_process FILE MODULE`.

The kernel sends a signal for every few milliseconds of CPU time that the process used; then each thread's place is charged with the
CPU time that this thread used since. So the process is slowed little and evenly, where a tracing profiler would make calls look dearer
than they are. The places of the main thread are exact; those of another are where it next gave way to the main thread.

SIGUSR1 begins afresh, SIGUSR2 writes what was found to FILE.
"""

from __future__ import annotations

import json
import runpy
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

INTERVAL_S: Final = 0.004
# A thread that must give way for a sample does so soon, near to where it was.
SWITCH_INTERVAL_S: Final = 0.000_5
DEPTH_MAX: Final = 100
ROWS_MAX: Final = 200


class Sampler:
    """Charges CPU time, in seconds, by function and by module."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen_s: dict[int, float] = {}
        self._charges = 0
        self._own: defaultdict[str, float] = defaultdict(float)
        self._within: defaultdict[str, float] = defaultdict(float)
        self._own_modules: defaultdict[str, float] = defaultdict(float)
        self._modules: defaultdict[str, float] = defaultdict(float)
        self._threads: defaultdict[str, float] = defaultdict(float)

    def begin(self) -> None:
        """Obey the signals. Call it in the main thread."""
        signal.signal(signal.SIGUSR1, lambda *_: self._clear())
        signal.signal(signal.SIGUSR2, lambda *_: self._write())
        signal.signal(signal.SIGPROF, lambda _, frame: self._sample(frame))
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)

    def _clear(self) -> None:
        for counts in (self._own, self._within, self._own_modules, self._modules, self._threads):
            counts.clear()
        self._charges = 0

    def _sample(self, interrupted: FrameType | None) -> None:
        frames = sys._current_frames()  # noqa: SLF001 - the documented way
        main = threading.main_thread().ident
        for thread in threading.enumerate():
            if thread.ident is None or thread.ident not in frames:
                continue
            used_s = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            new_s = used_s - self._seen_s.get(thread.ident, 0.0)
            self._seen_s[thread.ident] = used_s
            frame = interrupted if thread.ident == main else frames[thread.ident]
            if new_s > 0 and frame is not None:
                self._charge(thread.name, frame, new_s)

    def _charge(self, thread: str, innermost: FrameType, used_s: float) -> None:
        stack = [(_module(frame), _function(frame)) for frame in _outward(innermost)]
        self._charges += 1
        self._threads[thread] += used_s
        self._own[stack[0][1]] += used_s
        self._own_modules[_package(stack[0][0])] += used_s
        for function in {function for _, function in stack}:
            self._within[function] += used_s
        for module in {module for module, _ in stack}:
            self._modules[module] += used_s

    def _write(self) -> None:
        found = {
            "charges": self._charges,
            "threads": _most(self._threads),
            "own": _most(self._own),
            "own_modules": _most(self._own_modules),
            "within": _most(self._within),
            "modules": _most(self._modules),
        }
        beside = self._file.with_suffix(".part")
        beside.write_text(json.dumps(found), "utf-8")
        beside.rename(self._file)


def _most(charged: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(charged.items(), key=lambda each: -each[1])[:ROWS_MAX]


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    depth = 0
    while frame is not None and depth < DEPTH_MAX:
        yield frame
        frame, depth = frame.f_back, depth + 1


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?"))


def _function(frame: FrameType) -> str:
    return f"{_module(frame)}.{frame.f_code.co_qualname}"


def _package(module: str) -> str:
    """Ours by two names, others by one."""
    ours = ("processors", "producers", "schemas", "infra", "aiokafka")
    first, _, rest = module.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if rest and first in ours else first


def main() -> None:
    """Sample the module named on the command line."""
    file, module = sys.argv[1:3]
    sys.argv = [module]
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    Sampler(Path(file)).begin()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
