"""The whole system on real parts: a broker, the packaged model, and a person at a terminal."""

from __future__ import annotations

import asyncio

import psutil

from tests.integration.audit import audited
from tests.integration.conftest import SystemFactory
from tests.integration.people import Reading, person
from tests.integration.processes import turnlog

MEMORY_BYTES_MAX = 2 * 1024**3
LONG = "Write a long story about the sea."
LONG_TOKENS = 200
"""Seconds of work on any machine: time to kill who does it."""


async def test_a_question_becomes_an_answer_and_a_chat_remembers(system: SystemFactory) -> None:
    running = system({"TURNLOG_ENGINE": "llama"})
    async with person(running) as ada:
        chat_id = await ada.new_chat(system_prompt="You answer in one short sentence.")
        first = await Reading().read(
            ada.client.say(chat_id, {"content": "What is the capital of France?", "temperature": 0})
        )
        assert "Paris" in first.text
        assert first.tokens == first.end["usage"]["output_tokens"]
        second = await Reading().read(
            ada.client.say(chat_id, {"content": "And of Italy?", "temperature": 0})
        )
        assert second.end["usage"]["input_tokens"] > first.end["usage"]["input_tokens"]
        stored = await ada.messages(chat_id)
        assert [m["role"] for m in stored] == ["user", "assistant"] * 2
        assert [m["content"] for m in stored[1::2]] == [first.text, second.text]

        chat_id = await ada.new_chat()
        run = await ada.start(chat_id, LONG, temperature=0)
        reading = await Reading().read(ada.client.follow(chat_id, run["id"]), deltas=8)
        await ada.cancel(chat_id, run["id"])
        await reading.read(ada.client.follow(chat_id, run["id"], reading.last_id))
        assert reading.end["finish_reason"] == "cancelled"
        assert (await ada.stored_answer(chat_id))["content"] == reading.text

        killed = await ada.start(chat_id, LONG, temperature=0, max_output_tokens=LONG_TOKENS)
        cut = await Reading().read(ada.client.follow(chat_id, killed["id"]), deltas=2)
        running.kill("worker-0")
        await cut.read(ada.client.follow(chat_id, killed["id"], cut.last_id))
        assert cut.tokens == cut.end["usage"]["output_tokens"]
        assert (await ada.stored_answer(chat_id))["content"] == cut.text

    asked = await asyncio.to_thread(
        turnlog,
        *("ask", "Say hello.", "--max-tokens", "32", "--url", running.url),
        variables={"TURNLOG_HOME": str(running.home)},
    )
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip()

    pids = [running.pid, *(running.part(name).pid for name in running.parts())]
    assert sum(psutil.Process(pid).memory_info().rss for pid in pids) < MEMORY_BYTES_MAX
    assert audited(running).later_attempts >= 1
