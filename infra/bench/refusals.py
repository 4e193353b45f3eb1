"""Refusals at twice what a system can serve: how soon they come over HTTP, whether queues stay within their bound, who is served.

The scripted engine answers at a fixed pace, so capacity is known: slots over the time of one answer. Prompts come in an open loop at
twice that rate, each in a chat of its own, from a process of its own. The policy bounds one lane's queue at about a second's work, and
nothing else refuses.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from infra.bench.admission_stage import packaged_limits
from infra.bench.decision_times import most_at_once
from infra.bench.event_stream import BadAnswerError, get_json, request
from infra.bench.figures import p50_p99, quantile
from infra.bench.load_process import SAY_WAIT_S, load_process
from infra.bench.system import BenchSystem, bench_system
from infra.log.records import LogRecord
from infra.log.span_reader import SpanReader
from infra.policies import policy_text
from schemas.events.account_snapshots import OPEN_RESERVATIONS_MAX
from schemas.events.accounts import LimitsChanged
from schemas.events.tokens import AttemptStarted, RunEnded, RunQueued
from schemas.topics import TOKENS
from schemas.vocabulary import LANE_OF_TIER, Tier

SLOTS: Final = 16
TOKENS_AN_ANSWER: Final = 50
TOKEN_DELAY_MS: Final = 20
CAPACITY_PER_S: Final = SLOTS * 1000 / (TOKENS_AN_ANSWER * TOKEN_DELAY_MS)
QUEUED_MAX: Final = 16
TIER: Final = Tier.PLUS
ACCOUNTS_USED: Final = 20
SETUP_AT_ONCE: Final = 8
FILL_S: Final = 4.0
"""So long the load runs before it counts: by then the queue is full."""
REFUSED: Final = 503
SERVED: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class _Posts:
    """What the client process does."""

    port: int
    tokens: tuple[str, ...]
    chats: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answered:
    """One prompt: its status, ms until the status line, whether Retry-After was there, and whether an answer came to its end."""

    at_s: float
    status: int
    took_ms: float
    retry_after: bool
    ended: bool


async def bench_refusals(seconds: int, console: Console) -> None:
    """Measure and print. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="turnlog-bench-") as folder:
        policy = Path(folder) / "policies.toml"
        policy.write_text(policy_text(_bounded(packaged_limits())), "utf-8")
        overrides = {
            "TURNLOG_POLICIES": str(policy),
            "TURNLOG_SCRIPTED_SLOTS": str(SLOTS),
            "TURNLOG_SCRIPTED_TOKENS": str(TOKENS_AN_ANSWER),
            "TURNLOG_SCRIPTED_DELAY_MS": str(TOKEN_DELAY_MS),
        }
        async with bench_system(overrides) as system:
            await _measure(system, seconds, console)


def _bounded(limits: LimitsChanged) -> LimitsChanged:
    """Nothing but a lane's full queue refuses."""
    tier = msgspec.structs.replace(
        limits.tiers[TIER],
        tokens_per_window=10**12,
        open_runs_max=OPEN_RESERVATIONS_MAX,
        requests_per_minute=None,
        requests_burst=None,
        tokens_per_minute=None,
        tokens_burst=None,
    )
    lane = msgspec.structs.replace(limits.lanes[LANE_OF_TIER[TIER]], queued_requests_max=QUEUED_MAX)
    return msgspec.structs.replace(
        limits,
        tiers={**limits.tiers, TIER: tier},
        lanes={**limits.lanes, LANE_OF_TIER[TIER]: lane},
    )


async def _measure(system: BenchSystem, seconds: int, console: Console) -> None:
    rate = 2 * CAPACITY_PER_S
    console.print(
        f"[bold]Refusals[/bold], a whole system that can answer {CAPACITY_PER_S:g} prompts/s, {rate:g}/s offered over HTTP, "
        f"at most {QUEUED_MAX} queued:"
    )
    tokens = tuple(system.token(f"bench-{n}", TIER) for n in range(ACCOUNTS_USED))
    chats = await _make_chats(system, tokens, round(rate * (FILL_S + seconds)))
    posts = _Posts(port=system.ports[0], tokens=tokens, chats=chats, seconds=FILL_S + seconds)
    answered = [each for each in await _post_all(posts) if each.at_s >= FILL_S]
    refused = [each.took_ms for each in answered if each.status == REFUSED]
    served = [each for each in answered if each.status == SERVED]
    statuses = Counter(each.status for each in answered)
    without = sum(1 for each in answered if each.status == REFUSED and not each.retry_after)
    queued, waits = await _queue_on_log(system)
    console.print(f"  POST sent -> status line of a refusal, ms  {p50_p99(refused)}")
    console.print(
        f"  POST sent -> status line of an answer, ms   {p50_p99([each.took_ms for each in served])}"
    )
    told = ", ".join(f"{count} x {status or 'no answer'}" for status, count in statuses.items())
    console.print(
        f"  {len(answered)} prompts: {told}; {without} refusals without Retry-After; "
        f"{len(served) / seconds:.1f} answers/s, {sum(each.ended for each in served)} of {len(served)} to their end"
    )
    console.print(
        f"  queued at most {queued} (between RunQueued and AttemptStarted); "
        f"waited s  p50 {quantile(waits, 0.5) / 1000:.2f}  p99 {quantile(waits, 0.99) / 1000:.2f}"
    )


async def _make_chats(system: BenchSystem, tokens: tuple[str, ...], count: int) -> tuple[str, ...]:
    gate = asyncio.Semaphore(SETUP_AT_ONCE)

    async def one(number: int) -> str:
        async with gate:
            token = tokens[number % len(tokens)]
            chat = await get_json(
                "127.0.0.1", system.ports[0], "POST", "/v1/chats", token=token, body=b"{}"
            )
            return str(chat["id"])

    return tuple(await asyncio.gather(*(one(number) for number in range(count))))


async def _post_all(posts: _Posts) -> list[_Answered]:
    with load_process("the process of the clients", _client_process, posts) as clients:
        answered = await clients.said(wait_s=SAY_WAIT_S + posts.seconds)
    assert isinstance(answered, list), answered
    return answered


def _client_process(pipe: Connection, posts: _Posts) -> None:
    pipe.send(asyncio.run(_clients(posts)))


async def _clients(posts: _Posts) -> list[_Answered]:
    draw = random.Random(secrets.randbits(32))
    begin = time.monotonic() + 0.2

    async def one(number: int, chat_id: str, at_s: float) -> _Answered:
        await asyncio.sleep(begin + at_s - time.monotonic())
        body = json.dumps({"content": f"Why is the sky blue? {number}"}).encode()
        token = posts.tokens[number % len(posts.tokens)]
        sent = time.monotonic()
        status, retry_after, ended, took_s = 0, False, False, 0.0
        try:
            answer = await request(
                "127.0.0.1",
                posts.port,
                "POST",
                f"/v1/chats/{chat_id}/messages",
                token=token,
                body=body,
            )
            status, took_s = answer.status, time.monotonic() - sent
            retry_after = "retry-after" in answer.headers
            if status == SERVED:
                async for frame in answer.frames:
                    ended = frame.name == "run.ended"
        except (BadAnswerError, TimeoutError, OSError, asyncio.IncompleteReadError):
            pass  # No answer: status 0 says so.
        return _Answered(
            at_s=at_s, status=status, took_ms=took_s * 1000, retry_after=retry_after, ended=ended
        )

    times = sorted(draw.uniform(0, posts.seconds) for _ in posts.chats)
    return await asyncio.gather(
        *(
            one(number, chat_id, at_s)
            for number, (chat_id, at_s) in enumerate(zip(posts.chats, times, strict=True))
        )
    )


async def _queue_on_log(system: BenchSystem) -> tuple[int, list[float]]:
    """The most runs that waited for a slot at once, and how long each waited (ms), by the stamps of the log."""
    queued: dict[str, int] = {}
    left: dict[str, int] = {}
    async with SpanReader(bootstrap=system.kafka, client_id="bench") as reader:
        bounds = await reader.bounds(TOKENS, await reader.partitions(TOKENS))
        for number, each in bounds.items():
            async for batch in reader.span(TOKENS, number, each.first, each.end):
                for record in batch:
                    event = record.event if isinstance(record, LogRecord) else None
                    match event:
                        case RunQueued(run_id=run_id):
                            queued[run_id] = record.appended_ms
                        case AttemptStarted(run_id=run_id) | RunEnded(run_id=run_id):
                            left.setdefault(run_id, record.appended_ms)
                        case _:
                            pass
    waits = [float(left[run_id] - at) for run_id, at in queued.items() if run_id in left]
    return most_at_once(queued.values(), [left[run] for run in queued if run in left]), waits
