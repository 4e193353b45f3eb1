"""What became of runs on the token log, as far as waits are concerned: queued ones load the workers, and the first attempt tells whether
the estimate that the client was given was right.
"""

from __future__ import annotations

from typing import assert_never

from edge.decisions.load_view import saturation_ms, wait_error
from edge.metrics import Metrics
from edge.runs import LiveRun
from edge.soft_views import Workers
from infra.log.records import LogRecord
from schemas.events.tokens import (
    AttemptStarted,
    RunCancelled,
    RunEnded,
    RunEvent,
    RunQueued,
    RunRedirected,
    TokensGenerated,
)


class WaitWatch:
    """Told of every turn of every run that this edge sees."""

    def __init__(self, workers: Workers, metrics: Metrics) -> None:
        self._workers = workers
        self._metrics = metrics

    def turned(self, run: LiveRun, record: LogRecord) -> None:
        """An accepted record that is no delta."""
        event: RunEvent = record.event  # type: ignore[assignment]
        match event:
            case RunQueued() if event.after_run_id is None and not run.transcript.state.ended:
                self._workers.queued(
                    event.run_id,
                    partition=record.partition,
                    lane=event.lane,
                    model=event.model,
                    at_ms=record.appended_ms,
                )
            case AttemptStarted() if event.attempt == 1:
                # It goes on to count: it has a slot that the report may call free.
                self._started(run, record.appended_ms)
            case RunCancelled() | RunEnded() | RunRedirected() | RunQueued():
                self._workers.not_queued(event.run_id)
            case AttemptStarted() | TokensGenerated():
                pass
            case _:
                assert_never(event)

    def look(self) -> None:
        """Publish how the workers stand now."""
        self._metrics.saturation.set((saturation_ms(self._workers.fleet()) or 0) / 1000)
        self._metrics.pressure.set(self._workers.pressure)

    def _started(self, run: LiveRun, started_ms: int) -> None:
        queued = run.transcript.state.queued
        if queued is None or queued.after_run_id is not None:
            return  # It waited for another run, too, of which no estimate speaks.
        waited_ms = max(0, started_ms - run.transcript.queued_ms)
        self._metrics.wait.labels(lane=queued.lane.value, model=queued.model).observe(
            waited_ms / 1000
        )
        self._metrics.wait_told.labels(lane=queued.lane.value).inc(queued.wait_ms / 1000)
        self._metrics.waited.labels(lane=queued.lane.value).inc(waited_ms / 1000)
        self._metrics.wait_error.labels(lane=queued.lane.value).observe(
            wait_error(estimated_ms=queued.wait_ms, waited_ms=waited_ms)
        )
