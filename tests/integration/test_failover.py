"""Any process may die in the middle of an answer. The client sees one answer, and the stored one is the same, byte for byte."""

from __future__ import annotations

import asyncio
import random
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass

from schemas.events.tokens import AttemptStarted, RunEnded
from tests.integration.audit import audited, run_records
from tests.integration.conftest import SystemFactory
from tests.integration.people import Person, Reading, person
from tests.integration.running import RunningSystem

TOKENS = 300
WORKERS = ("worker-0", "worker-1")
VARIABLES = {
    "TURNLOG_EDGES": "2",
    "TURNLOG_WORKERS": "2",
    "TURNLOG_SCRIPTED_DELAY_MS": "20",
    "TURNLOG_SCRIPTED_TOKENS": str(TOKENS),
}
BURST = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class CutShort:
    """A run in the middle of its answer, what was read of it, and the part that spoke, stopped."""

    chat_id: str
    run_id: str
    reading: Reading
    speaker: str


async def cut_short(system: RunningSystem, ada: Person) -> CutShort:
    """Stop a worker in the middle of an answer. Both stand still while the log is asked who speaks, so no answer ends meanwhile."""
    while True:
        chat_id = await ada.until_answered(ada.new_chat)
        run = await ada.start_until_taken(chat_id, "Tell me of the sea.")
        reading = await reads_some(ada, chat_id, run["id"], 3)
        for name in WORKERS:
            system.kill(name, signal.SIGSTOP)
        events = [record.event for record in await run_records(system, run["id"])]
        attempts = [event for event in events if isinstance(event, AttemptStarted)]
        speaker = next(name for name in WORKERS if attempts[-1].worker_id.startswith(name))
        ended = any(isinstance(event, RunEnded) for event in events)
        for name in WORKERS:
            if ended or name != speaker:
                system.kill(name, signal.SIGCONT)
        if not ended:  # Else we were too late to stop anything: once more.
            return CutShort(chat_id=chat_id, run_id=run["id"], reading=reading, speaker=speaker)


async def reads_some(reader: Person, chat_id: str, run_id: str, deltas: int) -> Reading:
    """Follow a run for so many deltas, then drop the connection."""
    return await Reading().read(reader.client.follow(chat_id, run_id), deltas=deltas)


async def test_an_edge_is_killed_and_the_reader_resumes_on_another(running: RunningSystem) -> None:
    async with person(running) as ada, person(running, edge=1) as ada_elsewhere:
        chat_id = await ada.until_answered(ada.new_chat)
        run = await ada.start_until_taken(chat_id, "Tell me of the sea.")
        reading = await reads_some(ada, chat_id, run["id"], 3)
        old = running.kill("edge-0")
        await reading.read(ada_elsewhere.client.follow(chat_id, run["id"], reading.last_id))
        assert reading.end["finish_reason"] in {"stop", "length"}
        assert reading.tokens == reading.end["usage"]["output_tokens"]
        stored = await ada_elsewhere.stored_answer(chat_id)
        assert stored["content"] == reading.text
        running.wait_restarted("edge-0", old_pid=old)
        assert (await ada.stored_answer(chat_id))["content"] == reading.text
    audited(running)


async def test_a_worker_is_killed_and_another_continues(running: RunningSystem) -> None:
    async with person(running) as ada:
        cut = await cut_short(running, ada)
        reading = cut.reading
        running.kill(cut.speaker)
        await reading.read(ada.client.follow(cut.chat_id, cut.run_id, reading.last_id))
        assert reading.tokens == reading.end["usage"]["output_tokens"] == TOKENS
        assert (await ada.stored_answer(cut.chat_id))["content"] == reading.text
        assert (await ada.run(cut.chat_id, cut.run_id))["attempt"] >= 2
        # What an undisturbed answer to the same question says.
        _, undisturbed = await ada.ask_until_answered("Tell me of the sea.")
        assert undisturbed.text == reading.text
    assert audited(running).later_attempts >= 1


async def test_a_paused_worker_wakes_up_and_nothing_of_it_is_seen(running: RunningSystem) -> None:
    async with person(running) as ada:
        cut = await cut_short(running, ada)
        chat_id, reading = cut.chat_id, cut.reading
        try:
            await reading.read(ada.client.follow(chat_id, cut.run_id, reading.last_id))
        finally:
            running.kill(cut.speaker, signal.SIGCONT)
        assert reading.tokens == reading.end["usage"]["output_tokens"] == TOKENS
        assert (await ada.run(chat_id, cut.run_id))["attempt"] >= 2
        # The zombie is awake and useful again, or was replaced: the next answers come as ever.
        for _ in range(4):
            _, again = await ada.ask_until_answered("Tell me of the sea.")
            assert again.text == reading.text
        assert (await ada.stored_answer(chat_id))["content"] == reading.text
    assert audited(running).later_attempts >= 1


async def test_fifty_runs_survive_the_death_of_every_part(system: SystemFactory) -> None:
    running = system(
        {
            "TURNLOG_SCRIPTED_DELAY_MS": "40",
            "TURNLOG_SCRIPTED_TOKENS": "120",
            "TURNLOG_WORKERS": "2",
        }
    )
    dice = random.Random(20)
    async with AsyncExitStack() as stack:
        # One team, a seat for each run: a seat may not have so many under way by itself.
        team = [
            await stack.enter_async_context(person(running, seat=f"seat-{k}")) for k in range(BURST)
        ]
        ada = team[0]

        async def one(asker: Person) -> tuple[str, Reading]:
            await asyncio.sleep(dice.uniform(0, 4))
            return await asker.ask_until_answered("Tell me of the sea.")

        async def deaths() -> None:
            for part in ("admission", "recorder", "context", "projector", "worker-0", "kafka"):
                await asyncio.sleep(dice.uniform(0.3, 1.5))
                running.kill(part)

        async with asyncio.TaskGroup() as tasks:
            runs = [tasks.create_task(one(asker)) for asker in team]
            tasks.create_task(deaths())
        for chat_id, reading in (task.result() for task in runs):
            assert reading.end["finish_reason"] == "stop"
            assert reading.tokens == reading.end["usage"]["output_tokens"] == 120
            assert (await ada.stored_answer(chat_id))["content"] == reading.text
        spent = [reading.end["usage"] for _, reading in (task.result() for task in runs)]
        await ada.settles_at(sum(use["input_tokens"] + use["output_tokens"] for use in spent))
    report = audited(running)
    assert report.runs == BURST
