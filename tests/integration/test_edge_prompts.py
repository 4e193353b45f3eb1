"""Posting, refusals, redirects, cancels and lists of real edge processes, with a scripted peer on the log."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from infra.log.span_reader import SpanReader
from producers.log_writer import acknowledged
from schemas.events.tokens import Refusal
from schemas.events.workers import WorkerLoadReported
from schemas.ids import run_address
from schemas.topics import ACCOUNT_SNAPSHOTS, TOKENS, WORKERS
from schemas.vocabulary import CancelReason, EndCause, FinishReason, RefusalReason
from tests.integration.conftest import EdgeFactory
from tests.integration.edge_peers import (
    MODEL,
    EdgeProcess,
    OpenStream,
    ScriptedPeer,
    metric,
    parse_events,
    read_events,
    text_of,
    until_cancelled,
    until_run,
)
from tests.integration.waiting import PATIENCE_S, eventually_async

Edges = tuple[EdgeProcess, EdgeProcess]
UNDECODABLE = "turnlog_edge_undecodable_records_total"


async def test_the_prompt_on_the_log_carries_what_admission_decides_by(
    edges: Edges, peer: ScriptedPeer
) -> None:
    async with peer.client(edges[0]) as client:
        chat_id = await peer.new_chat(client, system_prompt="Be brief.")
        body = {
            "content": "What is 2+2?",
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 3,
            "stop": ["END"],
            "max_output_tokens": 9,
        }
        async with OpenStream(
            client,
            "POST",
            f"/v1/chats/{chat_id}/messages",
            json=body,
            headers={"idempotency-key": "k-1"},
        ):
            prompt = await peer.next_prompt()
        assert prompt.account_id == "anna"
        assert prompt.content == "What is 2+2?"
        assert prompt.parent_id is None
        assert prompt.stop == ("END",)
        assert (prompt.sampling.temperature, prompt.sampling.seed) == (0.5, 3)
        assert prompt.max_output_tokens == 9
        assert prompt.idempotency_key == "k-1"
        assert len(prompt.fingerprint) == 32
        assert 10 < prompt.prompt_tokens[MODEL] < 60
        assert {wait.model for wait in prompt.load.waits} == {MODEL}
        assert run_address(prompt.run_id).partition < 12


@pytest.mark.parametrize(
    ("refusal", "status", "headers"),
    [
        (Refusal(reason=RefusalReason.RUN_IN_PROGRESS), 409, {"x-should-retry": "false"}),
        (
            Refusal(reason=RefusalReason.TOO_MANY_RUNS, retry_after_ms=2000),
            429,
            {"retry-after": "2"},
        ),
        (
            Refusal(reason=RefusalReason.QUOTA_EXHAUSTED, window_ends_ms=1_900_000_000_000),
            429,
            {"x-should-retry": "false"},
        ),
        (Refusal(reason=RefusalReason.OVERLOADED, wait_ms=7000), 503, {"retry-after": "7"}),
        (Refusal(reason=RefusalReason.MODEL_NOT_ALLOWED), 422, {}),
        (Refusal(reason=RefusalReason.CONTENT_BLOCKED), 400, {}),
    ],
)
async def test_a_refusal_is_a_real_status_before_any_stream(
    edges: Edges,
    peer: ScriptedPeer,
    refusal: Refusal,
    status: int,
    headers: dict[str, str],
) -> None:
    async with peer.client(edges[0]) as client:
        chat_id = await peer.new_chat(client)
        peer.auto = lambda prompt: peer.refuse(prompt, refusal)
        answer = await client.post(f"/v1/chats/{chat_id}/messages", json={"content": "Hi"})
        assert answer.status_code == status
        error = answer.json()["error"]
        assert error["code"] == refusal.reason.value
        for name, value in headers.items():
            assert answer.headers[name] == value
        if refusal.wait_ms is not None:
            assert error["wait_ms"] == 7000
        if refusal.window_ends_ms is not None:
            assert error["window_ends_at"] == "2030-03-17T17:46:40.000Z"
        listed = (await client.get(f"/v1/chats/{chat_id}/messages")).json()
        assert listed == {"data": [], "next_cursor": None}, "a refusal leaves no message"


async def test_a_bound_key_leads_to_its_run_whatever_the_delivery(
    edges: Edges, peer: ScriptedPeer
) -> None:
    async with peer.client(edges[0]) as one, peer.client(edges[1]) as two:
        chat_id = await peer.new_chat(one)
        path, key = f"/v1/chats/{chat_id}/messages", {"idempotency-key": "same"}
        async with OpenStream(one, "POST", path, json={"content": "Hi"}, headers=key) as stream:
            first = await peer.next_prompt()
            await peer.queue(first)
            await peer.start(first.run_id)
            await peer.say(first.run_id, 0, "Hel")
            await stream.until_text("Hel")
            async with OpenStream(two, "POST", path, json={"content": "Hi"}, headers=key) as again:
                second = await peer.next_prompt()
                assert second.fingerprint == first.fingerprint
                await peer.redirect(second, first.run_id)
                await again.until_text("Hel")
                assert again.headers["turnlog-run-id"] == first.run_id
                await peer.say(first.run_id, 1, "lo")
                ended = await peer.finish(first.run_id, 2)
                await peer.conclude(first, "Hello", ended, 2)
                assert text_of(await again.to_end()) == "Hello"
                assert (await stream.to_end())[-1] == again.events[-1]
        # The loser's own id leads to the winner, with the winner's event ids.
        loser = f"/v1/chats/{chat_id}/runs/{second.run_id}"
        events = await read_events(two, loser + "/events", after=again.events[0].id)
        assert text_of(events) == "Hello"
        assert (await two.get(loser)).json()["id"] == first.run_id
        peer.auto = lambda prompt: peer.redirect(prompt, first.run_id)
        waited = await two.post(path, json={"content": "Hi", "stream": False}, headers=key)
        assert waited.json()["content"] == "Hello"
        later = await one.post(path, json={"content": "Hi", "background": True}, headers=key)
        assert later.status_code == 202
        assert later.json()["id"] == first.run_id
        assert later.headers["location"] == f"/v1/chats/{chat_id}/runs/{first.run_id}"


async def test_a_key_with_another_body_is_a_conflict(edges: Edges, peer: ScriptedPeer) -> None:
    async with peer.client(edges[0]) as client:
        chat_id = await peer.new_chat(client)
        peer.auto = lambda prompt: peer.redirect(prompt, None)
        answer = await client.post(
            f"/v1/chats/{chat_id}/messages",
            json={"content": "Hi"},
            headers={"idempotency-key": "other"},
        )
        assert answer.status_code == 422
        assert answer.json()["error"]["code"] == "idempotency_conflict"
        assert answer.headers["x-should-retry"] == "false"


async def test_an_undecided_prompt_is_given_up_and_cancelled_unless_it_has_a_key(
    another_edge: EdgeFactory, peer: ScriptedPeer
) -> None:
    edge = another_edge(TURNLOG_PART="edge-7").wait_ready()
    async with peer.client(edge) as client:
        chat_id = await peer.new_chat(client)
        path = f"/v1/chats/{chat_id}/messages"
        without, with_key = await asyncio.gather(
            client.post(path, json={"content": "Hi"}),
            client.post(path, json={"content": "Hi"}, headers={"idempotency-key": "late"}),
        )
        for answer in (without, with_key):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "admission_timeout"
        prompts = [await peer.next_prompt(), await peer.next_prompt()]
        given_up = next(p for p in prompts if p.run_id == without.json()["error"]["run_id"])
        kept = next(p for p in prompts if p.run_id == with_key.json()["error"]["run_id"])
        cancel = await peer.cancel_of(given_up.run_id)
        assert cancel.reason is CancelReason.GAVE_UP
        assert kept.run_id not in peer.cancelled
        await peer.queue(given_up)  # Admission comes back: the run is cancelled where it is queued.
        events = await read_events(client, f"/v1/chats/{chat_id}/runs/{cancel.run_id}/events")
        assert [event.name for event in events] == ["run.queued", "run.ended"]
        assert events[0].id != events[1].id
        assert events[-1].data["status"] == "cancelled"


async def test_without_a_stream_the_answer_comes_whole(edges: Edges, peer: ScriptedPeer) -> None:
    async with peer.client(edges[0]) as client:
        chat_id = await peer.new_chat(client)
        peer.auto = lambda prompt: peer.answer(prompt, ["Hel", "lo"])
        path = f"/v1/chats/{chat_id}/messages"
        message = (await client.post(path, json={"content": "Hi", "stream": False})).json()
        assert message["content"] == "Hello"
        assert (message["status"], message["finish_reason"]) == ("done", "stop")
        assert (message["role"], message["token_count"]) == ("assistant", 2)
        listed = (await client.get(path)).json()["data"]
        assert listed[-1] == message
        assert listed[-1]["parent_id"] == listed[0]["id"]


async def test_a_failed_answer_without_a_stream_is_a_500_that_names_the_run(
    edges: Edges, peer: ScriptedPeer
) -> None:
    async with peer.client(edges[0]) as client:
        chat_id = await peer.new_chat(client)
        waiting = asyncio.ensure_future(
            client.post(f"/v1/chats/{chat_id}/messages", json={"content": "Hi", "stream": False})
        )
        prompt = await peer.next_prompt()
        await peer.queue(prompt)
        await peer.start(prompt.run_id)
        await peer.finish(prompt.run_id, 0, cause=EndCause.ERROR)
        answer = await waiting
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "generation_failed"
        assert answer.json()["error"]["run_id"] == prompt.run_id


async def test_a_client_that_leaves_does_not_end_its_run(edges: Edges, peer: ScriptedPeer) -> None:
    async with peer.client(edges[0]) as client:
        chat_id = await peer.new_chat(client)
        path = f"/v1/chats/{chat_id}/messages"
        async with OpenStream(client, "POST", path, json={"content": "Hi"}) as stream:
            prompt = await peer.next_prompt()
            await peer.queue(prompt)
            await peer.start(prompt.run_id)
            await peer.say(prompt.run_id, 0, "a")
            await stream.until_text("a")
        await peer.say(prompt.run_id, 1, "b")
        run = f"/v1/chats/{chat_id}/runs/{prompt.run_id}"
        await until_run(client, run, text="ab")
        assert prompt.run_id not in peer.cancelled
        await peer.finish(prompt.run_id, 2)
        await until_run(client, run, status="done")


async def test_a_cancel_ends_the_answer_at_its_place_and_may_be_repeated(
    edges: Edges, peer: ScriptedPeer
) -> None:
    async with peer.client(edges[0]) as one, peer.client(edges[1]) as two:
        chat_id = await peer.new_chat(one)
        path = f"/v1/chats/{chat_id}/messages"
        async with OpenStream(one, "POST", path, json={"content": "Hi"}) as stream:
            prompt = await peer.next_prompt()
            await peer.queue(prompt)
            await peer.start(prompt.run_id)
            await peer.say(prompt.run_id, 0, "kept")
            await stream.until_text("kept")
            run = f"/v1/chats/{chat_id}/runs/{prompt.run_id}"
            first = await two.post(run + "/cancel")
            assert (first.status_code, first.json()["run_id"]) == (202, prompt.run_id)
            await until_cancelled(two, run)
            await peer.say(prompt.run_id, 1, "never")
            ended = (await stream.to_end())[-1]
            assert stream.text == "kept"
            assert (ended.data["status"], ended.data["finish_reason"]) == ("cancelled", "cancelled")
            assert ended.data["usage"]["output_tokens"] == 1
            again = await one.post(run + "/cancel")
            assert (again.status_code, again.json()["status"]) == (202, "cancelled")
            foreign = peer.client(edges[0], account="ben")
            async with foreign:
                assert (await foreign.post(run + "/cancel")).status_code == 404
        found = (await one.get(run)).json()
        assert (found["text"], found["status"]) == ("kept", "cancelled")


async def test_a_cancel_before_the_decision_is_kept_by_the_runs_own_stream(
    edges: Edges, peer: ScriptedPeer
) -> None:
    async with peer.client(edges[0]) as one, peer.client(edges[1]) as two:
        chat_id = await peer.new_chat(one)
        path = f"/v1/chats/{chat_id}/messages"
        async with OpenStream(one, "POST", path, json={"content": "Hi"}) as stream:
            prompt = await peer.next_prompt()
            cancelled = await two.post(f"/v1/chats/{chat_id}/runs/{prompt.run_id}/cancel")
            assert cancelled.status_code == 202
            await peer.queue(prompt)
            events = await stream.to_end()
            assert [event.name for event in events] == ["run.queued", "run.ended"]
            assert events[-1].data["status"] == "cancelled"
        await until_cancelled(two, f"/v1/chats/{chat_id}/runs/{prompt.run_id}")


async def test_a_message_right_after_an_end_follows_that_answer_though_the_store_lags(
    edges: Edges, peer: ScriptedPeer
) -> None:
    async with peer.client(edges[0]) as one, peer.client(edges[1]) as two:
        chat_id = await peer.new_chat(one)
        path = f"/v1/chats/{chat_id}/messages"
        peer.projecting.clear()
        peer.auto = lambda prompt: peer.answer(prompt, ["first"])
        async with OpenStream(one, "POST", path, json={"content": "1"}) as stream:
            first = (await stream.to_end())[-1]
        peer.auto = None
        async with OpenStream(two, "POST", path, json={"content": "2"}) as second:
            prompt = await peer.next_prompt()
            assert prompt.parent_id == first.data["message_id"]
            assert stream.headers["turnlog-run-id"] in prompt.ended_runs
            await peer.queue(prompt)
            await peer.start(prompt.run_id)
            await peer.say(prompt.run_id, 0, "sec")
            await second.until_text("sec")
            # Nothing of this is in the store: all of it comes from the log.
            for client in (one, two):
                listed = (await client.get(path)).json()["data"]
                assert [(m["role"], m["content"], m["status"]) for m in listed] == [
                    ("user", "1", "done"),
                    ("assistant", "first", "done"),
                    ("user", "2", "done"),
                    ("assistant", "sec", "streaming"),
                ]
                assert (await client.get(f"/v1/chats/{chat_id}")).json()["current_leaf"] == (
                    listed[-1]["id"]
                )
            peer.projecting.set()
            await eventually_async(
                lambda: _same_after_projection(one, path, listed),
                what="the store tells the same",
            )


async def test_a_message_to_an_edge_that_has_read_nothing_of_the_last_turn_follows_it_all_the_same(
    edges: Edges, peer: ScriptedPeer
) -> None:
    one, two = edges
    async with peer.client(one) as client:
        chat_id = await peer.new_chat(client)
        path = f"/v1/chats/{chat_id}/messages"
        peer.projecting.clear()
        for _ in range(5):
            os.kill(two.process.pid, signal.SIGSTOP)
            try:
                peer.auto = lambda prompt: peer.answer(prompt, ["said"])
                async with OpenStream(client, "POST", path, json={"content": "1"}) as stream:
                    said = (await stream.to_end())[-1]
                peer.auto = None
                reader, writer = await asyncio.open_connection("127.0.0.1", two.port)
                writer.write(
                    f"POST {path} HTTP/1.0\r\nauthorization: Bearer {peer.token('anna')}\r\n"
                    'content-length: 15\r\n\r\n{"content":"2"}'.encode()
                )
                await writer.drain()
            finally:
                os.kill(two.process.pid, signal.SIGCONT)
            prompt = await peer.next_prompt()
            assert prompt.parent_id == said.data["message_id"]
            assert stream.headers["turnlog-run-id"] in prompt.ended_runs
            await peer.refuse(prompt, Refusal(reason=RefusalReason.RUN_IN_PROGRESS))
            assert (await asyncio.wait_for(reader.read(), PATIENCE_S)).startswith(b"HTTP/1.1 409")
            writer.close()


async def test_an_edge_that_starts_while_the_store_lags_does_not_guess_a_parent(
    edges: Edges, edge_home: Path, edge_bootstrap: str, peer: ScriptedPeer
) -> None:
    async with peer.client(edges[0]) as client:
        chat_id = await peer.new_chat(client)
        path = f"/v1/chats/{chat_id}/messages"
        peer.projecting.clear()
        peer.auto = lambda prompt: peer.answer(prompt, ["first"])
        async with OpenStream(client, "POST", path, json={"content": "1"}) as stream:
            first = (await stream.to_end())[-1]
    fresh = EdgeProcess(home=edge_home, bootstrap=edge_bootstrap).wait_ready()
    try:
        async with peer.client(fresh) as client:
            early = await client.post(path, json={"content": "2"})
            assert (early.status_code, early.json()["error"]["code"]) == (503, "history_behind")
            assert (await client.get(path)).status_code == 503
            peer.projecting.set()
            peer.auto = None

            async def listed() -> bool:
                return (await client.get(path)).status_code == 200

            await eventually_async(listed, what="the store has caught up")
            async with OpenStream(client, "POST", path, json={"content": "2"}):
                prompt = await peer.next_prompt()
                assert prompt.parent_id == first.data["message_id"]
    finally:
        fresh.end()


async def _same_after_projection(
    client: httpx.AsyncClient, path: str, before: list[dict[str, object]]
) -> bool:
    return bool((await client.get(path)).json().get("data") == before)


async def test_branches_are_told_apart_by_their_leaf_and_paged_oldest_first(
    edges: Edges, peer: ScriptedPeer
) -> None:
    async with peer.client(edges[0]) as client:
        chat_id = await peer.new_chat(client)
        path = f"/v1/chats/{chat_id}/messages"
        peer.auto = lambda prompt: peer.answer(prompt, [prompt.content.upper()])
        a = (await client.post(path, json={"content": "a", "stream": False})).json()
        b = (await client.post(path, json={"content": "b", "stream": False})).json()
        c = (
            await client.post(path, json={"content": "c", "stream": False, "parent_id": a["id"]})
        ).json()
        assert await _contents(client, path) == ["a", "A", "c", "C"]
        assert await _contents(client, path, leaf=b["id"]) == ["a", "A", "b", "B"]
        assert await _contents(client, path, leaf=a["id"]) == ["a", "A"]
        assert (await client.get(f"/v1/chats/{chat_id}")).json()["current_leaf"] == c["id"]
        seen: list[str] = []
        cursor: str | None = None
        while True:
            params: dict[str, str | int] = {"limit": 3, "leaf": b["id"]}
            if cursor:
                params["cursor"] = cursor
            page = (await client.get(path, params=params)).json()
            seen += [message["content"] for message in page["data"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert seen == ["a", "A", "b", "B"]


async def _contents(client: httpx.AsyncClient, path: str, leaf: str | None = None) -> list[str]:
    listed = await client.get(path, params={"leaf": leaf} if leaf else {})
    return [message["content"] for message in listed.json()["data"]]


async def test_chats_are_listed_by_activity_renamed_and_deleted(
    edges: Edges, peer: ScriptedPeer
) -> None:
    async with (
        peer.client(edges[0], account="carl") as one,
        peer.client(edges[1], account="carl") as two,
    ):
        chats = [await peer.new_chat(one, title=f"chat {number}") for number in range(5)]
        peer.auto = lambda prompt: peer.answer(prompt, ["x"])
        await one.post(f"/v1/chats/{chats[1]}/messages", json={"content": "x", "stream": False})
        seen: list[str] = []
        cursor: str | None = None
        while True:
            params = {"limit": "2", **({"cursor": cursor} if cursor else {})}
            page = (await two.get("/v1/chats", params=params)).json()
            seen += [chat["id"] for chat in page["data"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert seen == [chats[1], chats[4], chats[3], chats[2], chats[0]]
        renamed = await two.patch(f"/v1/chats/{chats[0]}", json={"title": "Neu ✨"})
        assert renamed.json()["title"] == "Neu ✨"

        async def renamed_elsewhere() -> bool:
            return bool((await one.get(f"/v1/chats/{chats[0]}")).json()["title"] == "Neu ✨")

        async def deleted_elsewhere() -> bool:
            return (await two.get(f"/v1/chats/{chats[0]}")).status_code == 404

        await eventually_async(renamed_elsewhere, what="the other edge shows the title")
        assert (await one.delete(f"/v1/chats/{chats[0]}")).status_code == 204
        await eventually_async(deleted_elsewhere, what="the other edge knows of the deletion")
        assert (await one.delete(f"/v1/chats/{chats[0]}")).status_code == 404
        async with peer.client(edges[0], account="dora") as other:
            assert (await other.get("/v1/chats")).json() == {"data": [], "next_cursor": None}
            assert (await other.get(f"/v1/chats/{chats[1]}")).status_code == 404


async def test_a_deleted_chat_ends_what_is_still_answered_in_it(
    edges: Edges, peer: ScriptedPeer
) -> None:
    async with peer.client(edges[0]) as client:
        chat_id = await peer.new_chat(client)
        path = f"/v1/chats/{chat_id}/messages"
        async with OpenStream(client, "POST", path, json={"content": "Hi"}) as stream:
            prompt = await peer.next_prompt()
            await peer.queue(prompt)
            await stream.until(bool)
            assert (await client.delete(f"/v1/chats/{chat_id}")).status_code == 204
            assert (await stream.to_end())[-1].data["finish_reason"] == FinishReason.CANCELLED
        assert (await client.post(path, json={"content": "x"})).status_code == 404


async def test_an_edge_that_never_saw_a_run_begin_cancels_it_with_its_chat(
    edges: Edges, edge_home: Path, edge_bootstrap: str, peer: ScriptedPeer
) -> None:
    async with peer.client(edges[0]) as client:
        chat_id = await peer.new_chat(client)
        peer.projecting.clear()
        path = f"/v1/chats/{chat_id}/messages"
        async with OpenStream(client, "POST", path, json={"content": "Hi"}) as stream:
            prompt = await peer.next_prompt()
            await peer.queue(prompt)
            await stream.until(bool)
            late = EdgeProcess(home=edge_home, bootstrap=edge_bootstrap).wait_ready()
            try:
                async with peer.client(late) as fresh:
                    early = await fresh.delete(f"/v1/chats/{chat_id}")
                    assert early.json()["error"]["code"] == "history_behind"
                    peer.projecting.set()

                    async def deleted() -> bool:
                        return (await fresh.delete(f"/v1/chats/{chat_id}")).status_code == 204

                    await eventually_async(deleted, what="the chat is deleted")
            finally:
                late.end()
            assert (await stream.to_end())[-1].data["finish_reason"] == FinishReason.CANCELLED


async def test_a_run_leaves_an_overloaded_partition_for_one_that_has_room(
    edges: Edges, peer: ScriptedPeer
) -> None:
    everything = tuple(range(12))
    async with peer.client(edges[0]) as client:
        chat_id = await peer.new_chat(client)
        path = f"/v1/chats/{chat_id}/messages"
        async with OpenStream(client, "POST", path, json={"content": "Hi"}):
            home = await _refused_place(peer)
        others = tuple(p for p in everything if p != home)

        async def placed_elsewhere() -> bool:
            # Reports grow old, so they are made again.
            for name, partitions, queued in (("slow", (home,), 80), ("idle", others, 0)):
                await peer.append(
                    WORKERS,
                    WorkerLoadReported(
                        worker_id=name,
                        model=MODEL,
                        epoch=1,
                        slots=4,
                        busy=4 if queued else 0,
                        queued_requests=queued,
                        queued_tokens=queued * 500,
                        prefill_tokens_per_s=100,
                        decode_tokens_per_s=50,
                        partitions=partitions,
                    ),
                )
            async with OpenStream(client, "POST", path, json={"content": "Hi"}):
                return await _refused_place(peer) != home

        await eventually_async(placed_elsewhere, what="the next run of the chat goes elsewhere")


async def _refused_place(peer: ScriptedPeer) -> int:
    """Where the next prompt's run is. It is refused, so that no edge gives it up in another test."""
    prompt = await peer.next_prompt()
    await peer.refuse(prompt, Refusal(reason=RefusalReason.RUN_IN_PROGRESS))
    return run_address(prompt.run_id).partition


async def test_a_nearly_full_disk_refuses_before_anything_is_appended(
    edge_home: Path, edge_bootstrap: str, peer: ScriptedPeer
) -> None:
    full = EdgeProcess(
        home=edge_home,
        bootstrap=edge_bootstrap,
        variables={"TURNLOG_LOW_DISK_MB": "1000000"},
    ).wait_ready()
    try:
        async with peer.client(full) as client:
            answer = await client.post("/v1/chats", json={})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_low")
            assert "retry-after" in answer.headers
            assert (await client.get("/v1/chats")).status_code == 200, "reading goes on"
        assert peer.prompts.empty()
    finally:
        full.end()


async def test_a_taken_port_is_one_clear_line(
    edges: Edges, edge_home: Path, edge_bootstrap: str
) -> None:
    second = EdgeProcess(
        home=edge_home,
        bootstrap=edge_bootstrap,
        variables={"TURNLOG_PORT": str(edges[0].port)},
    )
    assert await asyncio.to_thread(second.ended) == 2
    assert second.log_path.read_text().strip().splitlines() == [
        f"turnlog: port {edges[0].port} is in use (Address already in use); set TURNLOG_PORT"
    ]


async def test_an_undecodable_record_is_parked_once_counted_and_passed_over(
    edges: Edges, peer: ScriptedPeer, edge_bootstrap: str
) -> None:
    dead = replace(WORKERS, name=WORKERS.dead)
    async with (
        peer.client(edges[0]) as client,
        SpanReader(bootstrap=edge_bootstrap, client_id="test") as reader,
    ):
        chat_id = await peer.new_chat(client)
        before = await reader.bounds(dead, list(range(12)))
        undecodable = await metric(client, UNDECODABLE)
        for topic in (TOKENS, WORKERS, ACCOUNT_SNAPSHOTS):
            for partition in range(12):
                await acknowledged(
                    await peer.writer.send_raw(
                        topic.name, b"\xff{", key=b"x", partition=partition, headers=[("t", b"?")]
                    )
                )
        peer.auto = lambda prompt: peer.answer(prompt, ["goes ", "on"])
        answer = await client.post(f"/v1/chats/{chat_id}/messages", json={"content": "Hi"})
        assert text_of(parse_events(answer.content)) == "goes on"

        async def parked() -> bool:
            after = await reader.bounds(dead, list(range(12)))
            return all(after[p].end == before[p].end + 1 for p in range(12))

        await eventually_async(parked, what="each bad report is parked, once")

        async def counted() -> bool:
            count = await metric(client, UNDECODABLE) - undecodable
            parked = await metric(client, 'turnlog_parked_records{topic="chat.workers.v1"}')
            return (count, parked) == (12, 12 + sum(kept.end for kept in before.values()))

        await eventually_async(counted, what="they are counted, those of the token log too")


async def test_health_readiness_metrics_and_models_are_told(
    edges: Edges, peer: ScriptedPeer
) -> None:
    async with peer.client(edges[0]) as client:
        assert (await client.get("/healthz")).json() == {"status": "ok"}

        async def ready() -> bool:
            checks = (await client.get("/readyz")).json()["checks"]
            assert checks == {"broker": "ok", "tail": "ok", "store": "ok", "draining": "no"}
            return True

        async def measured() -> bool:
            metrics = (await client.get("/metrics")).text
            names = ("open_streams", "viewers_dropped", "loop_lag", "admission_wait", "lateness")
            for name in names:
                assert f"turnlog_edge_{name}" in metrics
            return 'turnlog_parked_records{topic="chat.tokens.v1"}' in metrics

        await eventually_async(ready, what="the broker answers it in time")
        await eventually_async(measured, what="the broker answers it in time")
        models = (await client.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == [MODEL]
