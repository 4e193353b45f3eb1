"""What this edge believes of the rest of the system: workers and their load, accounts and their limits, the broker's clock.

Soft state from two small tails. It informs placement, the load view in a prompt, and what an account is told of its quota; no
outcome depends on it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from edge.decisions.load_view import (
    Fleet,
    Sent,
    WorkerSeen,
    fleet_of,
    is_counted,
    load_view,
    saturation_ms,
    still_counts,
    with_sent,
)
from edge.decisions.placement import choose_partition
from edge.decisions.pressure import Pressure, pressed
from edge.decisions.quota_view import QuotaView, quota_view
from schemas.events import Event
from schemas.events.account_snapshots import (
    KNOWN_MS_MAX,
    AccountSnapshot,
    IdempotencyKeyBound,
    LimitsKept,
)
from schemas.events.accounts import LaneLimits, LimitsChanged, LoadView, TierLimits
from schemas.events.workers import WorkerLoadReported
from schemas.lane_shares import DEFAULT_SHARES
from schemas.vocabulary import Lane, Tier

WORKERS_MAX: Final = 2_000
ACCOUNTS_MAX: Final = 200_000
KEYS_MAX: Final = 50_000
"""The newest bound keys. Only amid a flood is one asked for here (edge/allowances.py); admission knows all of them."""
SENT_MAX: Final = 20_000
FLEET_AGE_MS_MAX: Final = 100
"""So long a view is used again: it takes time in proportion to the workers and to what was sent."""


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
    """Every worker's last report, and what was sent and queued since."""

    def __init__(self, clock: BrokerClock) -> None:
        self._clock = clock
        self._seen: OrderedDict[str, WorkerSeen] = OrderedDict()
        self._sent: OrderedDict[str, Sent] = OrderedDict()
        self._live_ms: dict[str, int] = {}
        self._began_ms: int | None = None
        self._fleet = Fleet(at_ms=0)
        # Not in the fleet yet.
        self._fresh: list[Sent] = []
        self._pressure = Pressure()

    def note(self, event: Event, appended_ms: int) -> None:
        """Take a report."""
        if isinstance(event, WorkerLoadReported):
            self._seen[event.worker_id] = WorkerSeen(report=event, appended_ms=appended_ms)
            self._seen.move_to_end(event.worker_id)
            if len(self._seen) > WORKERS_MAX:
                self._seen.popitem(last=False)

    def fleet(self) -> Fleet:
        """The live workers as of now, or of FLEET_AGE_MS_MAX ago at most."""
        now_ms = self._clock.now_ms()
        if self._began_ms is None:
            self._began_ms = now_ms
        if 0 <= now_ms - self._fleet.at_ms < FLEET_AGE_MS_MAX:
            if self._fresh:
                self._fleet = with_sent(self._fleet, *self._fresh)
                self._fresh.clear()
            return self._fleet
        self._fresh.clear()
        while self._sent and not still_counts(next(iter(self._sent.values())), now_ms=now_ms):
            self._sent.popitem(last=False)
        fleet = fleet_of(tuple(self._seen.values()), self._sent.values(), now_ms=now_ms)
        for model, load in fleet.models.items():
            if load.owners:
                self._live_ms[model] = now_ms
        self._pressure = pressed(
            self._pressure, saturation_ms=saturation_ms(fleet) or 0, now_ms=now_ms
        )
        self._fleet = fleet
        for run_id in [r for r, sent in self._sent.items() if is_counted(fleet, sent)]:
            del self._sent[run_id]
        return fleet

    @property
    def pressure(self) -> int:
        """0 (calm) to 4 (shed)."""
        return self._pressure.level

    def place(
        self,
        chat_id: str,
        *,
        partitions: int,
        models: Sequence[str],
        lane: Lane,
        shares: Mapping[Lane, LaneLimits],
        draws: tuple[int, int],
    ) -> int:
        """The partition of a new run."""
        return choose_partition(
            chat_id,
            partitions=partitions,
            models=models,
            lane=lane,
            fleet=self.fleet(),
            shares=shares,
            draws=draws,
        )

    def sent(self, run_id: str, *, partition: int, lane: Lane, models: Sequence[str]) -> None:
        """This edge sends a prompt; the run counts until it is decided or too old."""
        self._note_sent(
            run_id,
            Sent(partition=partition, lane=lane, models=tuple(models), at_ms=self._clock.now_ms()),
        )

    def queued(self, run_id: str, *, partition: int, lane: Lane, model: str, at_ms: int) -> None:
        """A run was admitted, whoever sent it."""
        self._note_sent(
            run_id,
            Sent(partition=partition, lane=lane, models=(model,), at_ms=at_ms, queued=True),
        )

    def not_queued(self, run_id: str) -> None:
        """A run was refused or redirected, or has ended."""
        self._sent.pop(run_id, None)

    def _note_sent(self, run_id: str, sent: Sent) -> None:
        if run_id not in self._sent and len(self._fresh) < SENT_MAX:
            self._fresh.append(sent)
        self._sent[run_id] = sent
        self._sent.move_to_end(run_id)
        if len(self._sent) > SENT_MAX:
            self._sent.popitem(last=False)

    def load(
        self,
        models: Sequence[str],
        partition: int,
        shares: Mapping[Lane, LaneLimits],
        *,
        account_id: str | None = None,
        lanes: Sequence[Lane] = tuple(Lane),
    ) -> LoadView:
        """The view that goes into a prompt whose run lies in this partition, in one of the lanes."""
        fleet = self.fleet()
        began_ms = self._began_ms or fleet.at_ms
        absent = {model: fleet.at_ms - self._live_ms.get(model, began_ms) for model in models}
        return load_view(
            fleet,
            models,
            partition,
            shares=shares,
            absent_ms=absent,
            pressure=self.pressure,
            account_id=account_id,
            lanes=lanes,
        )


class Accounts:
    """The newest row of each account and the limits of the tiers."""

    def __init__(self, clock: BrokerClock) -> None:
        self._clock = clock
        self._rows: OrderedDict[str, AccountSnapshot] = OrderedDict()
        self._keys: OrderedDict[tuple[str, str], IdempotencyKeyBound] = OrderedDict()
        self._limits: LimitsChanged | None = None
        self._limits_ms = -1
        self.limits_known = asyncio.Event()
        """Set once admission has said any limits."""

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
            case IdempotencyKeyBound():
                key = event.account_id, event.idempotency_key
                bound = self._keys.get(key)
                if bound is None or bound.source_offset <= event.source_offset:
                    self._keys[key] = event
                    self._keys.move_to_end(key)
                    if len(self._keys) > KEYS_MAX:
                        self._keys.popitem(last=False)
            case LimitsKept():
                # Each partition has a row with the same newest version: the one written last is the newest policy.
                if event.versions and appended_ms >= self._limits_ms:
                    self._limits, self._limits_ms = event.versions[-1].limits, appended_ms
                    self.limits_known.set()
            case _:
                pass

    def bound(self, account_id: str, key: str) -> IdempotencyKeyBound | None:
        """What an idempotency key is bound to; None where nothing is known of it here."""
        found = self._keys.get((account_id, key))
        if found is None or self._clock.now_ms() - found.appended_ms >= KNOWN_MS_MAX:
            return None
        return found

    def tier(self, tier: Tier) -> TierLimits | None:
        """The limits of a tier; None until admission has said any."""
        return self._limits.tiers.get(tier) if self._limits else None

    def smaller(self, model: str) -> str | None:
        """What may stand in for a model under load."""
        policy = self._limits.models.get(model) if self._limits else None
        return policy.smaller if policy is not None else None

    @property
    def limits(self) -> LimitsChanged | None:
        """The newest policy; None until admission has said any."""
        return self._limits

    @property
    def shares(self) -> Mapping[Lane, LaneLimits]:
        """How lanes share the workers."""
        return self._limits.lanes if self._limits and self._limits.lanes else DEFAULT_SHARES

    def quota(self, account_id: str, tier: Tier) -> QuotaView | None:
        """What the account is told; None until admission has said any limits."""
        limits = self.tier(tier)
        if limits is None:
            return None
        return quota_view(self._rows.get(account_id), limits, now_ms=self._clock.now_ms())
