"""What this process counts, for Prometheus."""

from __future__ import annotations

import time
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from schemas.run_fold import RunState
from schemas.vocabulary import ServiceTier, Tier

LATENESS_SAMPLED: Final = 8
"""One in so many writes is measured."""
WHOLE_PERCENT: Final = 100
_QUEUE_BUCKETS: Final = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_ERROR_BUCKETS: Final = (0.05, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 0.75, 1.0, 2.0, 5.0)
_WAIT_BUCKETS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Metrics:
    """One registry a process: nothing global."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.open_streams = Gauge(
            "turnlog_edge_open_streams", "Streams that are open now.", registry=registry
        )
        self.held_runs = Gauge("turnlog_edge_held_runs", "Runs in memory.", registry=registry)
        self.viewers_dropped = Gauge(
            "turnlog_edge_viewers_dropped_total",
            "Viewers closed because they did not read.",
            registry=registry,
        )
        self.deltas_sent = Gauge(
            "turnlog_edge_writes_total", "Writes of events to viewers.", registry=registry
        )
        self.bad_records = Gauge(
            "turnlog_edge_undecodable_records_total",
            "Records of the token log that are no event.",
            registry=registry,
        )
        self.loop_lag = Gauge(
            "turnlog_edge_loop_lag_seconds", "Delay of a timer, smoothed.", registry=registry
        )
        self.tail_lag = Gauge(
            "turnlog_edge_tail_lag_records",
            "Records of the token log that are not folded yet.",
            registry=registry,
        )
        self.parked = Gauge(
            "turnlog_parked_records", "Records in the .dead topic.", ["topic"], registry=registry
        )
        self.admission_wait = Histogram(
            "turnlog_edge_admission_wait_seconds",
            "From the append of a prompt to its decision on the run's stream.",
            buckets=_WAIT_BUCKETS,
            registry=registry,
        )
        self.lateness = Histogram(
            "turnlog_edge_lateness_seconds",
            "From a record's append time to its write to viewers, by this host's clock (sampled).",
            buckets=_WAIT_BUCKETS,
            registry=registry,
        )
        self.wait_error = Histogram(
            "turnlog_edge_wait_estimate_error_ratio",
            "How wrong the estimated wait of a run was, relative to its wait (at least 1 s), by lane.",
            ["lane"],
            buckets=_ERROR_BUCKETS,
            registry=registry,
        )
        self.wait_told = Counter(
            "turnlog_edge_wait_estimated_seconds_total",
            "Waits that were told, of runs that have started, by lane; by those that they had: how much too long or too short.",
            ["lane"],
            registry=registry,
        )
        self.waited = Counter(
            "turnlog_edge_wait_waited_seconds_total",
            "Waits that those runs had.",
            ["lane"],
            registry=registry,
        )
        self.wait = Histogram(
            "turnlog_edge_run_wait_seconds",
            "From a run's admission to its first attempt, by lane and model.",
            ["lane", "model"],
            buckets=_QUEUE_BUCKETS,
            registry=registry,
        )
        self.saturation = Gauge(
            "turnlog_edge_saturation_seconds",
            "Time that the workers need for what waits, as this edge sees it.",
            registry=registry,
        )
        self.pressure = Gauge(
            "turnlog_edge_pressure", "Pressure, 0 (calm) to 4 (shed).", registry=registry
        )
        self.requests = Counter(
            "turnlog_edge_requests_total", "Answers by status.", ["status"], registry=registry
        )
        self.flood_refused = Counter(
            "turnlog_edge_flood_refused_total",
            "Requests refused here, before the log, because their account sends far more than it may: prompts, and changes of chats.",
            ["tier", "what"],
            registry=registry,
        )
        self.decisions = Counter(
            "turnlog_edge_decisions_total",
            "Prompts sent from here, by what was decided: admitted, or the reason; and the ladder's level.",
            ["tier", "service_tier", "decision", "limit", "level"],
            registry=registry,
        )
        self.downgrades = Counter(
            "turnlog_edge_downgrades_total",
            "Prompts sent from here that were admitted to a smaller model, by the one they would have had.",
            ["tier", "model"],
            registry=registry,
        )
        self.shortened = Counter(
            "turnlog_edge_shortened_total",
            "Prompts sent from here that were admitted with a shorter answer than without the ladder.",
            ["tier"],
            registry=registry,
        )
        self.ladder_level = Gauge(
            "turnlog_edge_ladder_level",
            "The ladder's level in the newest decision seen here.",
            registry=registry,
        )
        self._writes = 0

    def decided(self, state: RunState, tier: Tier, service_tier: ServiceTier) -> None:
        """A prompt that this edge sent was decided."""
        queued, refusal = state.queued, state.refusal
        level = 0
        if queued is not None:
            level = queued.ladder_level
            decision, limit = "admitted", ""
            if queued.output_percent < WHOLE_PERCENT:
                self.shortened.labels(tier.value).inc()
            if queued.downgraded_from is not None:
                self.downgrades.labels(tier.value, queued.downgraded_from).inc()
        elif refusal is not None:
            level = refusal.ladder_level
            decision, limit = refusal.reason.value, refusal.limit
        else:
            return  # Sent to the run of its key, or in conflict with it.
        self.decisions.labels(tier.value, service_tier.value, decision, limit, str(level)).inc()
        self.ladder_level.set(level)

    def written(self, appended_ms: int) -> None:
        """A record with this stamp was written to its viewers."""
        self._writes += 1
        if self._writes % LATENESS_SAMPLED == 0:
            self.lateness.observe(max(0.0, time.time() - appended_ms / 1000))

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self.registry)
