"""A whole Turnlog of its own for one benchmark: an empty home, free ports, the scripted engine, and the same processes as in production."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

import psutil

from edge.auth import mint_token
from infra.secrets import load_secrets
from infra.supervisor.home import read_state
from schemas.vocabulary import Tier

READY_WAIT_S: Final = 90.0
STOP_WAIT_S: Final = 15.0
TOKEN_TTL: Final = timedelta(hours=6)
# Jars that `turnlog up` already fetched here are not fetched again.
DEFAULT_CACHE: Final = Path(".turnlog/cache").absolute()
PORT_FIRST: Final = 12_000
PORT_LAST: Final = 19_000
"""Below the ports of systems that tests start beside a benchmark, and stop and start again."""
PORT_TRIES_MAX: Final = 100


class BenchError(Exception):
    """The benchmark could not run. The message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSystem:
    """A running system."""

    home: Path
    kafka: str
    ports: tuple[int, ...]

    def token(self, account: str, tier: Tier = Tier.TEAM) -> str:
        """A token for `account`."""
        return mint_token(
            key=load_secrets(self.home).token_key, account_id=account, tier=tier, ttl=TOKEN_TTL
        )

    def processes(self) -> dict[str, psutil.Process]:
        """The processes by part."""
        state = read_state(self.home)
        assert state is not None, "the system runs"
        return {part.name: psutil.Process(part.pid) for part in state.parts}


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time that the process used so far, user and system, its threads included."""
    times = process.cpu_times()
    return float(times.user + times.system)


def free_port(taken: set[int]) -> int:
    """A free loopback port below the ephemeral range, where a restart could lose it to an outgoing connection."""
    for port in random.sample(range(PORT_FIRST, PORT_LAST), PORT_TRIES_MAX):
        if port in taken:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        taken.add(port)
        return port
    raise BenchError("no free port")


@contextlib.asynccontextmanager
async def bench_system(overrides: Mapping[str, str]) -> AsyncIterator[BenchSystem]:
    """Start a system under `overrides`, and stop and remove it afterwards."""
    home = Path(tempfile.mkdtemp(prefix="turnlog-bench-"))
    cache = os.environ.get("TURNLOG_CACHE") or str(DEFAULT_CACHE)
    taken: set[int] = set()
    edges = int(overrides.get("TURNLOG_EDGES", "1"))
    ports = tuple(free_port(taken) for _ in range(edges))
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TURNLOG_")} | {
        "TURNLOG_HOME": str(home),
        "TURNLOG_CACHE": cache,
        "TURNLOG_KAFKA_PORT": str(free_port(taken)),
        "TURNLOG_KAFKA_CONTROLLER_PORT": str(free_port(taken)),
        "TURNLOG_EDGE_PORTS": ",".join(map(str, ports)),
        "TURNLOG_ENGINE": "scripted",
        **overrides,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "infra.command.main", "up", env=environ,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        await _wait_ready(process)
        state = read_state(home)
        assert state is not None, "a ready system has a state file"
        yield BenchSystem(home=home, kafka=state.kafka, ports=ports)
    finally:
        await end_process(process)
        shutil.rmtree(home, ignore_errors=True)


async def end_process(process: asyncio.subprocess.Process) -> None:
    """Ask it to end, and kill it where it has not after STOP_WAIT_S."""
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_WAIT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _wait_ready(process: asyncio.subprocess.Process) -> None:
    """Read what the supervisor says until it is ready; what it says later fits into the pipe's buffer."""
    assert process.stdout is not None
    said = ""
    async with asyncio.timeout(READY_WAIT_S):
        async for line in process.stdout:
            said = line.decode(errors="replace").strip() or said
            if said.startswith("Turnlog is ready"):
                return
    raise BenchError(f"the system did not start: {said}")
