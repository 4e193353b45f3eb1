"""`turnlog bench deltas`: how late a token reaches its client while the number of open streams grows.

A writer process appends token records for N runs at 20 a second each; N clients in a third process follow them through one edge.
Lateness is counted from just before the append (the text of each delta carries the writer's clock), so it is an upper bound of the
time from append to client. CPU per write is the edge's own CPU time over the frames that its clients received.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

from rich.console import Console

from infra.bench.event_stream import request
from infra.bench.figures import quantile
from infra.bench.load_process import load_process
from infra.bench.system import BenchSystem, bench_system, cpu_seconds
from infra.log.epoch import topic_epoch
from infra.log.span_reader import SpanReader
from infra.models.registry import MODELS
from infra.secrets import load_secrets
from producers.log_writer import LogWriter
from schemas.events import Event
from schemas.events.chats import ChatCreated
from schemas.events.tokens import AttemptStarted, RunEnded, RunQueued, TokensGenerated
from schemas.ids import RunAddress, mint_chat_id, mint_message_id, mint_run_id
from schemas.topics import CHATS, TOKENS
from schemas.vocabulary import EndCause, EndWriter, Lane, Tier

EVENTS_PER_S: Final = 20
FIRST_STEPS: Final = (100, 300)
STREAMS_MAX: Final = 4_000
GROWTH: Final = 1.25
LATENESS_MS_MAX: Final = 50.0
ACCOUNT: Final = "bench"
OPEN_AT_ONCE: Final = 50
WARM_UP_S: Final = 2.0
STAMP_CHARS: Final = 17  # seconds of the epoch with six decimals
WARM_UP_STAMP: Final = "0" * STAMP_CHARS


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """One run that the writer feeds and a client follows."""

    run_id: str
    chat_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Followed:
    """What the process of the clients does."""

    port: int
    token: str
    runs: list[BenchRun]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writes:
    """What the process of the writer does."""

    kafka: str
    runs: list[BenchRun]
    seconds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one number of streams measured."""

    streams: int
    p50_ms: float
    p99_ms: float
    cpu_us_a_write: float
    edge_cpu_share: float
    received: int
    expected: int

    @property
    def holds(self) -> bool:
        """Whether the edge kept up: in time, and without losing a frame to a dropped viewer."""
        return self.p99_ms < LATENESS_MS_MAX and self.received >= 0.99 * self.expected


async def bench_deltas(seconds: int, console: Console) -> None:
    """Run the benchmark and print a line for each number of streams, up to the first that does not hold."""
    console.print("Starting a system…")
    async with bench_system({"TURNLOG_WORKERS": "0"}) as system:
        highest = 0
        steps = list(FIRST_STEPS)
        while steps:
            streams = steps.pop(0)
            step = await _step(system, streams, seconds)
            console.print(
                f"{step.streams:5d} streams  lateness ms p50 {step.p50_ms:6.1f} p99 {step.p99_ms:7.1f}  "
                f"{step.cpu_us_a_write:5.1f} us CPU a write  edge {step.edge_cpu_share:4.0%} of a core  "
                f"{step.received} of {step.expected} frames"
            )
            if step.holds:
                highest = streams
                if not steps and streams < STREAMS_MAX:
                    steps.append(int(streams * GROWTH))
        console.print(
            f"highest that holds p99 < {LATENESS_MS_MAX:g} ms: {highest} streams of {EVENTS_PER_S}/s"
        )


async def _step(system: BenchSystem, streams: int, seconds: int) -> Step:
    runs = await _open_runs(system, streams)
    followed = _Followed(port=system.ports[0], token=system.token(ACCOUNT), runs=runs)
    written = _Writes(kafka=system.kafka, runs=runs, seconds=seconds)
    with load_process("the process of the clients", _client_process, followed) as clients:
        await clients.until("open")
        with load_process("the process of the writer", _writer_process, written) as writer:
            await writer.until("warm")
            edge = system.processes()["edge-0"]
            cpu, since = cpu_seconds(edge), time.monotonic()
            await writer.until("done")
            cpu, took = cpu_seconds(edge) - cpu, time.monotonic() - since
            lateness = await clients.said()
    assert isinstance(lateness, list), lateness
    measured = [late for late in lateness if late >= 0]
    return Step(
        streams=streams,
        p50_ms=quantile(measured, 0.50),
        p99_ms=quantile(measured, 0.99),
        cpu_us_a_write=cpu * 1e6 / max(len(measured), 1),
        edge_cpu_share=cpu / took,
        received=len(measured),
        expected=streams * EVENTS_PER_S * seconds,
    )


async def _open_runs(system: BenchSystem, streams: int) -> list[BenchRun]:
    """Queue and start `streams` runs on the log, as admission and a worker would."""
    key = load_secrets(system.home).id_key
    model = next(iter(MODELS))
    runs = []
    async with (
        LogWriter(bootstrap=system.kafka, client_id="bench") as writer,
        SpanReader(bootstrap=system.kafka, client_id="bench") as reader,
    ):
        partitions = await reader.partitions(TOKENS)
        bounds = await reader.bounds(TOKENS, partitions)
        epoch = await topic_epoch(system.kafka)
        last = None
        for k in range(streams):
            partition = partitions[k % len(partitions)]
            address = RunAddress(
                epoch=epoch, partition=partition, mint_offset=bounds[partition].end
            )
            run_id = mint_run_id(
                key=key, account_id=ACCOUNT, address=address, random=secrets.token_bytes(10)
            )
            chat_id, asked, answer = (
                mint(key=key, account_id=ACCOUNT, random=secrets.token_bytes(10))
                for mint in (mint_chat_id, mint_message_id, mint_message_id)
            )
            queued = RunQueued(
                run_id=run_id,
                account_id=ACCOUNT,
                chat_id=chat_id,
                user_message_id=asked,
                assistant_message_id=answer,
                parent_id=None,
                tier=Tier.TEAM,
                lane=Lane.TEAM,
                model=model,
                input_budget_tokens=100,
                granted_output_tokens=1_000_000,
                deadline_ms=3_600_000,
            )
            started = AttemptStarted(
                run_id=run_id, attempt=1, nonce="bench", worker_id="bench", input_tokens=10
            )
            created = ChatCreated(chat_id=chat_id, account_id=ACCOUNT)
            await writer.send(CHATS, created, event_id=secrets.token_hex(16))
            for event in (queued, started):
                last = await writer.send(TOKENS, event, event_id=secrets.token_hex(16))
            runs.append(BenchRun(run_id=run_id, chat_id=chat_id))
        assert last is not None
        await last
    return runs


def _writer_process(pipe: Connection, asked: _Writes) -> None:
    asyncio.run(_write(pipe, asked.kafka, asked.runs, asked.seconds))


async def _write(pipe: Connection, kafka: str, runs: list[BenchRun], seconds: int) -> None:
    """Every run gets EVENTS_PER_S records a second; the runs are spread evenly over each period."""
    period = 1 / EVENTS_PER_S
    index = dict.fromkeys((run.run_id for run in runs), 0)
    slices = min(50, len(runs))
    async with LogWriter(bootstrap=kafka, client_id="bench-writer") as writer:
        begin = time.monotonic()
        warm_rounds = int(WARM_UP_S * EVENTS_PER_S)
        last = None
        for round_number in range(warm_rounds + seconds * EVENTS_PER_S):
            if round_number == warm_rounds:
                pipe.send("warm")
            for part in range(slices):
                at = begin + (round_number + part / slices) * period
                await asyncio.sleep(max(0.0, at - time.monotonic()))
                for run in runs[part::slices]:
                    stamp = f"{time.time():.6f}" if round_number >= warm_rounds else WARM_UP_STAMP
                    event: Event = TokensGenerated(
                        run_id=run.run_id,
                        nonce="bench",
                        index=index[run.run_id],
                        count=1,
                        text=stamp,
                    )
                    index[run.run_id] += 1
                    last = await writer.send(TOKENS, event, event_id="bench")
        pipe.send("done")
        for run in runs:
            ended = RunEnded(
                run_id=run.run_id,
                cause=EndCause.STOP,
                writer=EndWriter.WORKER,
                nonce="bench",
                end=index[run.run_id],
            )
            last = await writer.send(TOKENS, ended, event_id="bench")
        assert last is not None
        await last


def _client_process(pipe: Connection, asked: _Followed) -> None:
    asyncio.run(_clients(pipe, asked.port, asked.token, asked.runs))


async def _clients(pipe: Connection, port: int, token: str, runs: list[BenchRun]) -> None:
    """Follow every run; say "open" once all streams are, then give the lateness of each frame in ms."""
    lateness: list[float] = []
    gate = asyncio.Semaphore(OPEN_AT_ONCE)
    opened = asyncio.Barrier(len(runs) + 1)

    async def follow(run: BenchRun) -> None:
        async with gate:
            path = f"/v1/chats/{run.chat_id}/runs/{run.run_id}/events"
            answer = await request("127.0.0.1", port, "GET", path, token=token)
            assert answer.status == 200, answer.status
        await opened.wait()
        async for frame in answer.frames:
            if frame.name != "message.delta":
                continue
            text = json.loads(frame.data)["text"]
            # Coalesced frames hold several stamps; each is a token that came this late.
            stamps = (text[at : at + STAMP_CHARS] for at in range(0, len(text), STAMP_CHARS))
            lateness.extend(
                (frame.at_s - float(stamp)) * 1000 for stamp in stamps if stamp != WARM_UP_STAMP
            )

    async with asyncio.TaskGroup() as tasks:
        for run in runs:
            tasks.create_task(follow(run))
        await opened.wait()
        pipe.send("open")
    pipe.send(lateness)
