"""The waits that clients are told, on a real system whose one worker is far too small for what is asked of it."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from typing import Any

from schemas.events.tokens import AttemptStarted, RunEnded
from schemas.topics import TOKENS
from schemas.vocabulary import Tier
from tests.integration.audit import all_records, audited
from tests.integration.people import Reading, person
from tests.integration.processes import turnlog
from tests.integration.running import RunningSystem

# Two slots, 100 tokens of 20 ms each: an answer a second. So a queue stands though clients need some seconds for a question.
VARIABLES = {
    "TURNLOG_SCRIPTED_SLOTS": "2",
    "TURNLOG_SCRIPTED_TOKENS": "100",
    "TURNLOG_SCRIPTED_DELAY_MS": "20",
}
ROUNDS = 2
PEOPLE = 8
TEAMS = 3
FLOOD = 14


async def test_whoever_waits_was_told_about_how_long_and_the_error_is_published(
    running: RunningSystem,
) -> None:
    told: list[int] = []

    async def ask(number: int) -> None:
        async with person(running, f"person-{number}") as one:
            for chat_id in [await one.new_chat() for _ in range(ROUNDS)]:
                body = {"content": "Hello", "max_output_tokens": 200}
                reading = await Reading().read(one.client.say(chat_id, body))
                queued: dict[str, Any] = reading.frames[0].data
                told.append(queued["wait_ms"])

    async with asyncio.TaskGroup() as tasks:
        for number in range(PEOPLE):
            tasks.create_task(ask(number))
    assert sum(wait_ms > 0 for wait_ms in told) > len(told) // 2, "a queue stood"

    async with person(running) as one:
        metrics = (await one.http.get("/metrics")).text
    errors = re.search(r'wait_estimate_error_ratio_count\{lane="team"\} ([0-9.]+)', metrics)
    assert errors is not None
    assert float(errors[1]) == ROUNDS * PEOPLE
    for name in ("wait_estimated_seconds", "wait_waited_seconds"):
        total = re.search(rf'turnlog_edge_{name}_total\{{lane="team"\}} ([0-9.]+)', metrics)
        assert total is not None
        assert float(total[1]) > 0
    assert "turnlog_edge_saturation_seconds" in metrics

    printed = estimates(running)
    row = next(line for line in printed.splitlines() if line.startswith("all"))
    # Few runs, on a machine that does other things: how right they are is shown in virtual time and by `turnlog estimates` on a quiet one.
    found = re.match(r"all\s+(\d+)\s.*?\d+%\s+\d+%\s+\d+%\s+[+-]\d+%$", row)
    assert found is not None, printed
    assert int(found[1]) == ROUNDS * PEOPLE
    audited(running)


def estimates(running: RunningSystem) -> str:
    done = turnlog(
        "estimates",
        variables={
            "TURNLOG_HOME": str(running.home),
            "TURNLOG_KAFKA": running.bootstrap,
            "COLUMNS": "200",
        },
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return done.stdout


async def test_a_person_of_the_free_tier_is_answered_while_a_team_floods_the_worker(
    running: RunningSystem,
) -> None:
    """I9: the floor. The teams' requests would take some forty seconds alone."""
    async with AsyncExitStack() as stack:
        teams = [
            await stack.enter_async_context(person(running, f"crowd-{number}"))
            for number in range(TEAMS)
        ]
        one = await stack.enter_async_context(person(running, "newcomer", tier=Tier.FREE))
        mine = await one.new_chat()
        chats = [(team, await team.new_chat()) for team in teams for _ in range(FLOOD)]
        # All at once: the flood must not run off while it comes.
        runs = await asyncio.gather(
            *(team.start(chat, "Hello", max_output_tokens=200) for team, chat in chats)
        )
        body = {"content": "Hello", "max_output_tokens": 800}
        reading = await Reading().read(one.client.say(mine, body))
        assert reading.end["finish_reason"] == "stop"
    # By the log's own clock: who asks the edge now may have been kept waiting himself.
    started: dict[str, int] = {}
    ended_ms = 0
    for record in await all_records(running, TOKENS):
        match record.event:
            case AttemptStarted(run_id=run_id):
                started.setdefault(run_id, record.appended_ms)
            case RunEnded(run_id=run_id) if run_id == reading.frames[0].data["run_id"]:
                ended_ms = record.appended_ms
    later = [run["id"] for run in runs if started.get(run["id"], ended_ms) >= ended_ms > 0]
    assert len(later) > FLOOD // 2, "the flood is still there"
