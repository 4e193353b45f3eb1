"""An edge over a broker that is killed: its streams go on, and nothing is answered that was not decided."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest

from infra.command.topics import apply_topics
from infra.embedded.kafka import wait_until_serving
from producers.log_writer import AppendFailed
from tests.integration.edge_peers import MODEL, EdgeProcess, OpenStream, scripted_peer
from tests.integration.running import RunningBroker
from tests.integration.waiting import PATIENCE_S, eventually_async


@pytest.fixture
def edge(own_broker: RunningBroker, tmp_path: Path) -> Iterator[EdgeProcess]:
    asyncio.run(apply_topics(own_broker.bootstrap, models=(MODEL,), partitions=12))
    process = EdgeProcess(home=tmp_path / "home", bootstrap=own_broker.bootstrap)
    yield process.wait_ready()
    process.end()


async def test_a_stream_goes_on_where_a_killed_broker_comes_back(
    edge: EdgeProcess, own_broker: RunningBroker, tmp_path: Path
) -> None:
    async with (
        scripted_peer(tmp_path / "home", own_broker.bootstrap) as peer,
        peer.client(edge) as client,
    ):
        chat_id = await peer.new_chat(client)
        path = f"/v1/chats/{chat_id}/messages"
        async with OpenStream(client, "POST", path, json={"content": "Hi"}) as stream:
            prompt = await peer.next_prompt()
            await peer.queue(prompt)
            await peer.start(prompt.run_id)
            await peer.say(prompt.run_id, 0, "before ")
            await stream.until_text("before ")
            await asyncio.to_thread(own_broker.stop, signal.SIGKILL)
            assert (await client.get("/healthz")).status_code == 200
            assert (await client.get("/readyz")).status_code == 503
            refused = await client.post(path, json={"content": "during"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "admission_timeout"
            own_broker.launch()
            await wait_until_serving(own_broker.bootstrap, deadline_s=PATIENCE_S)
            await taken(lambda: peer.say(prompt.run_id, 1, "after"))
            await taken(lambda: peer.finish(prompt.run_id, 2))
            await stream.to_end()
            assert stream.text == "before after"
            assert stream.events[-1].name == "run.ended"
        await eventually_async(lambda: _is_ready(client), what="the edge is ready again")
        while not peer.prompts.empty():
            peer.prompts.get_nowait()  # What was sent during the outage may arrive late.
        async with OpenStream(client, "POST", path, json={"content": "again"}) as stream:
            prompt = await peer.next_prompt()
            while prompt.content != "again":
                prompt = await peer.next_prompt()
            again = prompt
            await taken(lambda: peer.answer(again, ["well"]))
            await stream.to_end()
            assert stream.text == "well"
    assert edge.process.poll() is None


async def taken(append: Callable[[], Awaitable[object]]) -> None:
    """Append again until the broker has taken it: a broker that comes back needs its time. Copies are ignored by every reader."""

    async def done() -> bool:
        try:
            await append()
        except AppendFailed:
            return False
        return True

    await eventually_async(done, what="the broker takes it")


async def _is_ready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/readyz")).status_code == 200
