"""How late the event loop is: the delay of a timer, smoothed. New streams are refused while it is above the limit."""

from __future__ import annotations

import asyncio
from typing import Final

PROBE_EVERY_S: Final = 0.05
LAG_S_MAX: Final = 0.5
SMOOTHING: Final = 0.1


class LoopLag:
    """Run `probe` beside everything else."""

    def __init__(self) -> None:
        self.smoothed_s = 0.0

    @property
    def too_late(self) -> bool:
        """Whether what is written now would come too late."""
        return self.smoothed_s > LAG_S_MAX

    async def probe(self) -> None:
        """Measure for ever."""
        clock = asyncio.get_running_loop().time
        while True:
            asked = clock()
            await asyncio.sleep(PROBE_EVERY_S)
            late = max(0.0, clock() - asked - PROBE_EVERY_S)
            self.smoothed_s += SMOOTHING * (late - self.smoothed_s)
