"""How right the waits were that clients were told: each run's estimate against the time from its admission to its first attempt.

Both are append times of the broker in one partition, so no two clocks are compared. Runs that waited for another run of their chat are
left out: no estimate speaks of that. Of a run that is still waiting, or that ended before any attempt, nothing is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median, quantiles
from typing import Final

from edge.decisions.load_view import wait_error
from infra.verify.findings import Record
from schemas.events.tokens import AttemptStarted, PartitionTick, RunEvent, RunQueued
from schemas.run_fold import NEW_RUN, RunState, fold
from schemas.vocabulary import Lane

GOOD_ERROR_MAX: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One run's wait, told and true, in ms."""

    model: str
    lane: Lane
    estimated_ms: int
    waited_ms: int

    @property
    def error(self) -> float:
        return wait_error(estimated_ms=self.estimated_ms, waited_ms=self.waited_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSummary:
    """Of some runs. Errors are relative; `good_share` of them are below GOOD_ERROR_MAX. Waits in ms.

    `bias` is how much longer (below 0: shorter) all waits together were told than they were, relative to what they were; None: nobody
    waited.
    """

    runs: int
    waited_median_ms: float
    waited_p95_ms: float
    estimated_median_ms: float
    error_median: float
    error_p90: float
    good_share: float
    bias: float | None


class WaitAudit:
    """Folds the token log as every reader does."""

    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self._told: set[str] = set()
        self._open: dict[str, tuple[RunState, RunQueued | None, int]] = {}

    def take(self, record: Record) -> None:
        """The next record of a partition."""
        if isinstance(record.event, PartitionTick):
            return
        event: RunEvent = record.event  # type: ignore[assignment]
        if event.run_id in self._told:
            return
        state, queued, queued_ms = self._open.get(event.run_id, (NEW_RUN, None, 0))
        state, accepted = fold(state, event)
        if accepted and isinstance(event, RunQueued):
            queued, queued_ms = event, record.appended_ms
        if accepted and isinstance(event, AttemptStarted) and event.attempt == 1:
            assert queued is not None, "only a queued run is attempted"
            if queued.after_run_id is None:
                self.waits.append(
                    Wait(
                        model=queued.model,
                        lane=queued.lane,
                        estimated_ms=queued.wait_ms,
                        waited_ms=max(0, record.appended_ms - queued_ms),
                    )
                )
        if state.ended or state.attempt:
            self._open.pop(event.run_id, None)
            self._told.add(event.run_id)
        else:
            self._open[event.run_id] = (state, queued, queued_ms)


def summary(waits: list[Wait]) -> WaitSummary | None:
    """None: there are none."""
    if not waits:
        return None
    errors = sorted(wait.error for wait in waits)
    waited = sorted(wait.waited_ms for wait in waits)
    return WaitSummary(
        runs=len(waits),
        waited_median_ms=median(waited),
        waited_p95_ms=_quantile(waited, 95),
        estimated_median_ms=median(wait.estimated_ms for wait in waits),
        error_median=median(errors),
        error_p90=_quantile(errors, 90),
        good_share=sum(error < GOOD_ERROR_MAX for error in errors) / len(errors),
        bias=sum(wait.estimated_ms for wait in waits) / sum(waited) - 1 if any(waited) else None,
    )


def _quantile(values: list[int] | list[float], percent: int) -> float:
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[percent - 1]
