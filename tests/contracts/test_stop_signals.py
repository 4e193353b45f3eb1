"""A process that was told to stop ends as it should, however often and whenever it is told again."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.integration.processes import REPOSITORY

PROCESS = """
import asyncio, signal, sys
from infra.process import stop_requested

async def main():
    stop = stop_requested()
    signal.signal(signal.SIGUSR1, lambda *_: print("not told to stop", flush=True))
    print("up", flush=True)
    await stop.wait()

asyncio.run(main())
print("the loop is closed", flush=True)
sys.stdin.readline()
print("at the end", flush=True)
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        (sys.executable, "-c", PROCESS),
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        yield running
        running.kill()


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_the_first_one_changes_nothing(
    process: subprocess.Popen[str], first: signal.Signals
) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(first)
    assert process.stdout.readline() == "the loop is closed\n"
    for again in (signal.SIGTERM, signal.SIGINT):
        process.send_signal(again)
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "at the end\n"
    assert process.wait() == 0


def test_another_signal_that_the_process_handles_is_no_stop(
    process: subprocess.Popen[str],
) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    for _ in range(3):
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "not told to stop\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "the loop is closed\n"
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "at the end\n"
    assert process.wait() == 0
