"""What was refused before the log, told in this process's own log: one line for TOLD_EVERY_S, however much it was."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

TOLD_EVERY_S: Final = 10.0
COUNTED_MAX: Final = 1_000

log = logging.getLogger(__name__)


class Floods:
    """Refusals by account since they were told last."""

    def __init__(self) -> None:
        self._refused: Counter[str] = Counter()
        self._others = 0
        self._told_at = float("-inf")

    def refused(self, account_id: str) -> None:
        """One more. Of more than COUNTED_MAX accounts it is not told whose."""
        if account_id in self._refused or len(self._refused) < COUNTED_MAX:
            self._refused[account_id] += 1
        else:
            self._others += 1

    def tell(self, now: float) -> None:
        """Say what there was, if it is time to. `now` in seconds of a steady clock."""
        if not self._refused or now - self._told_at < TOLD_EVERY_S:
            return
        account_id, most = self._refused.most_common(1)[0]
        log.warning(
            "refused before the log: %d requests of %d accounts, %d of them of %s",
            self._refused.total() + self._others,
            len(self._refused),
            most,
            account_id,
        )
        self._refused.clear()
        self._others = 0
        self._told_at = now
