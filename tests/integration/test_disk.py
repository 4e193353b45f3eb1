"""A disk that fills up under a running system: refusals before the broker dies, no false acknowledgement, and all of it afterwards."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from infra.command.edge_client import EdgeRefusedError
from infra.supervisor.home import free_mib
from tests.integration.audit import audited
from tests.integration.people import Reading, person
from tests.integration.processes import turnlog
from tests.integration.running import RunningSystem, processes_of

MIB = 1024 * 1024
DISK_MIB = 256
LOW_MIB = 96
UNDER_WAY, LATE = 4, 4
SLOW = {"TURNLOG_SCRIPTED_DELAY_MS": "20", "TURNLOG_SCRIPTED_TOKENS": "150"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of DISK_MIB of its own; skips where this test may not mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ("mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(place))
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", "") or str(error)
        pytest.skip(f"no small disk can be mounted here: {why.strip()}")
    yield place
    subprocess.run(("umount", "-l", str(place)), check=True)


@pytest.fixture
def running(small_disk: Path, tmp_path: Path) -> Iterator[RunningSystem]:
    """A system whose home is on the small disk; not started. What it says is read elsewhere, where there is room for it."""
    running = RunningSystem(small_disk / "home", output=tmp_path / "up.out")
    yield running
    running.end()


class Ballast:
    """A file that takes the room on the disk."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self._file = disk / "ballast"

    def leave_mib(self, mib: int) -> None:
        """Take all but so much."""
        room = shutil.disk_usage(self._disk).free - mib * MIB
        with self._file.open("ab") as file:
            os.posix_fallocate(file.fileno(), file.tell(), room)

    def take_all(self) -> None:
        """Take the last byte."""
        with suppress(OSError), self._file.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def go(self) -> None:
        """Give all of it back."""
        self._file.unlink()


async def refusal(asking: Any) -> str:
    """The code of the refusal."""
    with pytest.raises(EdgeRefusedError) as caught:
        await asking
    assert caught.value.status == 503, caught.value
    return caught.value.code


async def test_below_the_watermark_prompts_are_refused_and_runs_under_way_finish(
    running: RunningSystem, small_disk: Path
) -> None:
    running.start({**SLOW, "TURNLOG_LOW_DISK_MB": str(LOW_MIB)})
    await asyncio.to_thread(running.wait_ready)
    ballast = Ballast(small_disk)
    async with person(running) as ada:
        chat_id, idle = await ada.new_chat(), await ada.new_chat()
        run = await ada.start(chat_id, "Tell me of the sea.")
        reading = await Reading().read(ada.client.follow(chat_id, run["id"]), deltas=5)
        ballast.leave_mib(LOW_MIB // 2)
        assert await refusal(ada.new_chat()) == "storage_low"
        assert await refusal(ada.start(idle, "And of the land.")) == "storage_low"
        assert await refusal(ada.client.call("PATCH", f"/v1/chats/{idle}", {"title": "x"})) == (
            "storage_low"
        )
        await reading.read(ada.client.follow(chat_id, run["id"], reading.last_id))
        assert reading.tokens == reading.end["usage"]["output_tokens"] == 150
        assert (await ada.stored_answer(chat_id))["content"] == reading.text
        assert await ada.messages(idle) == []
        ballast.go()
        _, again = await ada.ask("And of the land.")
        assert again.end["status"] == "done"
    assert (await asyncio.to_thread(audited, running)).runs == 2


async def test_a_disk_that_is_really_full_loses_nothing_that_was_acknowledged(
    running: RunningSystem, small_disk: Path
) -> None:
    # The watermark is off: nothing is refused before the broker itself cannot go on.
    running.start({**SLOW, "TURNLOG_LOW_DISK_MB": "0", "TURNLOG_RESTARTS_MAX": "1"})
    await asyncio.to_thread(running.wait_ready)
    ballast = Ballast(small_disk)
    async with person(running) as ada:
        chats = [await ada.new_chat() for _ in range(UNDER_WAY + LATE)]
        taken = {}
        for chat_id in chats[:UNDER_WAY]:
            taken[chat_id] = (await ada.start(chat_id, "Tell me of the sea."))["id"]
        first = await Reading().read(ada.client.follow(chats[0], taken[chats[0]]), deltas=5)
        ballast.take_all()
        asked = await asyncio.gather(
            *(ada.start(chat_id, "word " * 1_000) for chat_id in chats[UNDER_WAY:]),
            return_exceptions=True,
        )
        for chat_id, answer in zip(chats[UNDER_WAY:], asked, strict=True):
            if isinstance(answer, EdgeRefusedError):
                assert answer.status in {0, 503}, answer  # 0: the edge has gone with the broker.
            else:
                assert not isinstance(answer, BaseException), answer
                taken[chat_id] = answer["id"]
        assert len(taken) < len(chats), "somebody was refused"
        assert await asyncio.to_thread(running.ended) == 1
        last = running.output().splitlines()[-1]
        # Parts that end give back a little.
        assert re.search(rf"; only \d MiB are free for {re.escape(str(running.home))}$", last), last
        assert processes_of(running.home) == []

        again = await asyncio.to_thread(
            turnlog, "up", variables={"TURNLOG_HOME": str(running.home)}
        )
        assert again.returncode == 2
        free = free_mib(running.home)
        assert free < 10
        assert (
            again.stderr == f"turnlog: only {free} MiB are free for {running.home}; it needs 32\n"
        )

        ballast.go()
        running.start({**SLOW, "TURNLOG_LOW_DISK_MB": "0"})
        await asyncio.to_thread(running.wait_ready)
        for chat_id, run_id in taken.items():
            cursor = first.last_id if chat_id == chats[0] else ""
            reading = first if chat_id == chats[0] else Reading()
            await reading.read(ada.client.follow(chat_id, run_id, cursor))
            assert reading.tokens == reading.end["usage"]["output_tokens"] == 150
            assert (await ada.stored_answer(chat_id))["content"] == reading.text
        _, later = await ada.ask_until_answered("And of the land.")
        assert later.end["status"] == "done"
    assert (await asyncio.to_thread(audited, running)).runs > len(taken)
