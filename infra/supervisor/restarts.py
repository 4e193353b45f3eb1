"""Whether a part that died is started again, and when.

R1. A part that died is started again after a delay that doubles with each death in the last
    minute, from RESTART_DELAY_S_MIN to RESTART_DELAY_S_MAX.
R2. More than the forgiven number of deaths within a minute: given up.
R3. A usage error (exit 2) is never retried: the same settings would fail again.
R4. A death while the broker was away is the broker's: it is not counted, and the part is started
    again when the broker serves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

DEATHS_WINDOW_S: Final = 60.0
RESTART_DELAY_S_MIN: Final = 0.2
RESTART_DELAY_S_MAX: Final = 5.0
USAGE_ERROR_EXIT: Final = 2
_EXCEPTION: Final = re.compile(r"(Caused by: )?[A-Za-z_][\w.$]*(Error|Exception)(: |$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Start it again after this delay."""

    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Stop everything, and say this about the part."""

    reason: str


def after_death(
    *, deaths_s: Sequence[float], now_s: float, exit_code: int, forgiven_max: int
) -> Restart | GiveUp:
    """Decide about a part that ended with `exit_code` (negative: the signal) at now_s.

    `deaths_s` are the times of its deaths, this one included, on the clock of now_s.
    """
    if exit_code == USAGE_ERROR_EXIT:
        return GiveUp(reason="cannot work with its settings")
    recent = sum(1 for death_s in deaths_s if death_s > now_s - DEATHS_WINDOW_S)
    if recent > forgiven_max:
        return GiveUp(reason=f"died {recent} times within a minute")
    delay_s = min(RESTART_DELAY_S_MAX, RESTART_DELAY_S_MIN * 2.0 ** (recent - 1))
    return Restart(delay_s=delay_s)


def last_reason(lines: Sequence[str]) -> str:
    """Why a process ended, from the end of its log: its last critical line, else the last exception, else its last line."""
    for told in (
        [line for line in lines if " CRITICAL " in line],
        [line for line in lines if _EXCEPTION.match(line)],
        lines,
    ):
        if told:
            return told[-1].removeprefix("turnlog: ")
    return ""


def death_in_words(exit_code: int) -> str:
    """`signal 9` or `exit code 70`."""
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
