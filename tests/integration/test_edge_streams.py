"""Streaming of real edge processes: resume, several viewers, framing, slow viewers, and what happens when an edge goes."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

import httpx
import pytest

from infra.log.epoch import topic_epoch
from infra.log.span_reader import SpanReader
from schemas.events.tokens import RunCancelled
from schemas.ids import RANDOM_BYTES, RunAddress, mint_run_id
from schemas.topics import TOKENS
from schemas.vocabulary import CancelReason, EndCause
from tests.integration.edge_peers import (
    EdgeProcess,
    OpenStream,
    ScriptedPeer,
    metric,
    parse_events,
    read_events,
    text_of,
    until_run,
)
from tests.integration.waiting import PATIENCE_S, eventually_async

Edges = tuple[EdgeProcess, EdgeProcess]

# What breaks framings: line ends of every kind, empty data, field look-alikes, split and joined characters.
PIECES = [
    "a",
    "é",
    "\n\n",
    "\r",
    "\r\n",
    "data: x",
    "\u2028",
    "\u202e",
    "👩‍👩‍👧",
    "e\u0301",
    "\x00",
    " end",
]


async def test_a_message_streams_from_its_queueing_to_its_end(
    edges: Edges, peer: ScriptedPeer
) -> None:
    async with peer.client(edges[0]) as client:
        chat_id = await peer.new_chat(client)
        peer.auto = lambda prompt: peer.answer(prompt, ["Hel", "lo", "."])
        response = await client.post(f"/v1/chats/{chat_id}/messages", json={"content": "Hi"})
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no"
        assert "no-cache" in response.headers["cache-control"]
        events = parse_events(response.content)
        run_id = response.headers["turnlog-run-id"]
        assert response.headers["location"] == f"/v1/chats/{chat_id}/runs/{run_id}"
        names = [event.name for event in events if event.name != "message.delta"]
        assert names == ["run.queued", "run.started", "run.ended"]
        assert text_of(events) == "Hello."
        assert events[0].data["run_id"] == run_id
        assert events[-1].data == {
            "status": "done",
            "finish_reason": "stop",
            "usage": {"input_tokens": 7, "output_tokens": 3},
            "message_id": events[0].data["message_id"],
        }


async def test_a_run_resumes_at_every_event_id_on_another_edge(
    edges: Edges, peer: ScriptedPeer
) -> None:
    async with peer.client(edges[0]) as one, peer.client(edges[1]) as two:
        chat_id = await peer.new_chat(one)
        peer.auto = lambda prompt: peer.answer(prompt, PIECES)
        response = await one.post(f"/v1/chats/{chat_id}/messages", json={"content": "Hi"})
        events = parse_events(response.content)
        assert text_of(events) == "".join(PIECES)
        path = response.headers["location"] + "/events"
        # What comes live comes in other pieces than what is read back.
        await until_run(two, response.headers["location"], status="done")
        assert len({event.id for event in events}) == len(events)
        for at, event in enumerate(events):
            rest = await read_events(two, path, after=event.id)
            assert text_of(rest) == text_of(events[at + 1 :])
            by_query = await two.get(path, params={"after": event.id})
            assert parse_events(by_query.content) == rest
            if rest:
                assert rest[-1] == events[-1]
        assert (await two.get(path, headers={"last-event-id": events[-1].id})).status_code == 204
        assert text_of(await read_events(two, path)) == "".join(PIECES)


async def test_an_edge_that_starts_later_tells_the_whole_run_and_each_rest_of_it(
    edges: Edges, edge_home: Path, edge_bootstrap: str, peer: ScriptedPeer
) -> None:
    async with peer.client(edges[0]) as client:
        chat_id = await peer.new_chat(client)
        async with OpenStream(
            client, "POST", f"/v1/chats/{chat_id}/messages", json={"content": "Hi"}
        ) as stream:
            prompt = await peer.next_prompt()
            await peer.queue(prompt)
            await peer.start(prompt.run_id)
            for index in range(6):
                await peer.say(prompt.run_id, index, f"<{index}>")
            await stream.until_text("<0><1><2><3><4><5>")
            late = EdgeProcess(home=edge_home, bootstrap=edge_bootstrap).wait_ready()
            try:
                path = f"/v1/chats/{chat_id}/runs/{prompt.run_id}/events"
                async with peer.client(late) as fresh:
                    cursors = [None, *(event.id for event in stream.events)]
                    rests = [
                        OpenStream(
                            fresh, "GET", path, headers={"last-event-id": cursor} if cursor else {}
                        )
                        for cursor in cursors
                    ]
                    for rest in rests:
                        await rest.__aenter__()
                    for index in range(6, 9):
                        await peer.say(prompt.run_id, index, f"<{index}>")
                    await peer.finish(prompt.run_id, 9)
                    whole = await stream.to_end()
                    for at, rest in enumerate(rests):
                        assert text_of(await rest.to_end()) == text_of(whole[at:])
                        assert rest.events[-1] == whole[-1]
                        await rest.__aexit__()
            finally:
                late.end()


async def test_a_killed_edge_loses_no_token_of_an_answer_that_goes_on(
    edges: Edges, edge_home: Path, edge_bootstrap: str, peer: ScriptedPeer
) -> None:
    doomed = EdgeProcess(home=edge_home, bootstrap=edge_bootstrap).wait_ready()
    async with peer.client(doomed) as client, peer.client(edges[1]) as other:
        chat_id = await peer.new_chat(client)
        async with OpenStream(
            client, "POST", f"/v1/chats/{chat_id}/messages", json={"content": "Hi"}
        ) as stream:
            prompt = await peer.next_prompt()
            await peer.queue(prompt)
            await peer.start(prompt.run_id)
            for index in range(5):
                await peer.say(prompt.run_id, index, f"[{index}]")
            await stream.until_text("[0][1][2][3][4]")
            doomed.stop(signal.SIGKILL)
            await stream.to_end()
        for index in range(5, 9):
            await peer.say(prompt.run_id, index, f"[{index}]")
        await peer.finish(prompt.run_id, 9)
        path = f"/v1/chats/{chat_id}/runs/{prompt.run_id}/events"
        rest = await read_events(other, path, after=stream.events[-1].id)
        assert stream.text + text_of(rest) == "".join(f"[{i}]" for i in range(9))


async def test_a_takeover_and_its_zombie_are_one_answer_to_every_viewer(
    edges: Edges, peer: ScriptedPeer
) -> None:
    async with peer.client(edges[0]) as one, peer.client(edges[1]) as two:
        chat_id = await peer.new_chat(one)
        async with OpenStream(
            one, "POST", f"/v1/chats/{chat_id}/messages", json={"content": "Hi"}
        ) as stream:
            prompt = await peer.next_prompt()
            run_id = prompt.run_id
            await peer.queue(prompt)
            await peer.queue(prompt)  # Admission decided again after a crash.
            await peer.start(run_id)
            await peer.say(run_id, 0, "A")
            path = f"/v1/chats/{chat_id}/runs/{run_id}/events"
            async with OpenStream(two, "GET", path) as viewer:
                await viewer.until_text("A")
                await peer.start(run_id, attempt=2, nonce="second")
                await peer.say(run_id, 1, "zombie")
                await peer.say(run_id, 1, "B", nonce="second")
                await peer.finish(run_id, 2)
                await peer.say(run_id, 2, "C", nonce="second")
                await peer.finish(run_id, 3, nonce="second")
                await peer.say(run_id, 3, "late", nonce="second")
                for reader in (stream, viewer):
                    events = await reader.to_end()
                    assert text_of(events) == "ABC"
                    attempts = [e.data["attempt"] for e in events if e.name == "run.started"]
                    assert attempts == [1, 2]
                    assert [event.name for event in events].count("run.ended") == 1
        found = (await two.get(f"/v1/chats/{chat_id}/runs/{run_id}")).json()
        assert (found["attempt"], found["text"], found["status"]) == (2, "ABC", "done")
        assert found["usage"] == {"input_tokens": 7, "output_tokens": 3}


async def test_a_viewer_that_reads_nothing_is_dropped_and_others_go_on(
    edges: Edges, peer: ScriptedPeer
) -> None:
    edge = edges[0]
    async with peer.client(edge) as client:
        chat_id = await peer.new_chat(client)
        async with OpenStream(
            client, "POST", f"/v1/chats/{chat_id}/messages", json={"content": "Hi"}
        ) as stream:
            prompt = await peer.next_prompt()
            run_id = prompt.run_id
            await peer.queue(prompt)
            await peer.start(run_id)
            path = f"/v1/chats/{chat_id}/runs/{run_id}/events"
            dropped = await metric(client, "turnlog_edge_viewers_dropped_total")
            with socket.socket() as stalled:
                stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
                stalled.connect(("127.0.0.1", edge.port))
                token = peer.token("anna")
                stalled.sendall(
                    f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n\r\n".encode()
                )
                await eventually_async(
                    lambda: _metric_is(client, "turnlog_edge_open_streams", at_least=2),
                    what="the stalled viewer has joined",
                )
                text = "x" * 4_000
                for index in range(100):
                    await peer.say(run_id, index, text)
                    if index % 8 == 7:
                        # No more at once than a viewer may have outstanding, also where the edge stood still itself.
                        await stream.until_text(text * (index + 1))
                await eventually_async(
                    lambda: _metric_is(
                        client, "turnlog_edge_viewers_dropped_total", at_least=dropped + 1
                    ),
                    what="the stalled viewer is dropped",
                )
            await peer.finish(run_id, 100)
            assert text_of(await stream.to_end()) == text * 100
            assert stream.events[-1].name == "run.ended"


async def _metric_is(client: httpx.AsyncClient, name: str, *, at_least: float) -> bool:
    return await metric(client, name) >= at_least


async def test_a_draining_edge_ends_streams_after_a_complete_event_and_goes(
    edges: Edges, edge_home: Path, edge_bootstrap: str, peer: ScriptedPeer
) -> None:
    leaving = EdgeProcess(
        home=edge_home,
        bootstrap=edge_bootstrap,
        limits={"edge.server.SHUTDOWN_S_MAX": int(PATIENCE_S)},
    ).wait_ready()
    async with peer.client(leaving) as client, peer.client(edges[0]) as other:
        chat_id = await peer.new_chat(client)
        async with OpenStream(
            client, "POST", f"/v1/chats/{chat_id}/messages", json={"content": "Hi"}
        ) as stream:
            prompt = await peer.next_prompt()
            await peer.queue(prompt)
            await peer.start(prompt.run_id)
            await peer.say(prompt.run_id, 0, "one ")
            await stream.until_text("one ")
            assert await asyncio.to_thread(leaving.stop) == 0, "though the run goes on"
            await stream.to_end()
            assert not stream.broken, "the response was completed"
            parse_events(stream.raw)
            assert stream.events[-1].name == "message.delta"
        await peer.say(prompt.run_id, 1, "two")
        await peer.finish(prompt.run_id, 2)
        path = f"/v1/chats/{chat_id}/runs/{prompt.run_id}/events"
        rest = await read_events(other, path, after=stream.events[-1].id)
        assert stream.text + text_of(rest) == "one two"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_the_wire_form_fits_the_clients_version(
    edges: Edges, peer: ScriptedPeer, version: str
) -> None:
    async with peer.client(edges[0]) as client:
        chat_id = await peer.new_chat(client)
        peer.auto = lambda prompt: peer.answer(prompt, ["Hel", "lo"])
        first = await client.post(f"/v1/chats/{chat_id}/messages", json={"content": "Hi"})
        path = first.headers["location"] + "/events"
        reader, writer = await asyncio.open_connection("127.0.0.1", edges[0].port)
        request = f"GET {path} HTTP/{version}\r\nhost: x\r\nauthorization: Bearer {peer.token('anna')}\r\n\r\n"
        # Two requests at once: the second is answered on the same connection where the version keeps it.
        writer.write(request.encode() * (2 if version == "1.1" else 1))
        if version == "1.0":
            head, _, body = (await asyncio.wait_for(reader.read(), PATIENCE_S)).partition(
                b"\r\n\r\n"
            )
            assert b"transfer-encoding" not in head
            assert text_of(parse_events(body)) == "Hello"
        else:
            for _ in range(2):
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
                assert b"transfer-encoding: chunked" in head
                body = b""
                while size := int(await asyncio.wait_for(reader.readline(), PATIENCE_S), 16):
                    body += await reader.readexactly(size)
                    assert await reader.readexactly(2) == b"\r\n"
                assert await reader.readexactly(2) == b"\r\n"
                assert text_of(parse_events(body)) == "Hello"
        writer.close()


@pytest.mark.parametrize("cursor", ["", "x", "1-", "-1-00000000", "0x5-{digest}", "5-deadbeef"])
async def test_a_cursor_that_is_none_of_this_run_is_named(
    edges: Edges, peer: ScriptedPeer, cursor: str
) -> None:
    async with peer.client(edges[0]) as client:
        chat_id = await peer.new_chat(client)
        peer.auto = lambda prompt: peer.answer(prompt, ["x"])
        response = await client.post(f"/v1/chats/{chat_id}/messages", json={"content": "Hi"})
        last = parse_events(response.content)[-1].id
        cursor = cursor.replace("{digest}", last.partition("-")[2])
        path = response.headers["location"] + "/events"
        refused = await client.get(path, params={"after": cursor})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "after"
        assert refused.json()["error"]["code"] == "invalid_cursor"


@pytest.mark.parametrize("given", ["after", "last-event-id"])
async def test_a_cursor_beyond_the_log_is_refused_and_not_waited_for(
    edges: Edges, peer: ScriptedPeer, given: str
) -> None:
    async with peer.client(edges[0]) as client:
        chat_id = await peer.new_chat(client)
        async with OpenStream(
            client, "POST", f"/v1/chats/{chat_id}/messages", json={"content": "Hi"}
        ) as stream:
            prompt = await peer.next_prompt()
            await peer.queue(prompt)
            await stream.until(lambda events: len(events) > 0)
            beyond = "ffffffff-" + stream.events[0].id.partition("-")[2]
            path = f"/v1/chats/{chat_id}/runs/{prompt.run_id}/events"
            as_header = {"last-event-id": beyond} if given == "last-event-id" else {}
            as_query = {"after": beyond} if given == "after" else {}
            refused = await client.get(path, headers=as_header, params=as_query)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"].lower() == given
            await peer.start(prompt.run_id)
            await peer.finish(prompt.run_id, 0)
            await stream.to_end()


async def test_the_end_of_a_failed_run_says_so(edges: Edges, peer: ScriptedPeer) -> None:
    async with peer.client(edges[0]) as client:
        chat_id = await peer.new_chat(client)
        async with OpenStream(
            client, "POST", f"/v1/chats/{chat_id}/messages", json={"content": "Hi"}
        ) as stream:
            prompt = await peer.next_prompt()
            await peer.queue(prompt)
            await peer.start(prompt.run_id)
            await peer.say(prompt.run_id, 0, "half")
            await peer.finish(prompt.run_id, 1, cause=EndCause.ERROR)
            ended = (await stream.to_end())[-1]
            assert (ended.data["status"], ended.data["finish_reason"]) == ("failed", "error")


@pytest.mark.parametrize(
    ("another", "mint_offset"),
    [(1, 5), (0, 0), (0, 2**40)],
    ids=["another epoch", "no record from there", "beyond the log's end"],
)
async def test_a_run_that_only_history_knows_is_told_as_a_snapshot_and_its_end(
    edges: Edges, edge_bootstrap: str, peer: ScriptedPeer, another: int, mint_offset: int
) -> None:
    async with peer.client(edges[0]) as client:
        chat_id = await peer.new_chat(client)
        # Its records lie on no log that this edge can read, or not where its id says.
        epoch = (await topic_epoch(edge_bootstrap) + another) % 65_536
        run_id = mint_run_id(
            key=peer.secrets.id_key,
            account_id="anna",
            address=RunAddress(epoch=epoch, partition=1, mint_offset=mint_offset),
            random=bytes(RANDOM_BYTES),
        )
        await peer.store_past_answer(chat_id, run_id, "long ago", end_offset=77)
        path = f"/v1/chats/{chat_id}/runs/{run_id}"
        events = await read_events(client, path + "/events")
        assert [event.name for event in events] == ["run.snapshot", "run.ended"]
        assert events[0].data == {"text": "long ago", "count": 2}
        assert await read_events(client, path + "/events", after=events[0].id) == events[1:]
        again = await client.get(path + "/events", headers={"last-event-id": events[1].id})
        assert again.status_code == 204
        found = (await client.get(path)).json()
        assert (found["status"], found["text"]) == ("done", "long ago")
        cancelled = await client.post(path + "/cancel")
        assert (cancelled.status_code, cancelled.json()["status"]) == (202, "done")


async def test_records_of_a_made_up_run_are_nobodys(
    edges: Edges, edge_bootstrap: str, peer: ScriptedPeer
) -> None:
    async with (
        peer.client(edges[0]) as client,
        SpanReader(bootstrap=edge_bootstrap, client_id="test") as reader,
    ):
        chat_id = await peer.new_chat(client)
        bounds = await reader.bounds(TOKENS, [2])
        address = RunAddress(
            epoch=await topic_epoch(edge_bootstrap), partition=2, mint_offset=bounds[2].end
        )
        foreign = mint_run_id(
            key=b"somebody else", account_id="anna", address=address, random=bytes(RANDOM_BYTES)
        )
        await peer.append(TOKENS, RunCancelled(run_id=foreign, reason=CancelReason.USER))
        answer = await client.get(f"/v1/chats/{chat_id}/runs/{foreign}")
        assert answer.status_code == 404
