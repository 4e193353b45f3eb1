"""The waits that clients are told, on a real system whose one worker is far too small for what is asked of it."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from schemas.vocabulary import Tier
from tests.integration.audit import audited
from tests.integration.people import person
from tests.integration.processes import turnlog
from tests.integration.running import RunningSystem

# Two slots, 64 tokens of 20 ms each: about 1.5 answers a second.
VARIABLES = {
    "TURNLOG_SCRIPTED_SLOTS": "2",
    "TURNLOG_SCRIPTED_TOKENS": "64",
    "TURNLOG_SCRIPTED_DELAY_MS": "20",
}
ROUNDS = 3
PEOPLE = 8


async def test_whoever_waits_was_told_about_how_long_and_the_error_is_published(
    running: RunningSystem,
) -> None:
    told: list[int] = []

    async def ask(number: int) -> None:
        async with person(running, f"person-{number}") as one:
            for _ in range(ROUNDS):
                _, reading = await one.ask("Hello", max_output_tokens=200)
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
    """I9: the floor. The teams' 42 requests would take some thirty seconds alone."""
    for number in range(3):
        async with person(running, f"crowd-{number}") as team:
            for _ in range(14):
                await team.start(await team.new_chat(), "Hello", max_output_tokens=200)
    async with person(running, "newcomer", tier=Tier.FREE) as one:
        _, reading = await one.ask("Hello", max_output_tokens=200)
        assert reading.end["finish_reason"] == "stop"
    async with person(running, "crowd-2") as team:
        assert (await team.quota())["open_runs"] > 2, "the flood is still there"
