"""A broker and one admission process, and nothing else: what `turnlog bench admission` drives straight from the log.

The process is the real one with its real settings. For a profile it runs under the sampler of `sampled_process.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from infra.bench.system import DEFAULT_CACHE, BenchError, cpu_seconds, end_process, free_port
from infra.command.policy import sync_policy
from infra.command.topics import apply_topics
from infra.embedded.kafka import (
    BrokerError,
    BrokerPlan,
    prepare_broker,
    wait_until_serving,
)
from infra.log.committed import committed_offsets
from infra.log.span_reader import SpanReader
from infra.models.registry import MODELS
from infra.policies import read_policies
from infra.secrets import load_secrets
from infra.supervisor import tether
from processors.groups import ADMISSION_GROUP
from schemas.events.accounts import LimitsChanged
from schemas.topics import ACCOUNTS, PARTITIONS_DEFAULT

MODEL: Final = next(iter(MODELS))
HEAP_MB: Final = 384
SESSION_MS: Final = 3_000
START_WAIT_S: Final = 60.0
DRAIN_WAIT_S: Final = 30.0
DRAIN_POLL_S: Final = 0.1
SAMPLES_WAIT_S: Final = 10.0
ADMISSION: Final = "processors.admission_app"
SAMPLER: Final = "infra.bench.sampled_process"


def packaged_limits() -> LimitsChanged:
    """The limits of infra/policies.toml."""
    windows = {name: spec.context_window for name, spec in MODELS.items()}
    return read_policies(Path(), models=windows, changed_by="turnlog bench")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A broker with the topics of the registry."""

    home: Path
    kafka: str
    id_key: bytes
    broker: psutil.Process

    async def until_decided(self) -> None:
        """Wait until admission has committed the end of the account log. Raises BenchError."""
        async with SpanReader(bootstrap=self.kafka, client_id="bench") as reader:
            partitions = list(range(PARTITIONS_DEFAULT))
            ends = {n: each.end for n, each in (await reader.bounds(ACCOUNTS, partitions)).items()}
        try:
            async with asyncio.timeout(DRAIN_WAIT_S):
                while True:
                    done = await committed_offsets(
                        self.kafka, ADMISSION_GROUP, ACCOUNTS, partitions
                    )
                    if all(done.get(number, 0) >= end for number, end in ends.items()):
                        return
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            raise BenchError(
                f"admission did not catch up within {DRAIN_WAIT_S:g} s of the load's end"
            ) from None

    async def obey(self, limits: LimitsChanged) -> None:
        """Let these limits hold from here on."""
        await sync_policy(self.kafka, limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The running process. `samples` is where a sampled one writes what it saw."""

    process: Process
    samples: Path

    def cpu_s(self) -> float:
        """CPU time so far."""
        return cpu_seconds(psutil.Process(self.process.pid))

    def sample_afresh(self) -> None:
        """Forget the samples taken so far."""
        self.process.send_signal(signal.SIGUSR1)

    async def sampled(self) -> bytes:
        """What was sampled since. Raises TimeoutError."""
        self.process.send_signal(signal.SIGUSR2)
        async with asyncio.timeout(SAMPLES_WAIT_S):
            while not self.samples.exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(DRAIN_POLL_S)
        return self.samples.read_bytes()


@contextlib.asynccontextmanager
async def bench_stage() -> AsyncIterator[Stage]:
    """Start a broker in a folder of its own, make the topics, and remove it all afterwards."""
    home = Path(tempfile.mkdtemp(prefix="turnlog-bench-"))
    cache = Path(os.environ.get("TURNLOG_CACHE") or DEFAULT_CACHE)
    taken: set[int] = set()
    plan = BrokerPlan(
        data=home / "kafka",
        logs=home / "logs",
        jars=cache / "kafka",
        port=free_port(taken),
        controller_port=free_port(taken),
        heap_mb=HEAP_MB,
    )
    try:
        try:
            command = await asyncio.to_thread(prepare_broker, plan, progress=lambda _: None)
        except BrokerError as error:
            raise BenchError(str(error)) from error
        with (plan.logs / "kafka.out").open("ab") as log:
            broker = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *command.argv,
                stdout=log, stderr=log,
            )  # fmt: skip
        try:
            await wait_until_serving(command.bootstrap, deadline_s=START_WAIT_S)
            await apply_topics(command.bootstrap, models=(MODEL,), partitions=PARTITIONS_DEFAULT)
            yield Stage(
                home=home,
                kafka=command.bootstrap,
                id_key=load_secrets(home).id_key,
                broker=psutil.Process(broker.pid),
            )
        finally:
            await end_process(broker)
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextlib.asynccontextmanager
async def one_admission(stage: Stage, *, sampled: bool = False) -> AsyncIterator[Admission]:
    """Run one admission process; ready on entry, gone afterwards. Raises BenchError."""
    ready = stage.home / "admission.ready"
    ready.unlink(missing_ok=True)
    samples = stage.home / "samples.json"
    log_path = stage.home / "admission.log"
    words = [ADMISSION]
    if sampled:
        words = [SAMPLER, str(samples), ADMISSION]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TURNLOG_")} | {
        "TURNLOG_HOME": str(stage.home),
        "TURNLOG_KAFKA": stage.kafka,
        "TURNLOG_SESSION_MS": str(SESSION_MS),
        "TURNLOG_READY_FILE": str(ready),
    }
    with log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *words, env=environ, stdout=log, stderr=log
        )
    try:
        async with asyncio.timeout(START_WAIT_S):
            while not ready.exists():
                if process.returncode is not None:
                    break
                await asyncio.sleep(DRAIN_POLL_S)
        if process.returncode is not None:
            raise BenchError(f"admission ended: {_last_line(log_path)}")
        yield Admission(process=process, samples=samples)
        if process.returncode is not None:
            raise BenchError(f"admission ended under load: {_last_line(log_path)}")
    finally:
        await end_process(process)


def _last_line(log: Path) -> str:
    lines = log.read_text("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
