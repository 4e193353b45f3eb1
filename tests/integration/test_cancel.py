"""A stop really stops: at its place in the log, whenever it comes, with or without a worker. Shown = stored = settled."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from infra.command.edge_client import EdgeRefusedError
from schemas.events.accounts import PromptSubmitted
from schemas.topics import ACCOUNTS
from tests.integration.audit import all_records, audited
from tests.integration.people import Person, Reading, person
from tests.integration.running import RunningSystem
from tests.integration.waiting import eventually_async

VARIABLES = {"TURNLOG_SCRIPTED_DELAY_MS": "20", "TURNLOG_SCRIPTED_TOKENS": "400"}


def spent(run: dict[str, Any]) -> int:
    """Tokens of a run or of its run.ended."""
    usage: dict[str, int] = run["usage"]
    return usage["input_tokens"] + usage["output_tokens"]


async def shown_stored_and_settled_agree(
    ada: Person, chat_id: str, run: dict[str, Any], reading: Reading
) -> None:
    """The text and the tokens are the same wherever one looks."""
    assert reading.end["finish_reason"] == "cancelled"
    assert reading.end["status"] == "cancelled"
    assert reading.tokens == reading.end["usage"]["output_tokens"]
    stored = await ada.stored_answer(chat_id)
    assert (stored["content"], stored["status"]) == (reading.text, "cancelled")
    found = await ada.run(chat_id, run["id"])
    assert found["text"] == reading.text
    assert found["usage"]["output_tokens"] == reading.tokens
    await ada.settles_at(spent(found))


async def test_cancel_in_mid_answer_twice_and_after_the_end(running: RunningSystem) -> None:
    async with person(running) as ada:
        chat_id = await ada.new_chat()
        run = await ada.start(chat_id, "Tell me of the sea.")
        reading = await Reading().read(ada.client.follow(chat_id, run["id"]), deltas=5)
        first = await ada.cancel(chat_id, run["id"])
        second = await ada.cancel(chat_id, run["id"])
        assert first["run_id"] == second["run_id"] == run["id"]
        await reading.read(ada.client.follow(chat_id, run["id"], reading.last_id))
        assert 0 < reading.tokens < 400
        await shown_stored_and_settled_agree(ada, chat_id, run, reading)
        assert (await ada.cancel(chat_id, run["id"]))["status"] == "cancelled"
        # The slot is free again: the next question of the same chat is answered.
        again = await Reading().read(
            ada.client.say(chat_id, {"content": "And of the land?", "max_output_tokens": 3})
        )
        assert again.end["finish_reason"] == "length"
        assert (await ada.cancel(chat_id, str(again.frames[0].data["run_id"])))["status"] == "done"
    audited(running)


async def test_cancel_while_no_worker_works_and_before_the_start(running: RunningSystem) -> None:
    async with person(running, "bea") as bea:
        chat_id = await bea.new_chat()
        running.kill("worker-0", signal.SIGSTOP)
        try:
            run = await bea.start(chat_id, "Tell me of the sea.")
            await bea.cancel(chat_id, run["id"])
            reading = await Reading().read(bea.client.follow(chat_id, run["id"]))
            assert reading.text == ""
            await shown_stored_and_settled_agree(bea, chat_id, run, reading)
        finally:
            running.kill("worker-0", signal.SIGCONT)
        # The worker finds the request when it wakes.
        _, after = await bea.ask("And of the land?", max_output_tokens=3)
        assert after.tokens == 3
        assert spent(await bea.run(chat_id, run["id"])) == 0, "a run that never started is free"
    audited(running)


async def test_cancel_before_the_run_is_queued(running: RunningSystem) -> None:
    async with person(running, "cleo") as cleo:
        chat_id = await cleo.new_chat()
        running.kill("admission", signal.SIGSTOP)
        try:
            posting = asyncio.create_task(cleo.start(chat_id, "Tell me of the sea."))

            async def submitted() -> str | None:
                records = await all_records(running, ACCOUNTS)
                prompts = [r.event for r in records if isinstance(r.event, PromptSubmitted)]
                prompts = [prompt for prompt in prompts if prompt.account_id == "cleo"]
                return prompts[-1].run_id if prompts else None

            run_id = await eventually_async(submitted, what="the prompt is on the log")
            await cleo.cancel(chat_id, run_id)
        finally:
            running.kill("admission", signal.SIGCONT)
        run = await posting
        assert run["id"] == run_id
        reading = await Reading().read(cleo.client.follow(chat_id, run_id))
        assert reading.text == ""
        await shown_stored_and_settled_agree(cleo, chat_id, run, reading)
    audited(running)


async def test_a_prompt_given_up_by_the_edge_is_cancelled_and_costs_nothing(
    running: RunningSystem,
) -> None:
    async with person(running, "dora") as dora:
        chat_id = await dora.new_chat()
        running.kill("admission", signal.SIGSTOP)
        try:
            with pytest.raises(EdgeRefusedError) as refused:
                await dora.start(chat_id, "Tell me of the sea.")
        finally:
            running.kill("admission", signal.SIGCONT)
        assert (refused.value.status, refused.value.code) == (503, "admission_timeout")
        # Admission was away beyond its session and joins again: a client comes back until it is there.
        _, reading = await dora.ask_until_answered("Tell me of the land.", max_output_tokens=3)
        assert reading.tokens == 3
        await dora.settles_at(spent(reading.end))
    audited(running)


async def test_somebody_elses_run_cannot_be_found_let_alone_stopped(running: RunningSystem) -> None:
    async with person(running, "fay") as fay, person(running, "eve") as eve:
        chat_id = await fay.new_chat()
        run = await fay.start(chat_id, "Tell me of the sea.")
        hers = await eve.new_chat()
        for path in (
            f"/v1/chats/{chat_id}/runs/{run['id']}/cancel",
            f"/v1/chats/{hers}/runs/{run['id']}/cancel",
        ):
            answer = await eve.http.post(path)
            missing = await eve.http.post(path.replace(run["id"], "run_" + "a" * 42))
            assert answer.status_code == missing.status_code == 404
            assert answer.json() == missing.json()
        reading = await Reading().read(fay.client.follow(chat_id, run["id"]))
        assert reading.end["finish_reason"] == "stop"
        assert reading.tokens == 400
    audited(running)
