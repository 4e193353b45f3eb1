"""`turnlog bench admission`: how long admission's decisions take as prompts come faster, up to the knee.

One real admission process over the embedded broker, and a writer of its own that appends what an edge and a recorder would. The
decision time is the broker's stamp of RunQueued, or of the refusal, less that of PromptSubmitted. The knee is the highest rate that is
kept up with at p99 below 100 ms. The same again with every prompt on one account key, and then refusals over HTTP at twice what a
whole system can serve (`refusals.py`).
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

import msgspec
import psutil
from rich.console import Console

from infra.bench.admission_stage import (
    MODEL,
    Admission,
    Stage,
    bench_stage,
    one_admission,
    packaged_limits,
)
from infra.bench.decision_times import DECISION_MS_MAX, Decisions, decisions_since, mark
from infra.bench.prompt_load import Account, Load, writer_of
from infra.bench.refusals import bench_refusals
from infra.bench.system import cpu_seconds
from infra.log.span_reader import SpanReader
from processors.decisions.quota import window_at
from producers.log_writer import LogWriter
from schemas.events.account_snapshots import (
    OPEN_RESERVATIONS_MAX,
    SEATS_MAX,
    AccountSnapshot,
    SeatUse,
    WindowUse,
)
from schemas.events.accounts import LimitsChanged, TierLimits
from schemas.topics import ACCOUNT_SNAPSHOTS
from schemas.vocabulary import Tier

RATES: Final = (100, 300, 500, 700, 900, 1_100, 1_400)
HOT_RATES: Final = (100, 300, 500, 700, 900)
WARM_UP_PER_S: Final = 100
WARM_UP_S: Final = 3.0
LIFE_S: Final = 0.8
"""How long a run is open, give or take half. A free account may have one at once; at 1,400 a second its turn comes every 1.4 s."""
ACCOUNTS_USED: Final = 2_000
TIERS_OF_TEN: Final = (*[Tier.FREE] * 6, *[Tier.PLUS] * 3, Tier.TEAM)
HOT_ACCOUNT: Final = "hot"
HOT_OPEN_RUNS: Final = 300
PROFILE_S: Final = 8.0
PROFILE_ROWS: Final = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What is measured. Without rates those above; a given list is gone through to its end only while it is kept up with."""

    seconds: int
    rates: tuple[int, ...] = ()
    spread: bool = True
    hot: bool = True
    refusals: bool = True
    profile: bool = False


async def bench_admission(parts: Parts, console: Console) -> None:
    """Run the benchmark and print its tables. Raises BenchError."""
    console.print(
        f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"load average before the start {os.getloadavg()[0]:.2f}"
    )
    if parts.spread or parts.hot or parts.profile:
        async with bench_stage() as stage:
            await stage.obey(packaged_limits())
            await _leave_hot_row(stage)
            await _on_stage(stage, parts, console)
    if parts.refusals:
        await bench_refusals(parts.seconds, console)


async def _on_stage(stage: Stage, parts: Parts, console: Console) -> None:
    accounts = _many_accounts()
    knee = 0
    async with one_admission(stage) as admission:
        bench = _Bench(stage, admission, parts.seconds, console)
        if parts.spread:
            console.print(f"[bold]{ACCOUNTS_USED} accounts[/bold], runs open for {LIFE_S:g} s:")
            await bench.warm_up(accounts)
            for rate in parts.rates or RATES:
                if not (await bench.step(accounts, rate, LIFE_S)).holds(rate):
                    break
                knee = rate
            _say_knee(console, "one process", knee)
        if parts.hot:
            await stage.obey(_roomy(packaged_limits()))
            hot = (Account(account_id=HOT_ACCOUNT, tier=Tier.TEAM, seats=SEATS_MAX),)
            console.print(
                f"[bold]One account key[/bold], {SEATS_MAX} seats, about {HOT_OPEN_RUNS} runs open:"
            )
            await bench.warm_up(hot)
            best = 0
            for rate in parts.rates or HOT_RATES:
                if not (await bench.step(hot, rate, HOT_OPEN_RUNS / rate)).holds(rate):
                    break
                best = rate
            _say_knee(console, "one account key", best)
    if parts.profile:
        rate = max(1, (knee or (parts.rates or RATES)[0]) // 2)
        async with one_admission(stage, sampled=True) as sampled:
            bench = _Bench(stage, sampled, parts.seconds, console)
            await bench.warm_up(accounts)
            sampled.sample_afresh()
            half = "the knee" if knee else "the first rate"
            console.print(f"[bold]Profile[/bold] at half {half}, {rate} prompts/s:")
            await bench.step(accounts, rate, LIFE_S)
            _print_profile(console, json.loads(await sampled.sampled()))


def _say_knee(console: Console, what: str, knee: int) -> None:
    console.print(
        f"highest rate that {what} holds with p99 < {DECISION_MS_MAX:g} ms: {knee} prompts/s"
    )


class _Bench:
    """Steps of load against one process."""

    def __init__(self, stage: Stage, admission: Admission, seconds: int, console: Console) -> None:
        self._stage = stage
        self._admission = admission
        self._seconds = seconds
        self._console = console
        self._seed = secrets.randbits(32)

    async def warm_up(self, accounts: tuple[Account, ...]) -> None:
        """A short load that counts for nothing."""
        life_s = LIFE_S if len(accounts) > 1 else HOT_OPEN_RUNS / WARM_UP_PER_S
        load = self._load(accounts, WARM_UP_PER_S, life_s)
        seconds = min(WARM_UP_S, self._seconds / 2)
        with writer_of(replace(load, seconds=seconds)) as writer:
            await writer.until("ready")
            writer.begin()
            await writer.until("sent")
            await writer.written()
        await self._stage.until_decided()

    def _load(self, accounts: tuple[Account, ...], rate: int, life_s: float) -> Load:
        self._seed += 1
        return Load(
            kafka=self._stage.kafka,
            id_key=self._stage.id_key,
            model=MODEL,
            accounts=accounts,
            rate=rate,
            seconds=self._seconds,
            life_s=life_s,
            seed=self._seed,
        )

    async def step(self, accounts: tuple[Account, ...], rate: int, life_s: float) -> Decisions:
        """One rate, measured and printed."""
        async with SpanReader(bootstrap=self._stage.kafka, client_id="bench") as reader:
            before = await mark(reader)
            with writer_of(self._load(accounts, rate, life_s)) as writer:
                await writer.until("ready")
                psutil.cpu_percent()
                admission_s, broker_s = self._admission.cpu_s(), cpu_seconds(self._stage.broker)
                since = time.monotonic()
                writer.begin()
                await writer.until("sent")
                took = time.monotonic() - since
                machine = psutil.cpu_percent()
                busy_s = self._admission.cpu_s() - admission_s
                broker_s = cpu_seconds(self._stage.broker) - broker_s
                written = await writer.written()
            await self._stage.until_decided()
            # All that the step's prompts cost, also where they were decided after its end.
            whole_s = self._admission.cpu_s() - admission_s
            found = await decisions_since(reader, before, written.run_ids)
        self._console.print(
            f"{rate:5d} prompts/s  decision ms p50 {found.p50_ms:6.1f}  p99 {found.p99_ms:7.1f}  most {found.most_ms:7.1f}  "
            f"{found.prompts} decided in truth at {found.per_s:.0f}/s, {found.refused} refused, undecided at most {found.backlog_max}, "
            f"last one {found.behind_ms:.0f} ms after\n"
            f"      of a core: admission {busy_s / took:4.0%} ({whole_s * 1000 / found.prompts:.2f} ms a prompt, "
            f"its settlement included), broker {broker_s / took:4.0%}, writer {written.cpu_s / took:4.0%} "
            f"(late by p99 {written.late_ms_p99:.1f} ms); the machine {machine:.0f}% busy"
        )
        return found


def _many_accounts() -> tuple[Account, ...]:
    name = secrets.token_hex(3)
    return tuple(
        Account(account_id=f"bench-{name}-{n}", tier=TIERS_OF_TEN[n % len(TIERS_OF_TEN)])
        for n in range(ACCOUNTS_USED)
    )


def _roomy(limits: LimitsChanged) -> LimitsChanged:
    """Limits under which a large team is bounded by its key alone."""
    team: TierLimits = msgspec.structs.replace(
        limits.tiers[Tier.TEAM],
        tokens_per_window=10**12,
        open_runs_max=OPEN_RESERVATIONS_MAX,
        seats_max=SEATS_MAX,
    )
    return msgspec.structs.replace(
        limits, version=f"{limits.version}-roomy", tiers={**limits.tiers, Tier.TEAM: team}
    )


async def _leave_hot_row(stage: Stage) -> None:
    """The hot account as an earlier process would have left it: every seat has been used in this window."""
    now_ms = int(time.time() * 1000)
    window = window_at(packaged_limits().tiers[Tier.TEAM].window, now_ms).name
    row = AccountSnapshot(
        account_id=HOT_ACCOUNT,
        applied_offset=-1,
        windows=(WindowUse(window=window, settled=SEATS_MAX, reserved=0),),
        seats_window=window,
        seats=tuple(SeatUse(seat=f"seat-{n:05d}", settled=1, reserved=0) for n in range(SEATS_MAX)),
    )
    async with LogWriter(bootstrap=stage.kafka, client_id="bench") as writer:
        await writer.append(ACCOUNT_SNAPSHOTS, row, event_id=secrets.token_hex(16))


def _print_profile(console: Console, found: Mapping[str, Any]) -> None:
    whole_s = sum(used_s for _, used_s in found["threads"]) or 1.0

    def table(title: str, rows: Iterable[tuple[str, float]]) -> None:
        console.print(f"  {title}")
        for name, used_s in islice(rows, PROFILE_ROWS):
            console.print(f"    {used_s / whole_s:6.1%}  {name}", markup=False, highlight=False)

    console.print(f"  {whole_s:.1f} s of CPU time in {found['charges']} samples")
    table("by thread", found["threads"])
    table("own time, by package", found["own_modules"])
    table("own time, by function", found["own"])
    table("with what it calls, by function", _telling(found["within"]))
    table("with what it calls, by module", _telling(found["modules"]))


def _telling(rows: Iterable[tuple[str, float]]) -> Iterator[tuple[str, float]]:
    """Without what only runs the others."""
    outer = ("asyncio", "runpy", "threading", "concurrent", "__main__", "mode", "infra.bench")
    return ((name, used_s) for name, used_s in rows if name.partition(".")[0] not in outer)
