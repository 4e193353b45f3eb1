"""Prompts as an edge would append them, at a fixed mean rate whatever admission does (an open loop), from a process of its own.

Arrivals are random, a fixed number at independent moments of the step. Each run "lives" for a while; then its UsageMeasured follows, as
the recorder would write it, and the account's later prompts name it among the ended runs. Since usage lies behind its prompt in the same
partition, it needs no look at the decision: what was refused has no open run, and its usage settles nothing.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

import psutil

from edge.runs import RECENT_ENDS_MAX
from infra.bench.figures import quantile
from infra.bench.load_process import LoadProcess, load_process
from infra.log.epoch import topic_epoch
from infra.log.span_reader import SpanReader
from producers.log_writer import Appended, LogWriter, acknowledged
from schemas.events.accounts import LaneWait, LoadView, PromptSubmitted, UsageMeasured
from schemas.ids import (
    RANDOM_BYTES,
    RunAddress,
    derived_event_id,
    mint_chat_id,
    mint_message_id,
    mint_run_id,
)
from schemas.topics import ACCOUNTS, TOKENS
from schemas.vocabulary import FinishReason, Lane, Tier

TICK_S: Final = 0.002
PROMPT_TOKENS: Final = (20, 400)
CONTENT: Final = (
    "Please explain in a few sentences why the sky looks blue at noon and red at dusk. "
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Who sends. With several seats each prompt is another seat's, in that seat's own chat."""

    account_id: str
    tier: Tier
    seats: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one step offers. Accounts take turns; a run lives `life_s` seconds, give or take half of it."""

    kafka: str
    id_key: bytes
    model: str
    accounts: tuple[Account, ...]
    rate: float
    seconds: float
    life_s: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What the writer says at the end. `late_ms_p99`: how late it was itself. `cpu_s`: its CPU time while it wrote prompts."""

    run_ids: tuple[str, ...]
    late_ms_p99: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class _Due:
    """An event and when to send it, in seconds from the begin."""

    at_s: float
    event: PromptSubmitted | UsageMeasured


class Writer:
    """The writer process, from the parent's side."""

    def __init__(self, process: LoadProcess) -> None:
        self._process = process

    async def until(self, word: str) -> None:
        """Wait until it has come so far: "ready", or "sent" after the last prompt."""
        await self._process.until(word)

    def begin(self) -> None:
        """Let it write."""
        self._process.tell("begin")

    async def written(self) -> Written:
        """What it wrote, once everything is acknowledged, the last usage too."""
        said = await self._process.said()
        assert isinstance(said, Written), said
        return said


@contextmanager
def writer_of(load: Load) -> Iterator[Writer]:
    """Start the writer; it is gone afterwards."""
    with load_process("the writer of the load", _process, load) as process:
        yield Writer(process)


def _process(pipe: Connection, load: Load) -> None:
    asyncio.run(_write(pipe, load))


async def _write(pipe: Connection, load: Load) -> None:
    async with SpanReader(bootstrap=load.kafka, client_id="bench-load") as reader:
        partitions = await reader.partitions(TOKENS)
        ends = [bounds.end for bounds in (await reader.bounds(TOKENS, partitions)).values()]
    schedule = _Schedule(load, epoch=await topic_epoch(load.kafka), ends=ends)
    due = sorted(schedule.events(), key=lambda each: each.at_s)
    last_prompt = max(n for n, each in enumerate(due) if isinstance(each.event, PromptSubmitted))
    async with LogWriter(bootstrap=load.kafka, client_id="bench-load") as writer:
        await writer.partitions_of(ACCOUNTS)
        pipe.send("ready")
        await asyncio.to_thread(pipe.recv)
        me = psutil.Process()
        before = me.cpu_times()
        begin = time.monotonic()
        late: list[float] = []
        cpu_s = 0.0
        waiting: deque[asyncio.Future[Appended]] = deque()
        for number, each in enumerate(due):
            now = time.monotonic() - begin
            if each.at_s > now:
                await asyncio.sleep(max(TICK_S, each.at_s - now))
                now = time.monotonic() - begin
            late.append((now - each.at_s) * 1000)
            kind = type(each.event).__name__
            event_id = derived_event_id(each.event.run_id, kind)
            waiting.append(await writer.send(ACCOUNTS, each.event, event_id=event_id))
            while waiting and waiting[0].done():
                await waiting.popleft()  # A failed append ends the load.
            if number == last_prompt:
                used = me.cpu_times()
                cpu_s = used.user + used.system - before.user - before.system
                pipe.send("sent")
        for future in waiting:
            await acknowledged(future)
    pipe.send(
        Written(run_ids=tuple(schedule.run_ids), late_ms_p99=quantile(late, 0.99), cpu_s=cpu_s)
    )


class _Schedule:
    """Every event of a step, made before it begins."""

    def __init__(self, load: Load, *, epoch: int, ends: Sequence[int]) -> None:
        self._load = load
        self._epoch = epoch
        self._ends = ends
        self._random = random.Random(load.seed)
        self._ending: dict[str, deque[tuple[float, str]]] = {}
        self._ended: dict[str, deque[str]] = {}
        self.run_ids: list[str] = []

    def events(self) -> Iterator[_Due]:
        """In no order."""
        load = self._load
        count = round(load.rate * load.seconds)
        times = sorted(self._random.uniform(0, load.seconds) for _ in range(count))
        for number, at_s in enumerate(times):
            account = load.accounts[number % len(load.accounts)]
            prompt = self._prompt(account, number // len(load.accounts), at_s)
            yield _Due(at_s, prompt)
            ends_s = at_s + load.life_s * self._random.uniform(0.5, 1.5)
            self._ending.setdefault(account.account_id, deque()).append((ends_s, prompt.run_id))
            self.run_ids.append(prompt.run_id)
            usage = UsageMeasured(
                run_id=prompt.run_id,
                account_id=account.account_id,
                input_tokens=prompt.prompt_tokens[load.model],
                output_tokens=1,
                finish_reason=FinishReason.STOP,
            )
            yield _Due(ends_s, usage)

    def _prompt(self, account: Account, turn: int, at_s: float) -> PromptSubmitted:
        load, draw = self._load, self._random
        partition = draw.randrange(len(self._ends))
        address = RunAddress(
            epoch=self._epoch, partition=partition, mint_offset=self._ends[partition]
        )
        key, account_id = load.id_key, account.account_id
        asked, answer = (
            mint_message_id(key=key, account_id=account_id, random=draw.randbytes(RANDOM_BYTES))
            for _ in range(2)
        )
        return PromptSubmitted(
            run_id=mint_run_id(
                key=key,
                account_id=account_id,
                address=address,
                random=draw.randbytes(RANDOM_BYTES),
            ),
            account_id=account_id,
            tier=account.tier,
            seat_id=f"seat-{turn % account.seats:05d}" if account.seats else None,
            chat_id=mint_chat_id(
                key=key, account_id=account_id, random=draw.randbytes(RANDOM_BYTES)
            ),
            user_message_id=asked,
            assistant_message_id=answer,
            parent_id=None,
            content=CONTENT * draw.randint(1, 5),
            model=None,
            prompt_tokens={load.model: draw.randint(*PROMPT_TOKENS)},
            load=_calm(load.model),
            ended_runs=self._ended_at(account_id, at_s),
        )

    def _ended_at(self, account_id: str, at_s: float) -> tuple[str, ...]:
        """The runs of the account that an edge has seen end, the newest of them."""
        ending = self._ending.get(account_id, deque())
        ended = self._ended.setdefault(account_id, deque(maxlen=RECENT_ENDS_MAX))
        while ending and ending[0][0] <= at_s:
            ended.append(ending.popleft()[1])
        return tuple(ended)


def _calm(model: str) -> LoadView:
    """What an edge says of workers that keep up: each lane, nothing that sheds."""
    waits = tuple(
        LaneWait(model=model, lane=lane.value, wait_ms=120, queued_requests=3, queued_tokens=900)
        for lane in Lane
    )
    return LoadView(waits=waits, saturation_ms=800)
