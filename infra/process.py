"""What every process of the system shares: its log lines, its signals, and saying that it is ready.

A process that the supervisor starts is `python -m <module>`. It reads its settings, does what it
must before it can serve, calls `announce_ready`, and ends with code 0 soon after SIGTERM. Any
other end is a death, and the supervisor starts it again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Final

READY_FILE_VARIABLE: Final = "TURNLOG_READY_FILE"

# A broken invariant or a failed send: the process ends before it can commit, and comes again.
DEFECT_EXIT: Final = 70

# Their debug records are built, and cost CPU, even where nothing is logged below warning.
_NOISY_LOGGERS: Final = ("aiokafka", "faust", "mode", "httpx", "httpcore", "asyncio")

_STOPS: Final = (signal.SIGTERM, signal.SIGINT)
_WAKES_MAX: Final = 64
_kept: list[socket.socket] = []
"""Open to the end of the process: a signal may come after the loop."""


def announce_ready() -> None:
    """Tell the supervisor, if there is one, that this process serves now. May be called again."""
    path = os.environ.get(READY_FILE_VARIABLE, "")
    if path:
        Path(path).touch()


def start_logging(part: str, level: str) -> None:
    """Log to stderr from `level` (a value of TURNLOG_LOG) on; `part` names the process in a line.

    Log event names, ids and counts; never the text of a prompt or an answer.
    """
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"%(asctime)s %(levelname)s {part} %(name)s %(message)s",
        force=True,
    )
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(max(logging.INFO, logging.getLogger().level))


def stop_requested() -> asyncio.Event:
    """An event of the running loop that SIGTERM or SIGINT sets. Call it once, early, in the main thread.

    The first one counts. Those that follow are ignored to the very end of the process, so that none of them falls between the end of the
    loop and that of the process and kills what has ended well: a loop's own handlers go with the loop.
    """
    event = asyncio.Event()
    woken, waking = socket.socketpair()
    for end in (woken, waking):
        end.setblocking(False)

    told = False

    def heard(*_: object) -> None:
        nonlocal told
        told = True
        for number in _STOPS:
            signal.signal(number, signal.SIG_IGN)

    def wake() -> None:
        # Every signal that this process handles comes by here, also one that is none of these (a profiler's).
        woken.recv(_WAKES_MAX)
        if told:
            event.set()

    asyncio.get_running_loop().add_reader(woken, wake)
    # A signal between two steps of the loop wakes it too: the interpreter writes to this end as the signal comes.
    signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    for number in _STOPS:
        signal.signal(number, heard)
    _kept.extend((woken, waking))
    return event
