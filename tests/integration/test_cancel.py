"""A stop really stops: at its place in the log, whenever it comes, with or without a worker. Shown = stored = settled."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from infra.command.edge_client import EdgeRefusedError
from schemas.events.accounts import PromptSubmitted
from schemas.events.tokens import RunCancelled
from schemas.topics import ACCOUNTS
from schemas.topics import TOKENS as TOKENS_TOPIC
from schemas.vocabulary import CancelReason
from tests.integration.audit import all_records, audited
from tests.integration.people import Person, Reading, person
from tests.integration.running import RunningSystem
from tests.integration.waiting import eventually_async

# An answer takes more than three minutes, so that whatever is to happen in the middle of one does, also on a slow machine.
TOKENS = 1_000
VARIABLES = {"TURNLOG_SCRIPTED_DELAY_MS": "200", "TURNLOG_SCRIPTED_TOKENS": str(TOKENS)}


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


async def prompts_of(system: RunningSystem, account: str) -> list[str]:
    """The runs that the account's prompts on the log ask for, oldest first."""
    events = [record.event for record in await all_records(system, ACCOUNTS)]
    prompts = [event for event in events if isinstance(event, PromptSubmitted)]
    return [prompt.run_id for prompt in prompts if prompt.account_id == account]


async def test_cancel_in_mid_answer_twice_and_after_the_end(running: RunningSystem) -> None:
    async with person(running) as ada:
        chat_id = await ada.until_answered(ada.new_chat)
        run = await ada.start_until_taken(chat_id, "Tell me of the sea.")
        reading = await Reading().read(ada.client.follow(chat_id, run["id"]), deltas=5)
        first = await ada.cancel(chat_id, run["id"])
        second = await ada.cancel(chat_id, run["id"])
        assert first["run_id"] == second["run_id"] == run["id"]
        await reading.read(ada.client.follow(chat_id, run["id"], reading.last_id))
        assert 0 < reading.tokens < TOKENS
        await shown_stored_and_settled_agree(ada, chat_id, run, reading)
        assert (await ada.cancel(chat_id, run["id"]))["status"] == "cancelled"
        # The slot is free again: the next question of the same chat is answered.
        again = await ada.say_until_answered(chat_id, "And of the land?", max_output_tokens=3)
        assert again.end["finish_reason"] == "length"
        assert (await ada.cancel(chat_id, str(again.frames[0].data["run_id"])))["status"] == "done"
    audited(running)


async def test_cancel_while_no_worker_works_and_before_the_start(running: RunningSystem) -> None:
    async with person(running, "bea") as bea:
        chat_id = await bea.until_answered(bea.new_chat)
        running.kill("worker-0", signal.SIGSTOP)
        try:
            run = await bea.start_until_taken(chat_id, "Tell me of the sea.")
            await bea.cancel(chat_id, run["id"])
            reading = await Reading().read(bea.client.follow(chat_id, run["id"]))
            assert reading.text == ""
            await shown_stored_and_settled_agree(bea, chat_id, run, reading)
        finally:
            running.kill("worker-0", signal.SIGCONT)
        # The worker finds the request when it wakes.
        _, after = await bea.ask_until_answered("And of the land?", max_output_tokens=3)
        assert after.tokens == 3
        assert spent(await bea.run(chat_id, run["id"])) == 0, "a run that never started is free"
    audited(running)


async def test_cancel_before_the_run_is_queued(running: RunningSystem) -> None:
    async with person(running, "cleo") as cleo:
        chat_id = await cleo.until_answered(cleo.new_chat)
        running.kill("admission", signal.SIGSTOP)
        try:
            # Admission may be away for longer than the edge waits: with a key the run goes on, and its client comes back for it.
            posting = asyncio.create_task(cleo.start_until_taken(chat_id, "Tell me of the sea."))

            async def submitted() -> str | None:
                return next(iter(await prompts_of(running, "cleo")), None)

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


async def all_given_up(system: RunningSystem, account: str) -> bool:
    """Whether every run that the account asked for is cancelled by its edge. It says so before it answers, but waits not long for it."""
    events = [record.event for record in await all_records(system, TOKENS_TOPIC)]
    cancels = [event for event in events if isinstance(event, RunCancelled)]
    given_up = {c.run_id for c in cancels if c.reason is CancelReason.GAVE_UP}
    return set(await prompts_of(system, account)) <= given_up


async def test_a_prompt_given_up_by_the_edge_is_cancelled_and_costs_nothing(
    running: RunningSystem,
) -> None:
    async with person(running, "dora") as dora:
        chat_id = await dora.until_answered(dora.new_chat)
        running.kill("admission", signal.SIGSTOP)
        code = ""
        try:
            while code != "admission_timeout":  # Else the edge was late itself, and did nothing.
                with pytest.raises(EdgeRefusedError) as refused:
                    await dora.start(chat_id, "Tell me of the sea.")
                assert refused.value.status == 503
                code = refused.value.code
            await eventually_async(lambda: all_given_up(running, "dora"), what="it is cancelled")
        finally:
            running.kill("admission", signal.SIGCONT)
        # Admission was away beyond its session and joins again: a client comes back until it is there.
        _, reading = await dora.ask_until_answered("Tell me of the land.", max_output_tokens=3)
        assert reading.tokens == 3
        await dora.settles_at(spent(reading.end))
    audited(running)


async def test_somebody_elses_run_cannot_be_found_let_alone_stopped(running: RunningSystem) -> None:
    async with person(running, "fay") as fay, person(running, "eve") as eve:
        chat_id = await fay.until_answered(fay.new_chat)
        run = await fay.start_until_taken(chat_id, "Tell me of the sea.", max_output_tokens=40)
        hers = await eve.until_answered(eve.new_chat)
        for path in (
            f"/v1/chats/{chat_id}/runs/{run['id']}/cancel",
            f"/v1/chats/{hers}/runs/{run['id']}/cancel",
        ):
            answer = await eve.http.post(path)
            missing = await eve.http.post(path.replace(run["id"], "run_" + "a" * 42))
            assert answer.status_code == missing.status_code == 404
            assert answer.json() == missing.json()
        reading = await Reading().read(fay.client.follow(chat_id, run["id"]))
        assert reading.end["finish_reason"] == "length"
        assert reading.tokens == 40
    audited(running)
