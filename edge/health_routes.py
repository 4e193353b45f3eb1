"""Liveness, readiness and metrics. Not for clients: no token is asked for, and nothing of any account is shown."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from edge.answers import json_answer
from edge.state import EdgeState, state_of
from infra.history import HistoryUnavailable
from infra.log.span_reader import SpanFailed
from schemas.topics import CHATS, TOKENS, all_topics

TAIL_LAG_RECORDS_MAX: Final = 5_000
PROBE_WAIT_S_MAX: Final = 2.0


async def live(request: Request) -> Response:
    """GET /healthz: the event loop turns."""
    return json_answer({"status": "ok"})


async def ready(request: Request) -> Response:
    """GET /readyz: the broker answers, the tail is near its end, the store reads, and no drain is under way."""
    edge = state_of(request)
    lag = await _tail_lag(edge)
    checks = {
        "broker": "ok" if lag is not None else "unreachable",
        "tail": "ok" if lag is not None and lag <= TAIL_LAG_RECORDS_MAX else "behind",
        "store": "ok" if await _store_reads(edge) else "unreachable",
        "draining": "yes" if edge.streams.draining else "no",
    }
    good = checks["broker"] == checks["tail"] == checks["store"] == "ok"
    good = good and not edge.streams.draining
    return json_answer(
        {"status": "ok" if good else "unavailable", "checks": checks, "tail_lag_records": lag},
        status=200 if good else 503,
    )


async def metrics(request: Request) -> Response:
    """GET /metrics"""
    edge = state_of(request)
    values = edge.metrics
    values.open_streams.set(len(edge.streams.open))
    values.held_runs.set(edge.runs.held)
    values.viewers_dropped.set(edge.streams.dropped)
    values.deltas_sent.set(edge.runs.writes)
    values.bad_records.set(edge.runs.bad_records)
    values.loop_lag.set(edge.lag.smoothed_s)
    lag = await _tail_lag(edge)
    values.tail_lag.set(lag if lag is not None else float("nan"))
    await _count_parked(edge)
    return Response(values.text(), headers={"content-type": CONTENT_TYPE_LATEST})


async def _tail_lag(edge: EdgeState) -> int | None:
    """Records of the token log that are not folded yet; None where the broker does not answer."""
    try:
        async with asyncio.timeout(PROBE_WAIT_S_MAX):
            bounds = await edge.reader.bounds(TOKENS, list(edge.runs.positions))
    except (SpanFailed, TimeoutError):
        return None
    return sum(max(0, b.end - edge.runs.positions[p]) for p, b in bounds.items())


async def _store_reads(edge: EdgeState) -> bool:
    try:
        await edge.history.projected(CHATS.name, 0)
    except HistoryUnavailable:
        return False
    return True


async def _count_parked(edge: EdgeState) -> None:
    """As many as were ever parked: the end offsets of the `.dead` topics."""
    partitions = list(range(edge.partitions))
    for topic in all_topics(tuple(edge.models)):
        try:
            bounds = await edge.reader.bounds(replace(topic, name=topic.dead), partitions)
        except SpanFailed:
            return
        edge.metrics.parked.labels(topic.name).set(sum(b.end for b in bounds.values()))
