"""The log of a part is bounded while its process writes on."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from infra.supervisor import supervise
from infra.supervisor.part import PartPlan, Phase
from infra.supervisor.part_log import OLDER_LOGS_KEPT, turn_over
from infra.supervisor.supervise import Supervisor

BYTES_MAX = 100
DEADLINE_S = 120.0


def _says(number: int) -> bytes:
    return f"{number} ".encode() * BYTES_MAX


def test_what_is_written_on_stays_below_the_bound_and_so_many_older_files_are_kept(
    tmp_path: Path,
) -> None:
    log = tmp_path / "edge-0.log"
    with log.open("ab", buffering=0) as process:
        for number in range(OLDER_LOGS_KEPT + 3):
            process.write(_says(number))
            assert turn_over(log, bytes_max=BYTES_MAX)
            assert log.stat().st_size == 0
        process.write(b"last")
        assert not turn_over(log, bytes_max=BYTES_MAX)
    assert log.read_bytes() == b"last"
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path != log}
    newest = OLDER_LOGS_KEPT + 2
    assert kept == {
        f"edge-0.log.{age}": _says(newest - age + 1) for age in range(1, OLDER_LOGS_KEPT + 1)
    }


def test_a_log_that_cannot_be_copied_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "edge-0.log"
    log.write_bytes(_says(1))

    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"1")
        raise OSError("no space left")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="no space"):
        turn_over(log, bytes_max=BYTES_MAX)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [
        ("edge-0.log", _says(1))
    ]


async def test_a_supervisor_bounds_the_log_of_a_part_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(supervise, "turn_over", lambda log: turn_over(log, bytes_max=BYTES_MAX))
    speaks = (
        "import os, pathlib, signal\n"
        f"print('x' * {2 * BYTES_MAX}, flush=True)\n"
        "pathlib.Path(os.environ['TURNLOG_READY_FILE']).touch()\n"
        "signal.pause()\n"
    )
    log = tmp_path / "logs" / "edge-0.log"
    plan = PartPlan(
        name="edge-0",
        argv=(sys.executable, "-c", speaks),
        phase=Phase.EDGE,
        log=log,
        ready_file=tmp_path / "edge-0.ready",
    )
    supervisor = Supervisor(home=tmp_path, plans=[plan], kafka="", urls=(), forgiven_max=0)
    running = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(DEADLINE_S):
        while not log.with_name("edge-0.log.1").exists() or log.stat().st_size:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)  # It has handlers since before it started a part.
        assert await running == 0
