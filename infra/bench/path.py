"""`turnlog bench path`: what Turnlog adds to the time to first token, with an engine that costs nothing.

Prompts arrive at a fixed rate whatever the system does (an open loop), each in a chat of its own. The time from sending the POST to
receiving the first delta is measured at the client; where it goes is read from the append times on the log (1 ms resolution, one
host, so one clock).
"""

from __future__ import annotations

import asyncio
import json
import platform
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from rich.console import Console

from infra.bench.event_stream import BadAnswerError, get_json, request
from infra.bench.figures import p50_p99
from infra.bench.system import BenchSystem, bench_system, cpu_seconds
from infra.log.records import LogRecord
from infra.log.span_reader import SpanReader
from infra.models.registry import MODELS
from schemas.events.accounts import PromptSubmitted
from schemas.events.admissions import PromptAdmitted
from schemas.events.generations import GenerationRequested
from schemas.events.tokens import AttemptStarted, RunQueued, TokensGenerated
from schemas.topics import ACCOUNTS, ADMISSIONS, TOKENS, Topic, generations
from schemas.vocabulary import Lane

RATES: Final = (5, 20, 50)
ACCOUNTS_USED: Final = 20
SETUP_AT_ONCE: Final = 8
WARM_UP: Final = 20
HOPS: Final = (
    ("POST sent -> PromptSubmitted", "post", "PromptSubmitted"),
    ("-> RunQueued (admission)", "PromptSubmitted", "RunQueued"),
    ("-> PromptAdmitted (admission)", "PromptSubmitted", "PromptAdmitted"),
    ("-> GenerationRequested (context)", "PromptAdmitted", "GenerationRequested"),
    ("-> AttemptStarted (worker)", "GenerationRequested", "AttemptStarted"),
    ("-> first TokensGenerated", "AttemptStarted", "TokensGenerated"),
    ("-> first delta at the client", "TokensGenerated", "delta"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What one prompt measured, in seconds of `time.time()`."""

    run_id: str
    sent_s: float
    first_delta_s: float
    ended_s: float


async def bench_path(seconds: int, console: Console) -> None:
    """Run the benchmark and print its tables."""
    overrides = {"TURNLOG_SCRIPTED_DELAY_MS": "0", "TURNLOG_SCRIPTED_TOKENS": "32"}
    console.print("Starting a system with the scripted engine at zero delay…")
    async with bench_system(overrides) as system:
        await _run_rate(system, rate=10, count=WARM_UP)
        for rate in RATES:
            console.print(f"{rate}/s for {seconds} s…")
            before = _cpu(system)
            prompts, failed = await _run_rate(system, rate=rate, count=rate * seconds)
            cpu = {name: used - before.get(name, 0.0) for name, used in _cpu(system).items()}
            hops = await _hops(system, prompts)
            _report(console, rate, prompts, failed, hops)
            parts = ", ".join(f"{name} {s * 1000 / len(prompts):.1f}" for name, s in cpu.items())
            console.print(f"    CPU ms a prompt (chats and idling included): {parts}")
    console.print(f"Python {platform.python_version()}, {platform.machine()}")


def _cpu(system: BenchSystem) -> dict[str, float]:
    return {name: cpu_seconds(process) for name, process in system.processes().items()}


async def _run_rate(
    system: BenchSystem, *, rate: int, count: int
) -> tuple[list[Prompt], list[str]]:
    tokens = [system.token(f"bench-{k}") for k in range(ACCOUNTS_USED)]
    gate = asyncio.Semaphore(SETUP_AT_ONCE)

    async def make_chat(k: int) -> str:
        async with gate:
            chat = await get_json(
                "127.0.0.1",
                system.ports[0],
                "POST",
                "/v1/chats",
                token=tokens[k % ACCOUNTS_USED],
                body=b"{}",
            )
            return str(chat["id"])

    chats = await asyncio.gather(*(make_chat(k) for k in range(count)))
    start = time.monotonic() + 0.2

    async def one(k: int) -> Prompt | str:
        await asyncio.sleep(start + k / rate - time.monotonic())
        try:
            return await _prompt(system, tokens[k % ACCOUNTS_USED], chats[k])
        except (BadAnswerError, TimeoutError, OSError) as error:
            return f"{type(error).__name__}: {error}"

    results = await asyncio.gather(*(one(k) for k in range(count)))
    done = [result for result in results if isinstance(result, Prompt)]
    return done, [result for result in results if isinstance(result, str)]


async def _prompt(system: BenchSystem, token: str, chat_id: str) -> Prompt:
    body = json.dumps({"content": "Why is the sky blue?"}).encode()
    sent_s = time.time()
    answer = await request(
        "127.0.0.1",
        system.ports[0],
        "POST",
        f"/v1/chats/{chat_id}/messages",
        token=token,
        body=body,
    )
    first = 0.0
    if answer.status != 200:
        raise BadAnswerError(f"HTTP {answer.status}")
    async for frame in answer.frames:
        if frame.name == "message.delta" and not first:
            first = frame.at_s
        if frame.name == "run.ended":
            run_id = answer.headers["turnlog-run-id"]
            return Prompt(run_id=run_id, sent_s=sent_s, first_delta_s=first, ended_s=frame.at_s)
    raise BadAnswerError("the stream ended without run.ended")


async def _hops(system: BenchSystem, prompts: list[Prompt]) -> dict[str, list[float]]:
    """Milliseconds by hop, over all prompts."""
    wanted = {prompt.run_id for prompt in prompts}
    times: dict[str, dict[str, float]] = defaultdict(dict)
    queues = tuple(generations(next(iter(MODELS)), lane) for lane in Lane)
    kinds = (
        PromptSubmitted, RunQueued, PromptAdmitted, GenerationRequested, AttemptStarted, TokensGenerated,
    )  # fmt: skip
    async with SpanReader(bootstrap=system.kafka, client_id="bench") as reader:
        for topic in (ACCOUNTS, ADMISSIONS, TOKENS, *queues):
            async for record in _all(reader, topic):
                event = record.event
                if isinstance(event, kinds) and event.run_id in wanted:
                    times[event.run_id].setdefault(type(event).__name__, record.appended_ms)
    for prompt in prompts:
        times[prompt.run_id]["post"] = prompt.sent_s * 1000
        times[prompt.run_id]["delta"] = prompt.first_delta_s * 1000
    return {
        name: [at[end] - at[begin] for at in times.values() if begin in at and end in at]
        for name, begin, end in HOPS
    }


async def _all(reader: SpanReader, topic: Topic) -> AsyncIterator[LogRecord]:
    partitions = await reader.partitions(topic)
    for partition, bounds in (await reader.bounds(topic, partitions)).items():
        async for batch in reader.span(topic, partition, bounds.first, bounds.end):
            for record in batch:
                if isinstance(record, LogRecord):
                    yield record


def _report(
    console: Console,
    rate: int,
    prompts: list[Prompt],
    failed: list[str],
    hops: dict[str, list[float]],
) -> None:
    added = [(prompt.first_delta_s - prompt.sent_s) * 1000 for prompt in prompts]
    console.print(
        f"[bold]{rate:3d} prompts/s[/bold]  {len(prompts)} answered, {len(failed)} failed  "
        f"added time to first token (ms)  {p50_p99(added)}"
    )
    for name, values in hops.items():
        console.print(f"    {name:36s} {p50_p99(values)}")
    for line in failed[:3]:
        console.print(f"    failed: {line}")
