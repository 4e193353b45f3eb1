"""What this process counts, for Prometheus."""

from __future__ import annotations

import time
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

LATENESS_SAMPLED: Final = 8
"""One in so many writes is measured."""
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
        self.requests = Counter(
            "turnlog_edge_requests_total", "Answers by status.", ["status"], registry=registry
        )
        self._writes = 0

    def written(self, appended_ms: int) -> None:
        """A record with this stamp was written to its viewers."""
        self._writes += 1
        if self._writes % LATENESS_SAMPLED == 0:
            self.lateness.observe(max(0.0, time.time() - appended_ms / 1000))

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self.registry)
