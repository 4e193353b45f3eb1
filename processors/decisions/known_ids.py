"""Which run ids and idempotency keys one partition of the account log has seen, rebuilt from rows of the compacted topic.

Rules (cited by assertions and tests):
  K1  An entry counts for records above its source offset only: a record that is decided again sees what it saw the first time.
  K2  An entry counts for KNOWN_MS_MAX of append times of the partition's records, the entry's and the asking record's; no wall clock,
      no expiry of the topic.
  K3  A run id belongs to the first record that brought it. An idempotency key may be bound again after its entry ceased to count; both
      bindings are kept, and the last one below the asking record counts.
  K4  An entry is forgotten when it has ceased to count for longer than FORGET_AFTER_MS, by the newest record decided. What is
      forgotten may be removed from the topic; a removal that comes too early or late is harmless, because removals are not read.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from schemas.events.account_snapshots import KNOWN_MS_MAX, IdempotencyKeyBound, RunKnown

FORGET_AFTER_MS: Final = 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the index knows about one prompt. `binding` is the entry of its idempotency key."""

    run_known: bool = False
    binding: IdempotencyKeyBound | None = None


class KnownIds:
    """The index of one partition. Its memory is bounded by the prompts of KNOWN_MS_MAX + FORGET_AFTER_MS."""

    def __init__(self, rows: Iterable[RunKnown | IdempotencyKeyBound] = ()) -> None:
        self._runs: dict[str, RunKnown] = {}
        self._keys: dict[tuple[str, str], tuple[IdempotencyKeyBound, ...]] = {}
        self._ages: list[tuple[int, int, RunKnown | IdempotencyKeyBound]] = []
        self._learned = 0
        for row in rows:
            self.learn(row)

    def __len__(self) -> int:
        return len(self._runs) + sum(map(len, self._keys.values()))

    def facts(
        self,
        *,
        account_id: str,
        run_id: str,
        idempotency_key: str | None,
        offset: int,
        appended_ms: int,
    ) -> Facts:
        """What counts for the record at `offset`, appended at `appended_ms`."""
        run = self._runs.get(run_id)
        binding = None
        if idempotency_key is not None:
            for candidate in self._keys.get((account_id, idempotency_key), ()):
                if _counts(candidate, offset, appended_ms):
                    binding = candidate
        return Facts(
            run_known=run is not None and _counts(run, offset, appended_ms), binding=binding
        )

    def learn(self, row: RunKnown | IdempotencyKeyBound) -> None:
        """Take a row in; in any order, and any number of times."""
        match row:
            case RunKnown():
                known = self._runs.get(row.run_id)
                # K3: the first record, unless that one had ceased to count when this one was decided.
                if known is not None and not _replaces(row, known):
                    return
                self._runs[row.run_id] = row
            case IdempotencyKeyBound():
                name = (row.account_id, row.idempotency_key)
                known_bindings = self._keys.get(name, ())
                if any(row.source_offset == each.source_offset for each in known_bindings):
                    return
                self._keys[name] = tuple(
                    sorted([*known_bindings, row], key=lambda each: each.source_offset)
                )
        self._learned += 1
        heapq.heappush(self._ages, (row.appended_ms, self._learned, row))

    def forget(self, newest_ms: int) -> list[RunKnown | IdempotencyKeyBound]:
        """K4. Drop what no record can ask for any more, and give those whose rows may be removed from the topic."""
        forgotten: list[RunKnown | IdempotencyKeyBound] = []
        while self._ages and self._ages[0][0] < newest_ms - KNOWN_MS_MAX - FORGET_AFTER_MS:
            row = heapq.heappop(self._ages)[2]
            match row:
                case RunKnown():
                    if self._runs.get(row.run_id) == row:
                        del self._runs[row.run_id]
                        forgotten.append(row)
                case IdempotencyKeyBound():
                    name = (row.account_id, row.idempotency_key)
                    left = tuple(each for each in self._keys.get(name, ()) if each != row)
                    if left:
                        self._keys[name] = left
                    elif self._keys.pop(name, None):
                        forgotten.append(row)
        return forgotten


def _counts(row: RunKnown | IdempotencyKeyBound, offset: int, appended_ms: int) -> bool:
    """K1, K2."""
    return row.source_offset < offset and appended_ms - row.appended_ms < KNOWN_MS_MAX


def _replaces(row: RunKnown, known: RunKnown) -> bool:
    if row.source_offset < known.source_offset:
        return known.appended_ms - row.appended_ms < KNOWN_MS_MAX
    return row.appended_ms - known.appended_ms >= KNOWN_MS_MAX
