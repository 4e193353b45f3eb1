"""What a worker says of its load, once a second, and how long cancelled answers keep their slots.

Both are for people and for the edges' soft view; no decision about a run depends on them.
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Final

from inference_workers.decisions.lanes import AccountLine, Claim, LaneQueue
from inference_workers.decisions.turns import Asked
from inference_workers.engine import EngineLoad
from schemas.events.workers import AccountLoad, LaneLoad, WorkerLoadReported
from schemas.vocabulary import Lane

REPORT_EVERY_S: Final = 1.0
# How much the last second counts in a rate.
RATE_WEIGHT: Final = 0.3
FULL_RATE_WEIGHT_MIN: Final = 0.05
COMING_WEIGHT_MIN: Final = 0.02
# How much the last request counts in what requests use, once there were many: noise here is noise in every wait.
USE_WEIGHT_MIN: Final = 0.02
RECENT_MAX: Final = 64
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
    """Tokens per second as the engine made them, over the seconds in which it made any: what it can do, not what was asked of it.

    `full` is prompt and output together over the seconds in which no slot was free: at that pace a queue becomes shorter.
    """

    def __init__(self) -> None:
        self.prefill = 0.0
        self.decode = 0.0
        self.full = 0.0
        self._full_seconds = 0
        self._last: EngineLoad | None = None

    def measure(self, load: EngineLoad, *, full: bool, elapsed_s: float) -> None:
        """Another look at the engine's totals, `elapsed_s` after the one before; `full`: no slot was free in between."""
        last, self._last = self._last, load
        if last is None or elapsed_s <= 0:
            return
        prefilled = (load.prompt_tokens_total - last.prompt_tokens_total) / elapsed_s
        decoded = (load.generated_tokens_total - last.generated_tokens_total) / elapsed_s
        self.prefill = _moved(self.prefill, prefilled)
        self.decode = _moved(self.decode, decoded)
        if full:
            # Prompts count all at once when they start: the mean needs many seconds.
            self._full_seconds += 1
            weight = max(FULL_RATE_WEIGHT_MIN, 1 / self._full_seconds)
            self.full += weight * (prefilled + decoded - self.full)


def _moved(rate: float, measured: float) -> float:
    if measured <= 0:
        return rate
    return measured if rate == 0 else rate + RATE_WEIGHT * (measured - rate)


class LaneUse:
    """How much requests of each lane claim as they come (tokens per second), how much of that they use (a share of 0 to 1), and how many
    tokens one of them uses.
    """

    def __init__(self) -> None:
        self.claimed: dict[Lane, float] = {}
        self.tokens: dict[Lane, float] = {}
        self.coming: dict[Lane, float] = {}
        self.recent: dict[Lane, deque[tuple[str, int]]] = {}
        self._came: Counter[Lane] = Counter()
        self._ended: Counter[Lane] = Counter()
        self._seconds = 0

    def came(self, claim: Claim) -> None:
        """One came."""
        self._came[claim.lane] += claim.tokens
        recent = self.recent.setdefault(claim.lane, deque(maxlen=RECENT_MAX))
        recent.append((claim.account_id, claim.tokens))

    def second(self, *, elapsed_s: float) -> None:
        """So long after the last time."""
        if elapsed_s <= 0:
            return
        self._seconds += 1
        weight = max(COMING_WEIGHT_MIN, 1 / self._seconds)
        for lane in Lane:
            before = self.coming.get(lane, 0.0)
            self.coming[lane] = before + weight * (self._came[lane] / elapsed_s - before)
        self._came.clear()

    def ended(self, lane: Lane, *, claimed: int, used: int) -> None:
        """One ended; tokens of prompt and output."""
        self._ended[lane] += 1
        weight = max(USE_WEIGHT_MIN, 1 / self._ended[lane])
        for means, seen in ((self.claimed, claimed), (self.tokens, used)):
            before = means.get(lane, 0.0)
            means[lane] = before + weight * (seen - before)

    def share(self, lane: Lane) -> float:
        """Of the tokens claimed, those used; 0: none ended yet. Not the mean of each one's share: large ones count for more."""
        claimed = self.claimed.get(lane, 0.0)
        return min(1.0, self.tokens[lane] / claimed) if claimed else 0.0


def lane_load(
    lane: Lane,
    queue: LaneQueue,
    *,
    others: list[int],
    use: LaneUse,
    lines: Iterable[AccountLine] = (),
    turns: Mapping[Asked, int] | None = None,
) -> LaneLoad:
    """What waits in the lane. `others` are the claims of requests that wait for something else before they may wait for a slot."""
    return LaneLoad(
        lane=lane,
        queued_requests=queue.requests + len(others),
        queued_tokens=queue.tokens + sum(others),
        ahead_requests=queue.ahead_requests + len(others),
        ahead_tokens=queue.ahead_tokens + sum(others),
        used_percent=round(100 * use.share(lane)),
        used_tokens_mean=round(use.tokens.get(lane, 0)),
        coming_tokens_per_s=round(use.coming.get(lane, 0.0), 1),
        accounts=tuple(
            AccountLoad(
                account_id=line.account_id,
                ahead_tokens=line.ahead_tokens,
                turn_tokens=turns.get((lane, line.account_id)) if turns else None,
            )
            for line in lines
        ),
        turn_tokens=turns.get((lane, None)) if turns else None,
    )


def load_report(
    *,
    worker_id: str,
    model: str,
    epoch: int,
    slots: int,
    busy: int,
    lanes: tuple[LaneLoad, ...],
    rates: Rates,
    kv_tokens: int,
    kv_tokens_max: int,
    partitions: Iterable[int],
    draining: bool,
    free_ms: tuple[int, ...] = (),
) -> WorkerLoadReported:
    """The event. `epoch` rises with every start of the worker, so a report of an earlier life is told from one of this."""
    return WorkerLoadReported(
        worker_id=worker_id,
        model=model,
        epoch=epoch,
        slots=slots,
        busy=busy,
        queued_requests=sum(lane.queued_requests for lane in lanes),
        queued_tokens=sum(lane.queued_tokens for lane in lanes),
        prefill_tokens_per_s=round(rates.prefill, 1),
        decode_tokens_per_s=round(rates.decode, 1),
        full_tokens_per_s=round(rates.full, 1),
        partitions=tuple(sorted(partitions)),
        draining=draining,
        lanes=lanes,
        kv_tokens=kv_tokens,
        kv_tokens_max=kv_tokens_max,
        free_ms=free_ms,
    )
