"""`TURNLOG_KAFKA`: the whole path over a broker that somebody else runs."""

from __future__ import annotations

import asyncio

from tests.integration.audit import audited
from tests.integration.conftest import SystemFactory
from tests.integration.people import Reading, person
from tests.integration.processes import turnlog
from tests.integration.running import RunningBroker


async def test_a_system_works_on_a_cluster_that_it_did_not_start_and_leaves_it_running(
    own_broker: RunningBroker, system: SystemFactory
) -> None:
    running = await asyncio.to_thread(
        system, {"TURNLOG_KAFKA": own_broker.bootstrap, "TURNLOG_SCRIPTED_TOKENS": "20"}
    )
    assert "kafka" not in running.parts()
    assert running.bootstrap == own_broker.bootstrap
    async with person(running) as ada:
        chat_id, told = await ada.ask("What is the sea?")
        assert told.end["status"] == "done"
        again = await Reading().read(ada.client.say(chat_id, {"content": "And the land?"}))
        stored = await ada.messages(chat_id)
        assert [message["content"] for message in stored[1::2]] == [told.text, again.text]
    asked = await asyncio.to_thread(
        turnlog,
        *("ask", "Say hello.", "--url", running.url),
        variables={"TURNLOG_HOME": str(running.home)},
    )
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip()
    assert (await asyncio.to_thread(audited, running)).runs == 3
    assert running.stop()[0] == 0
    kept = await asyncio.to_thread(
        turnlog,
        *("verify", "--settle-s", "5", "--grace-s", "300"),
        variables={"TURNLOG_HOME": str(running.home), "TURNLOG_KAFKA": own_broker.bootstrap},
    )
    assert kept.returncode == 0, kept.stdout + kept.stderr
    assert "under way: " not in kept.stdout, kept.stdout
