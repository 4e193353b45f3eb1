"""Edges in a whole system: what a quick client may do right after an answer, on whichever edge it lands."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import httpx

from edge.auth import mint_token
from infra.secrets import load_secrets
from schemas.vocabulary import Tier
from tests.integration.edge_peers import new_chat, parse_events, text_of
from tests.integration.running import RunningSystem
from tests.integration.waiting import PATIENCE_S

VARIABLES = {
    "TURNLOG_EDGES": "2",
    "TURNLOG_SCRIPTED_TOKENS": "40",
    "TURNLOG_SCRIPTED_DELAY_MS": "5",
}
TURNS = 5
ACCOUNTS = 8


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
            chat_id = await new_chat(one)
            path = f"/v1/chats/{chat_id}/messages"
            said: list[str] = []
            for turn in range(TURNS):
                client = (one, two)[(number + turn) % 2]
                answer = await client.post(path, json={"content": f"turn {turn}"})
                assert answer.status_code == 200, answer.text
                events = parse_events(answer.content)
                assert events[-1].data["status"] == "done"
                said += [f"turn {turn}", text_of(events)]
                for reader in (one, two):
                    listed = (await reader.get(path)).json()["data"]
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
            chat_id = await new_chat(one)
            path = f"/v1/chats/{chat_id}/messages"
            same = {"idempotency-key": f"k-{number}"}
            answers = await asyncio.gather(
                *(
                    client.post(path, json={"content": "Hi", "stream": stream}, headers=same)
                    for client in (one, two)
                    for stream in (True, False)
                )
            )
            assert [answer.status_code for answer in answers] == [200] * 4
            assert len({answer.headers["turnlog-run-id"] for answer in answers}) == 1
            streamed = {text_of(parse_events(a.content)) for a in answers[::2]}
            whole = {a.json()["content"] for a in answers[1::2]}
            assert streamed == whole
            other = await two.post(path, json={"content": "Ho"}, headers=same)
            assert other.status_code == 422
            assert other.json()["error"]["code"] == "idempotency_conflict"
            assert len((await one.get(path)).json()["data"]) == 2
