"""`turnlog ask` and `turnlog chat` as a person uses them: Ctrl-C stops an answer at any moment, and always ends the command."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from infra.command.edge_client import EdgeClient, ServerEvent
from infra.command.talk import Interrupts, answer
from schemas.vocabulary import ServiceTier
from tests.integration.edge_peers import EdgeProcess, ScriptedPeer
from tests.integration.processes import REPOSITORY, environment
from tests.integration.waiting import PATIENCE_S

DEADLINE_S = 2 * PATIENCE_S

Edges = tuple[EdgeProcess, EdgeProcess]


@asynccontextmanager
async def _command(
    home: Path, edge: EdgeProcess, *arguments: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "infra.command.main", *arguments, "--url", edge.url),
        cwd=REPOSITORY,
        env=environment({"TURNLOG_HOME": str(home)}),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _line(stream: asyncio.StreamReader | None) -> str:
    assert stream is not None
    return (await stream.readline()).decode().rstrip("\n")


async def test_ctrl_c_before_the_answer_begins_stops_it_as_soon_as_it_is_known(
    edges: Edges, edge_home: Path, peer: ScriptedPeer
) -> None:
    async with _command(edge_home, edges[0], "ask", "Hi") as ask:
        prompt = await peer.next_prompt()
        ask.send_signal(signal.SIGINT)
        assert await _line(ask.stderr) == "[stopping]"
        await peer.queue(prompt)
        cancelled = await peer.cancels.get()
        assert cancelled.run_id == prompt.run_id
        assert await _line(ask.stderr) == "[cancelled]"
        assert await ask.wait() == 0


async def test_a_flex_question_says_that_it_can_wait(
    edges: Edges, edge_home: Path, peer: ScriptedPeer
) -> None:
    async with _command(edge_home, edges[0], "ask", "Hi", "--flex") as ask:
        prompt = await peer.next_prompt()
        assert prompt.service_tier is ServiceTier.FLEX
        await peer.answer(prompt, ["later"])
        assert await _line(ask.stdout) == "later"
        assert await ask.wait() == 0


async def test_a_second_ctrl_c_ends_the_command_at_once(
    edges: Edges, edge_home: Path, peer: ScriptedPeer
) -> None:
    async with _command(edge_home, edges[0], "ask", "Hi") as ask:
        prompt = await peer.next_prompt()
        ask.send_signal(signal.SIGINT)
        assert await _line(ask.stderr) == "[stopping]"
        ask.send_signal(signal.SIGINT)
        assert await ask.wait() == 130
        await peer.queue(prompt)
        await peer.start(prompt.run_id)
        await peer.finish(prompt.run_id, 0)


async def test_ctrl_c_while_a_chat_waits_for_a_line_ends_it(
    edges: Edges, edge_home: Path, peer: ScriptedPeer
) -> None:
    peer.auto = lambda prompt: peer.answer(prompt, ["Hel", "lo"])
    async with _command(edge_home, edges[0], "chat") as chat:
        assert chat.stdin is not None
        for line in (b"Hi\n", b"Again\n"):
            chat.stdin.write(line)
            assert await _line(chat.stdout) == "Hello"
        chat.send_signal(signal.SIGINT)
        assert await chat.wait() == 130


async def test_the_end_of_the_input_ends_a_chat_after_its_last_line(
    edges: Edges, edge_home: Path, peer: ScriptedPeer
) -> None:
    peer.auto = lambda prompt: peer.answer(prompt, [prompt.content])
    async with _command(edge_home, edges[0], "chat") as chat:
        out, err = await chat.communicate("one\n\nzwei – ü".encode())
        assert (out.decode().split("\n"), err) == (["one", "zwei – ü", ""], b"")
        assert chat.returncode == 0


class _InterruptedBehindItsLastEvent(EdgeClient):
    """Ctrl-C comes when the answer has been printed and before its stream is closed, without a turn of the event loop between."""

    async def say(
        self, chat_id: str, body: dict[str, Any], *, idempotency_key: str = ""
    ) -> AsyncIterator[ServerEvent]:
        """An answer."""
        yield ServerEvent(name="run.queued", id="1", data={"run_id": "run_1"})
        yield ServerEvent(name="run.ended", id="2", data={"finish_reason": "stop"})
        os.kill(os.getpid(), signal.SIGINT)


class _AnswersNoCancel(EdgeClient):
    """The edge hangs: it sends nothing more, and does not answer when a run is to be cancelled, which is asked of it here twice."""

    async def say(
        self, chat_id: str, body: dict[str, Any], *, idempotency_key: str = ""
    ) -> AsyncIterator[ServerEvent]:
        """An answer that has begun."""
        yield ServerEvent(name="run.queued", id="1", data={"run_id": "run_1"})
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The cancel."""
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()


@pytest.mark.parametrize("edge", [_InterruptedBehindItsLastEvent, _AnswersNoCancel])
async def test_ctrl_c_is_not_lost_behind_an_answer_nor_held_up_by_an_edge_that_hangs(
    edge: type[EdgeClient],
) -> None:
    async def talk() -> None:
        interrupts = Interrupts()
        async with edge(url="http://127.0.0.1:1", token="") as client:
            await answer(client, interrupts, "chat_1", "Hi", 0)
            await asyncio.Event().wait()

    talking = asyncio.create_task(talk())
    try:
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(DEADLINE_S):
                await talking
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
