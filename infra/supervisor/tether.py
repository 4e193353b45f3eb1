"""Ties a process to its parent: `python tether.py PARENT_PID COMMAND…` becomes COMMAND.

When the parent dies, however it dies, the kernel sends the command SIGTERM. The tie is set in
the new process itself, not between fork and exec in the supervisor, where a thread's lock could
be held. Imports no part of the project: it runs before every child, so it must be quick.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PARENT_GONE_EXIT = 143


def main() -> None:
    """Set the tie and become the command."""
    parent = int(sys.argv[1])
    command = sys.argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # It died before the tie was set.
            raise SystemExit(PARENT_GONE_EXIT)
    os.execvp(command[0], command)  # noqa: S606 - becoming the command is the point


if __name__ == "__main__":
    main()
