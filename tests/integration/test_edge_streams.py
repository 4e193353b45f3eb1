"""Streaming of real edge processes: resume, several viewers, framing, and what happens when an edge goes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest

from infra.command.topics import apply_topics
from tests.integration.edge_peers import (
    MODEL,
    EdgeProcess,
    ScriptedPeer,
    SseEvent,
    parse_events,
    read_events,
    scripted_peer,
    text_of,
)
from tests.integration.running import RunningBroker
from tests.integration.waiting import eventually_async

EdgeFactory = Callable[[], EdgeProcess]


@pytest.fixture(scope="module")
def bootstrap(broker: RunningBroker) -> str:
    asyncio.run(apply_topics(broker.bootstrap, models=(MODEL,), partitions=12))
    return broker.bootstrap


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("edge-home")


@pytest.fixture(scope="module")
def edges(home: Path, bootstrap: str) -> Iterator[tuple[EdgeProcess, EdgeProcess]]:
    first, second = (EdgeProcess(home=home, bootstrap=bootstrap) for _ in range(2))
    yield first.wait_ready(), second.wait_ready()
    first.end()
    second.end()


@pytest.fixture
async def peer(home: Path, bootstrap: str) -> AsyncIterator[ScriptedPeer]:
    async with scripted_peer(home, bootstrap) as found:
        yield found


async def new_chat(client: httpx.AsyncClient) -> str:
    response = await client.post("/v1/chats", json={})
    assert response.status_code == 201, response.text
    return str(response.json()["id"])


async def test_a_message_streams_from_its_queueing_to_its_end(
    edges: tuple[EdgeProcess, EdgeProcess], peer: ScriptedPeer
) -> None:
    async with peer.client(edges[0]) as client:
        chat_id = await new_chat(client)
        peer.auto = lambda prompt: peer.answer(prompt, ["Hel", "lo", "."])
        response = await client.post(f"/v1/chats/{chat_id}/messages", json={"content": "Hi"})
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no"
        assert "no-cache" in response.headers["cache-control"]
        events = parse_events(response.content)
        run_id = response.headers["turnlog-run-id"]
        assert response.headers["location"] == f"/v1/chats/{chat_id}/runs/{run_id}"
        assert [event.name for event in events] == [
            "run.queued",
            "run.started",
            *["message.delta"] * 3,
            "run.ended",
        ]
        assert text_of(events) == "Hello."
        assert events[0].data["run_id"] == run_id
        assert events[-1].data == {
            "status": "done",
            "finish_reason": "stop",
            "usage": {"input_tokens": 7, "output_tokens": 3},
            "message_id": events[0].data["message_id"],
        }


async def test_a_run_resumes_at_every_event_id_on_another_edge(
    edges: tuple[EdgeProcess, EdgeProcess], peer: ScriptedPeer
) -> None:
    pieces = ["a", "é", "\n\n", "\r", "data: x", "\u2028", "👩‍👩‍👧", "\x00", " end"]
    async with peer.client(edges[0]) as one, peer.client(edges[1]) as two:
        chat_id = await new_chat(one)
        peer.auto = lambda prompt: peer.answer(prompt, pieces)
        response = await one.post(f"/v1/chats/{chat_id}/messages", json={"content": "Hi"})
        events = parse_events(response.content)
        assert text_of(events) == "".join(pieces)
        path = response.headers["location"] + "/events"
        assert len({event.id for event in events}) == len(events)
        for at, event in enumerate(events):
            rest = await read_events(two, path, after=event.id)
            assert text_of(rest) == text_of(events[at + 1 :])
            by_query = await two.get(path, params={"after": event.id})
            assert parse_events(by_query.content) == rest
            if rest:
                assert rest[-1] == events[-1]
        assert (await two.get(path, headers={"last-event-id": events[-1].id})).status_code == 204
        assert await read_events(two, path) != []


async def test_a_killed_edge_loses_no_token_of_an_answer_that_goes_on(
    home: Path, bootstrap: str, edges: tuple[EdgeProcess, EdgeProcess], peer: ScriptedPeer
) -> None:
    doomed = EdgeProcess(home=home, bootstrap=bootstrap).wait_ready()
    events: list[SseEvent] = []
    async with peer.client(doomed) as client, peer.client(edges[1]) as other:
        chat_id = await new_chat(client)
        posting = asyncio.ensure_future(_post(client, chat_id, events))
        prompt = await peer.next_prompt()
        await peer.queue(prompt)
        await peer.start(prompt.run_id)
        for index in range(5):
            await peer.say(prompt.run_id, index, f"[{index}]")
        await eventually_async(
            lambda: _has_index(events, 4), within_s=10, what="five deltas have come"
        )
        doomed.end(signal.SIGKILL)
        await posting
        for index in range(5, 9):
            await peer.say(prompt.run_id, index, f"[{index}]")
        await peer.finish(prompt.run_id, 9)
        path = f"/v1/chats/{chat_id}/runs/{prompt.run_id}/events"
        rest = await read_events(other, path, after=events[-1].id)
        assert text_of(events) + text_of(rest) == "".join(f"[{i}]" for i in range(9))


async def _has_index(events: list[SseEvent], index: int) -> bool:
    return bool(events) and events[-1].data.get("index") == index


async def _post(client: httpx.AsyncClient, chat_id: str, events: list[SseEvent]) -> None:
    body = b""
    try:
        async with client.stream(
            "POST", f"/v1/chats/{chat_id}/messages", json={"content": "Hi"}
        ) as response:
            async for piece in response.aiter_raw():
                body += piece
                whole, _, _ = body.rpartition(b"\n\n")
                events[:] = parse_events(whole + b"\n\n") if whole else []
    except httpx.TransportError:
        pass  # The edge was killed, or it is what the test is about.
