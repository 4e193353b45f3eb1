"""What a worker says of its load, once a second, and how long cancelled answers keep their slots.

Both are for people and for the edges' soft view; no decision about a run depends on them.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Final

from inference_workers.decisions.request_book import Request
from inference_workers.engine import EngineLoad
from schemas.events.workers import WorkerLoadReported

REPORT_EVERY_S: Final = 1.0
# How much the last second counts in a rate.
RATE_WEIGHT: Final = 0.3
FREED_BOUNDS_MS: Final = (10, 25, 50, 100, 250, 500, 1_000, 5_000)


class FreedDelays:
    """A histogram: from the cancel seen on the tail to the engine's confirmation that the slot is free (invariant I8)."""

    def __init__(self) -> None:
        self._counts = [0] * (len(FREED_BOUNDS_MS) + 1)
        self.total = 0

    def add(self, delay_ms: int) -> None:
        """One cancelled answer's slot is free."""
        self._counts[bisect.bisect_left(FREED_BOUNDS_MS, delay_ms)] += 1
        self.total += 1

    def __str__(self) -> str:
        bounds = [f"<={bound}ms" for bound in FREED_BOUNDS_MS] + [f">{FREED_BOUNDS_MS[-1]}ms"]
        pairs = zip(bounds, self._counts, strict=True)
        return " ".join(f"{bound}:{count}" for bound, count in pairs if count)


class Rates:
    """Tokens per second as the engine made them, over the seconds in which it made any: what it can do, not what was asked of it."""

    def __init__(self) -> None:
        self.prefill = 0.0
        self.decode = 0.0
        self._last: EngineLoad | None = None

    def measure(self, load: EngineLoad, *, elapsed_s: float) -> None:
        """Another look at the engine's totals, `elapsed_s` after the one before."""
        last, self._last = self._last, load
        if last is None or elapsed_s <= 0:
            return
        prefilled = (load.prompt_tokens_total - last.prompt_tokens_total) / elapsed_s
        decoded = (load.generated_tokens_total - last.generated_tokens_total) / elapsed_s
        self.prefill = _moved(self.prefill, prefilled)
        self.decode = _moved(self.decode, decoded)


def _moved(rate: float, measured: float) -> float:
    if measured <= 0:
        return rate
    return measured if rate == 0 else rate + RATE_WEIGHT * (measured - rate)


def queued_tokens(queued: Iterable[Request]) -> int:
    """Prompt and granted output of what waits: the work that lies ahead of a request sent now."""
    return sum(len(r.event.prompt_ids) + r.event.granted_output_tokens for r in queued)


def load_report(
    *,
    worker_id: str,
    model: str,
    epoch: int,
    slots: int,
    busy: int,
    queued: list[Request],
    rates: Rates,
    partitions: Iterable[int],
    draining: bool,
) -> WorkerLoadReported:
    """The event. `epoch` rises with every start of the worker, so a report of an earlier life is told from one of this."""
    return WorkerLoadReported(
        worker_id=worker_id,
        model=model,
        epoch=epoch,
        slots=slots,
        busy=busy,
        queued_requests=len(queued),
        queued_tokens=queued_tokens(queued),
        prefill_tokens_per_s=round(rates.prefill, 1),
        decode_tokens_per_s=round(rates.decode, 1),
        partitions=tuple(sorted(partitions)),
        draining=draining,
    )
