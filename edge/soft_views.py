"""What this edge believes of the rest of the system: workers and their load, accounts and their limits, the broker's clock.

Soft state from two small tails. It informs placement, the load view in a prompt, and what an account is told of its quota; no
outcome depends on it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from edge.decisions.placement import (
    NO_WORKER_WAIT_MS,
    WorkerSeen,
    choose_partition,
    live_workers,
    load_view,
)
from edge.decisions.quota_view import QuotaView, quota_view
from schemas.events import Event
from schemas.events.account_snapshots import AccountSnapshot, LimitsKept
from schemas.events.accounts import LimitsChanged, LoadView, TierLimits
from schemas.events.workers import WorkerLoadReported
from schemas.vocabulary import Tier

WORKERS_MAX: Final = 2_000
ACCOUNTS_MAX: Final = 200_000


class BrokerClock:
    """The broker's time: its newest stamp, moved on by our own monotonic clock. No clocks of two hosts are compared (I17)."""

    def __init__(self, *, monotonic: Callable[[], float], wall: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._base_ms = int(wall() * 1000)  # Until a first stamp is seen.
        self._base_at = monotonic()
        self._seen = False

    def saw(self, appended_ms: int) -> None:
        """A record with this stamp was read just now."""
        if not self._seen or appended_ms > self.now_ms():
            self._base_ms, self._base_at, self._seen = appended_ms, self._monotonic(), True

    def now_ms(self) -> int:
        """About now, in ms of the epoch."""
        return self._base_ms + int((self._monotonic() - self._base_at) * 1000)


class Workers:
    """Every worker's last report, and what this edge has sent since."""

    def __init__(self, clock: BrokerClock) -> None:
        self._clock = clock
        self._seen: OrderedDict[str, WorkerSeen] = OrderedDict()
        self._unowned: deque[int] = deque(maxlen=1_000)

    def note(self, event: Event, appended_ms: int) -> None:
        """Take a report."""
        if isinstance(event, WorkerLoadReported):
            self._seen[event.worker_id] = WorkerSeen(report=event, appended_ms=appended_ms)
            self._seen.move_to_end(event.worker_id)
            if len(self._seen) > WORKERS_MAX:
                self._seen.popitem(last=False)

    def live(self) -> tuple[WorkerSeen, ...]:
        """Workers that report and take work."""
        return live_workers(self._seen.values(), now_ms=self._clock.now_ms())

    def place(
        self, chat_id: str, *, partitions: int, models: Sequence[str], draws: tuple[int, int]
    ) -> int:
        """The partition of a new run, which counts as sent there."""
        live = self.live()
        partition = choose_partition(
            chat_id, partitions=partitions, models=models, workers=live, draws=draws
        )
        owners = [worker for worker in live if partition in worker.report.partitions]
        for worker in owners:
            self._seen[worker.report.worker_id] = replace(worker, sent_since=worker.sent_since + 1)
        if not owners:
            self._unowned.append(self._clock.now_ms())
        return partition

    def load(self, models: Sequence[str]) -> LoadView:
        """The view that goes into a prompt."""
        now_ms = self._clock.now_ms()
        while self._unowned and now_ms - self._unowned[0] > NO_WORKER_WAIT_MS:
            self._unowned.popleft()
        return load_view(models, self.live(), unowned_sent=len(self._unowned))


class Accounts:
    """The newest row of each account and the limits of the tiers."""

    def __init__(self, clock: BrokerClock) -> None:
        self._clock = clock
        self._rows: OrderedDict[str, AccountSnapshot] = OrderedDict()
        self._limits: LimitsChanged | None = None
        self._limits_ms = -1

    def note(self, event: Event, appended_ms: int) -> None:
        """Take a row; rows of other kinds are none of our business."""
        match event:
            case AccountSnapshot():
                held = self._rows.get(event.account_id)
                if held is None or held.applied_offset <= event.applied_offset:  # W1
                    self._rows[event.account_id] = event
                    self._rows.move_to_end(event.account_id)
                    if len(self._rows) > ACCOUNTS_MAX:
                        self._rows.popitem(last=False)
            case LimitsKept():
                # Each partition has a row with the same newest version: the one written last is the newest policy.
                if event.versions and appended_ms >= self._limits_ms:
                    self._limits, self._limits_ms = event.versions[-1].limits, appended_ms
            case _:
                pass

    def tier(self, tier: Tier) -> TierLimits | None:
        """The limits of a tier; None until admission has said any."""
        return self._limits.tiers.get(tier) if self._limits else None

    def quota(self, account_id: str, tier: Tier) -> QuotaView | None:
        """What the account is told; None until admission has said any limits."""
        limits = self.tier(tier)
        if limits is None:
            return None
        return quota_view(self._rows.get(account_id), limits, now_ms=self._clock.now_ms())
