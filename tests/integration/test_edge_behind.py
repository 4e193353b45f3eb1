"""An edge whose store lags behind the log, and an edge that has to go: what it answers then."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge.catch_up import FIRST_RECORD_WAIT_S_MAX, CatchUp, RunUnknown
from edge.runs import LiveRun, RunTable
from infra.history.sqlite import open_history
from infra.log.span_reader import SpanReader
from schemas.events.tokens import RunCancelled
from schemas.ids import RANDOM_BYTES, RunAddress, mint_chat_id, mint_run_id
from schemas.topics import TOKENS
from schemas.vocabulary import CancelReason
from tests.integration.conftest import EdgeFactory
from tests.integration.edge_peers import (
    EdgeProcess,
    OpenStream,
    ScriptedPeer,
    new_chat,
    parse_events,
    text_of,
)
from tests.integration.waiting import PATIENCE_S, eventually_async

Edges = tuple[EdgeProcess, EdgeProcess]


async def test_a_client_sees_its_own_chats_though_the_store_has_nothing_of_them(
    edges: Edges, peer: ScriptedPeer
) -> None:
    async with peer.client(edges[0], "erna") as one, peer.client(edges[1], "erna") as two:
        old = await new_chat(one, title="old")
        peer.projecting.clear()
        made = [await new_chat(one, title=title) for title in ("first", "second")]
        peer.auto = lambda prompt: peer.answer(prompt, ["taken"])
        answer = await one.post(f"/v1/chats/{made[0]}/messages", json={"content": "Hi"})
        assert text_of(parse_events(answer.content)) == "taken"
        listed = (await one.get(f"/v1/chats/{made[0]}/messages")).json()["data"]
        assert [message["content"] for message in listed] == ["Hi", "taken"]
        assert await _titles(one) == ["second", "first", "old"]
        renamed = await one.patch(f"/v1/chats/{old}", json={"title": "renamed"})
        assert renamed.json()["title"] == "renamed"
        assert (await one.delete(f"/v1/chats/{made[1]}")).status_code == 204
        assert (await one.get(f"/v1/chats/{made[1]}")).status_code == 404
        assert await _titles(one) == ["renamed", "first"]
        # Another edge cannot know, and says so: it is no 404, which would be final.
        for request in (
            two.get(f"/v1/chats/{made[0]}"),
            two.post(f"/v1/chats/{made[0]}/messages", json={"content": "Hi"}),
        ):
            behind = await request
            assert behind.status_code == 503
            assert behind.json()["error"]["code"] == "history_behind"
            assert behind.headers["retry-after"] == "1"
        peer.projecting.set()

        async def same() -> bool:
            return await _titles(one) == await _titles(two) == ["renamed", "first"]

        await eventually_async(same, what="the store tells the same")
        assert (await two.get(f"/v1/chats/{made[1]}")).status_code == 404


async def _titles(client: httpx.AsyncClient) -> list[str]:
    return [chat["title"] for chat in (await client.get("/v1/chats")).json()["data"]]


async def test_an_edge_that_has_just_started_tells_an_answer_that_the_store_does_not_have(
    edges: Edges, another_edge: EdgeFactory, peer: ScriptedPeer
) -> None:
    """I15: what the edge before it has shown is not taken back, though it holds none of its runs."""
    async with peer.client(edges[0]) as client:
        chat_id = await new_chat(client)
        path = f"/v1/chats/{chat_id}/messages"
        async with OpenStream(client, "POST", path, json={"content": "Hi"}) as stream:
            prompt = await peer.next_prompt()
            await peer.queue(prompt)
            await peer.start(prompt.run_id)
            await peer.say(prompt.run_id, 0, "whole")
            await peer.finish(prompt.run_id, 1)
            await stream.to_end()
    late = another_edge()
    await asyncio.to_thread(late.wait_ready)
    async with peer.client(late) as other:

        async def listed() -> list[dict[str, Any]] | None:
            answer = await other.get(path)
            if answer.status_code == 503:
                return None  # The store does not have the question yet.
            found: list[dict[str, Any]] = answer.json()["data"]
            return found

        messages = await eventually_async(listed, what="the store has the question")
        assert [message["content"] for message in messages] == ["Hi", "whole"]
        assert messages[-1]["status"] == "done"


async def test_a_run_is_unknown_only_to_an_edge_that_has_read_as_far_as_the_log_goes(
    edge_bootstrap: str, peer: ScriptedPeer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge.catch_up.TAIL_WAIT_S_MAX", 600.0)
    async with (
        SpanReader(bootstrap=edge_bootstrap, client_id="test") as reader,
        open_history(tmp_path / "history.db") as history,
    ):
        start = (await reader.bounds(TOKENS, [0]))[0].end
        runs = RunTable(epoch=1, starts={0: start}, now=asyncio.get_running_loop().time)
        catch_up = CatchUp(runs=runs, reader=reader, history=history)

        def minted() -> str:
            return mint_run_id(
                key=peer.secrets.id_key,
                account_id="anna",
                address=RunAddress(epoch=1, partition=0, mint_offset=start),
                random=secrets.token_bytes(RANDOM_BYTES),
            )

        known, never = minted(), minted()
        await peer.append(TOKENS, RunCancelled(run_id=known, reason=CancelReason.USER))
        asked = [asyncio.create_task(catch_up.find(run_id)) for run_id in (known, never)]
        done, _ = await asyncio.wait(asked, timeout=2 * FIRST_RECORD_WAIT_S_MAX)
        assert not done, "another edge may have shown them"
        end = (await reader.bounds(TOKENS, [0]))[0].end
        async for records in reader.span(TOKENS, 0, start, end):
            runs.apply(records)
        found = await asked[0]
        assert isinstance(found, LiveRun)
        assert found.run_id == known
        with pytest.raises(RunUnknown):
            await asked[1]


async def test_an_id_that_was_never_used_is_unknown_where_the_store_is_not_behind(
    edges: Edges, peer: ScriptedPeer
) -> None:
    never = mint_chat_id(key=peer.secrets.id_key, account_id="anna", random=bytes(RANDOM_BYTES))
    async with peer.client(edges[0]) as client:
        for request in (
            client.get(f"/v1/chats/{never}"),
            client.post(f"/v1/chats/{never}/messages", json={"content": "Hi"}),
        ):
            assert (await request).status_code == 404


@pytest.fixture
def leaving(edge_home: Path, edge_bootstrap: str) -> Iterator[EdgeProcess]:
    """An edge that the test tells to go, with more time for it than usual: a busy machine cuts none of its answers off."""
    edge = EdgeProcess(
        home=edge_home,
        bootstrap=edge_bootstrap,
        limits={"edge.server.SHUTDOWN_S_MAX": 8, "edge.bodies.BODY_WAIT_S_MAX": 300},
    )
    yield edge.wait_ready()
    edge.end()


async def test_an_edge_that_goes_answers_what_waits_for_a_decision_and_cancels_it(
    leaving: EdgeProcess, peer: ScriptedPeer
) -> None:
    async with peer.client(leaving) as client:
        chat_id = await new_chat(client)
        path = f"/v1/chats/{chat_id}/messages"
        asked = [
            asyncio.ensure_future(client.post(path, json={"content": "Hi"}, headers=headers))
            for headers in ({}, {"idempotency-key": "stays"})
        ]
        prompts = [await peer.next_prompt() for _ in asked]
        # And one that never says all of what it wants.
        reader, writer = await asyncio.open_connection("127.0.0.1", leaving.port)
        writer.write(
            f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: {client.headers['authorization']}\r\n"
            "content-length: 20\r\n\r\n{".encode()
        )
        await writer.drain()
        assert (await client.get("/healthz")).status_code == 200
        os.kill(leaving.process.pid, signal.SIGTERM)
        without, with_key = await asyncio.gather(*asked)
        runs = {prompt.idempotency_key: prompt.run_id for prompt in prompts}
        for answer, key in ((without, None), (with_key, "stays")):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (503, "draining")
            assert error["run_id"] == runs[key]
            assert answer.headers["x-request-id"]
            assert answer.headers["retry-after"] == "1"
        cancel = await peer.cancel_of(runs[None])
        assert cancel.reason is CancelReason.GAVE_UP
        head, _, body = (await asyncio.wait_for(reader.read(), PATIENCE_S)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"x-request-id: " in head
        assert json.loads(body)["error"]["code"] == "draining"
        writer.close()
        assert await asyncio.to_thread(leaving.ended) == 0
        assert runs["stays"] not in peer.cancelled, "a key is a promise to come back"


@pytest.mark.parametrize("asked", ["messages", "run"])
async def test_what_another_edge_has_shown_is_never_taken_back(
    edges: Edges, peer: ScriptedPeer, asked: str
) -> None:
    """The second edge's tail is a moment behind: what was on the log when it was asked counts."""
    one, two = edges
    async with peer.client(one) as client, peer.client(two) as other:
        chat_id = await peer.new_chat(client)
        for turn in range(1, 6):
            path = f"/v1/chats/{chat_id}/messages"
            async with OpenStream(client, "POST", path, json={"content": "Hi"}) as stream:
                prompt = await peer.next_prompt()
                await peer.queue(prompt)
                await peer.start(prompt.run_id)
                await peer.say(prompt.run_id, 0, "half ")
                await stream.until_text("half ")
                run_path = f"/v1/chats/{chat_id}/runs/{prompt.run_id}"
                assert (await other.get(run_path)).json()["status"] == "streaming"
                wanted = path + "?limit=100" if asked == "messages" else run_path
                request = (
                    f"GET {wanted} HTTP/1.0\r\nauthorization: Bearer {peer.token('anna')}\r\n\r\n"
                )
                os.kill(two.process.pid, signal.SIGSTOP)
                try:
                    await peer.say(prompt.run_id, 1, "whole")
                    ended = await peer.finish(prompt.run_id, 2)
                    await stream.to_end()
                    reader, writer = await asyncio.open_connection("127.0.0.1", two.port)
                    writer.write(request.encode())
                    await writer.drain()
                finally:
                    os.kill(two.process.pid, signal.SIGCONT)
                head, _, body = (await asyncio.wait_for(reader.read(), PATIENCE_S)).partition(
                    b"\r\n\r\n"
                )
                writer.close()
                found = json.loads(body)
                if b" 503 " in head.partition(b"\r\n")[0]:
                    # On a busy machine it may have to say that it is late, but not less than another has shown.
                    assert found["error"]["code"] == "log_behind"
                    found = (await other.get(wanted)).json()
                if asked == "messages":
                    assert len(found["data"]) == 2 * turn
                    (*_, found) = found["data"]
                assert found["status"] == "done"
                assert found["content" if asked == "messages" else "text"] == "half whole"
                await peer.conclude(prompt, "half whole", ended, 2)
