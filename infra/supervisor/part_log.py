"""The log of a part: what its process prints, bounded while the process runs, with so many older files beside it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

LOG_BYTES_MAX: Final = 8 * 1024 * 1024
OLDER_LOGS_KEPT: Final = 3
LOOK_EVERY_S: Final = 5.0


def turn_over(log: Path, *, bytes_max: int = LOG_BYTES_MAX) -> bool:
    """Begin the log anew where it is beyond its bound; what it held is `.1` then, and what was `.1` is `.2`. Tells whether it was.

    The process writes on into the same file, which it has open to append: so it needs to know nothing of this. What it prints in the
    moment between the copy and the cut is lost. Raises OSError, for example on a full disk; then the log is as it was.
    """
    if not log.exists() or log.stat().st_size <= bytes_max:
        return False
    scratch = _older(log, 0)
    try:
        shutil.copyfile(log, scratch)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
    for number in range(OLDER_LOGS_KEPT - 1, -1, -1):
        if _older(log, number).exists():
            _older(log, number).replace(_older(log, number + 1))
    os.truncate(log, 0)
    return True


def _older(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")
