"""Edges in a whole system: what a quick client may do right after an answer, on whichever edge it lands."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import httpx

from edge.auth import mint_token
from infra.secrets import load_secrets
from schemas.vocabulary import Tier
from tests.integration.edge_peers import parse_events, text_of
from tests.integration.running import RunningSystem
from tests.integration.waiting import PATIENCE_S, eventually_async

VARIABLES = {
    "TURNLOG_EDGES": "2",
    "TURNLOG_SCRIPTED_TOKENS": "40",
    "TURNLOG_SCRIPTED_DELAY_MS": "5",
}
TURNS = 5
ACCOUNTS = 8


async def answered(
    client: httpx.AsyncClient,
    method: str,
    path: str,
    *,
    key: str = "",
    **body: Any,
) -> httpx.Response:
    """The answer to a client that comes back with its key where a part of a slow system is late; refused it may not be."""
    headers = {"idempotency-key": key} if key else {}

    async def answer() -> httpx.Response | None:
        found = await client.request(method, path, json=body or None, headers=headers)
        return None if found.status_code == 503 else found

    return await eventually_async(answer, within_s=2 * PATIENCE_S, what="no part is late")


async def test_turns_without_a_pause_across_edges_make_one_chain_and_are_never_refused(
    running: RunningSystem,
) -> None:
    key = load_secrets(running.home).token_key

    async def converse(number: int) -> None:
        # One answer at a time: the second turn needs the first one's place at once.
        token = mint_token(
            key=key, account_id=f"quick-{number}", tier=Tier.FREE, ttl=timedelta(hours=1)
        )
        headers = {"authorization": f"Bearer {token}"}
        async with (
            httpx.AsyncClient(base_url=running.urls[0], headers=headers, timeout=PATIENCE_S) as one,
            httpx.AsyncClient(base_url=running.urls[1], headers=headers, timeout=PATIENCE_S) as two,
        ):
            made = await answered(one, "POST", "/v1/chats", title="")
            chat_id = made.json()["id"]
            path = f"/v1/chats/{chat_id}/messages"
            said: list[str] = []
            for turn in range(TURNS):
                client = (one, two)[(number + turn) % 2]
                asked = f"turn-{turn}"
                answer = await answered(client, "POST", path, key=asked, content=f"turn {turn}")
                assert answer.status_code == 200, answer.text
                events = parse_events(answer.content)
                assert events[-1].data["status"] == "done"
                said += [f"turn {turn}", text_of(events)]
                for reader in (one, two):
                    listed = (await answered(reader, "GET", path)).json()["data"]
                    assert [message["content"] for message in listed] == said
                    parents = [message["parent_id"] for message in listed]
                    assert parents == [None, *(message["id"] for message in listed[:-1])]

    await asyncio.gather(*(converse(number) for number in range(ACCOUNTS)))


async def test_one_key_is_one_run_however_many_ask_at_once(running: RunningSystem) -> None:
    key = load_secrets(running.home).token_key
    token = mint_token(key=key, account_id="keyed", tier=Tier.TEAM, ttl=timedelta(hours=1))
    headers = {"authorization": f"Bearer {token}"}
    async with (
        httpx.AsyncClient(base_url=running.urls[0], headers=headers, timeout=PATIENCE_S) as one,
        httpx.AsyncClient(base_url=running.urls[1], headers=headers, timeout=PATIENCE_S) as two,
    ):
        for number in range(5):
            made = await answered(one, "POST", "/v1/chats", title="")
            chat_id = made.json()["id"]
            path = f"/v1/chats/{chat_id}/messages"
            same = f"k-{number}"
            answers = await asyncio.gather(
                *(
                    answered(client, "POST", path, key=same, content="Hi", stream=stream)
                    for client in (one, two)
                    for stream in (True, False)
                )
            )
            assert [answer.status_code for answer in answers] == [200] * 4
            assert len({answer.headers["turnlog-run-id"] for answer in answers}) == 1
            streamed = {text_of(parse_events(a.content)) for a in answers[::2]}
            whole = {a.json()["content"] for a in answers[1::2]}
            assert streamed == whole
            other = await answered(two, "POST", path, key=same, content="Ho")
            assert other.status_code == 422
            assert other.json()["error"]["code"] == "idempotency_conflict"
            assert len((await answered(one, "GET", path)).json()["data"]) == 2
