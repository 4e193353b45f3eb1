"""Where commands print: a terminal, whose width a table has to fit, or a pipe or a file, which has none and in which nothing is cut."""

from __future__ import annotations

import sys
from typing import Final

from rich.console import Console

PIPED_COLUMNS: Final = 1_000


def output() -> Console:
    """Standard output, for tables and lines."""
    width = None if sys.stdout.isatty() else PIPED_COLUMNS
    return Console(highlight=False, soft_wrap=True, width=width)
