"""How long decisions took, read from the log by the broker's own stamps (1 ms resolution, one clock)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from infra.bench.figures import quantile
from infra.log.records import LogRecord
from infra.log.span_reader import Bounds, SpanReader
from schemas.events.accounts import PromptSubmitted
from schemas.events.tokens import RunEnded, RunQueued
from schemas.topics import ACCOUNTS, TOKENS, Topic

DECISION_MS_MAX: Final = 100.0
KEPT_UP_SHARE: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Where the log ended before a step."""

    ends: dict[str, dict[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """One step. `per_s` is what came to the log; `backlog_max` the most prompts that lay there undecided at any moment.

    `behind_ms` is how long after the last prompt the last decision came.
    """

    prompts: int
    admitted: int
    refused: int
    per_s: float
    p50_ms: float
    p99_ms: float
    most_ms: float
    backlog_max: int
    behind_ms: float

    def holds(self, rate: float) -> bool:
        """Whether the rate was offered in truth, and kept up with in time."""
        return self.p99_ms < DECISION_MS_MAX and self.per_s >= KEPT_UP_SHARE * rate


async def mark(reader: SpanReader) -> Mark:
    """Note the ends of what `decisions_since` will read."""
    ends = {}
    for topic in (ACCOUNTS, TOKENS):
        bounds = await reader.bounds(topic, await reader.partitions(topic))
        ends[topic.name] = {number: each.end for number, each in bounds.items()}
    return Mark(ends=ends)


async def decisions_since(reader: SpanReader, since: Mark, runs: Collection[str]) -> Decisions:
    """What became of these runs, all of them decided."""
    wanted = set(runs)
    submitted: dict[str, int] = {}
    decided: dict[str, int] = {}
    admitted = 0
    for topic in (ACCOUNTS, TOKENS):
        for record in await _since(reader, topic, since.ends[topic.name]):
            event = record.event
            match event:
                case PromptSubmitted(run_id=run_id) if run_id in wanted:
                    submitted[run_id] = record.appended_ms
                case RunQueued(run_id=run_id) | RunEnded(run_id=run_id) if run_id in wanted:
                    admitted += isinstance(event, RunQueued)
                    decided.setdefault(run_id, record.appended_ms)
                case _:
                    pass
    assert submitted.keys() == decided.keys() == wanted, "each prompt is on the log, and decided"
    took = [float(decided[run_id] - at) for run_id, at in submitted.items()]
    first, last = min(submitted.values()), max(submitted.values())
    return Decisions(
        prompts=len(took),
        admitted=admitted,
        refused=len(took) - admitted,
        per_s=(len(took) - 1) * 1000 / max(1, last - first),
        p50_ms=quantile(took, 0.50),
        p99_ms=quantile(took, 0.99),
        most_ms=max(took),
        backlog_max=most_at_once(submitted.values(), decided.values()),
        behind_ms=float(max(decided.values()) - last),
    )


def most_at_once(came: Collection[int], went: Collection[int]) -> int:
    """The most that were there at once; what goes in the millisecond in which something comes went before."""
    moves = sorted([(at, 1) for at in came] + [(at, -1) for at in went])
    there = most = 0
    for _, by in moves:
        there += by
        most = max(most, there)
    return most


async def _since(reader: SpanReader, topic: Topic, ends: dict[int, int]) -> list[LogRecord]:
    found: list[LogRecord] = []
    bounds: dict[int, Bounds] = await reader.bounds(topic, list(ends))
    for number, start in ends.items():
        async for batch in reader.span(topic, number, start, bounds[number].end):
            found += [record for record in batch if isinstance(record, LogRecord)]
    return found
