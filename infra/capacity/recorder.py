"""The recorder: the real fold of each partition of the token log, which measures use and keeps deadlines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from infra.capacity.clock import Timeline
from infra.capacity.runs import Run, TokenLog
from infra.capacity.scenario import Scenario
from processors.decisions.recorder import Concluded, Partition, Seen
from schemas.events.accounts import UsageMeasured
from schemas.events.tokens import PartitionTick

SWEEP_MS: Final = 1_000.0


class Recorder:
    """One for all partitions. `late_ms` behind the tails, for a time longer where it is slow."""

    def __init__(
        self,
        scenario: Scenario,
        timeline: Timeline,
        tokens: TokenLog,
        send: Callable[[UsageMeasured, str, str], None],
    ) -> None:
        self.late_ms = 0.0
        self._timeline = timeline
        self._tokens = tokens
        self.send = send
        self._free_at = 0.0
        self._partitions = [Partition(0) for _ in range(scenario.partitions)]
        tokens.read(self._seen)
        timeline.after(SWEEP_MS, self._sweep)

    def _seen(self, run: Run, seen: Seen, counts: bool) -> None:
        now = self._timeline.now
        if self.late_ms or self._free_at > now:
            # In order: what was delayed holds up what comes after it.
            self._free_at = max(self._free_at, now + self.late_ms)
            self._timeline.at(self._free_at, self._take, run.partition, seen)
        else:
            self._take(run.partition, seen)

    def _take(self, number: int, seen: Seen) -> None:
        partition = self._partitions[number]
        found = partition.take(seen)
        if isinstance(found, Concluded):
            self.send(found.usage, found.usage.account_id, found.usage_id)
            partition.acknowledged(found.run_id)
        else:
            assert found is None, "C1: from offset 0 on, nothing has to be read back"

    def _sweep(self) -> None:
        """Ticks, and what is past its deadline."""
        self._timeline.after(SWEEP_MS, self._sweep)
        now = self._timeline.broker_ms
        for partition in self._partitions:
            if not partition.open_runs:
                continue
            tick = Seen(
                offset=max(0, partition.position - 1),
                appended_ms=now,
                event_id="",
                event=PartitionTick(),
            )
            partition.take(tick)
            for overdue in partition.overdue():
                run = self._tokens.runs.get(overdue.ended.run_id)
                if run is not None:
                    self._tokens.append(run, overdue.ended, event_id=overdue.event_id)
