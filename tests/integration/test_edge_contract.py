"""The rim of the HTTP contract, case by case, against a real edge; and that nothing of it reaches the log."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import jwt
import pytest

from edge.auth import AUDIENCE, ISSUER, mint_token
from infra.log.epoch import topic_epoch
from infra.log.records import BadRecord, LogRecord
from infra.log.span_reader import SpanReader
from infra.secrets import Secrets
from schemas.events.tokens import RunCancelled
from schemas.ids import (
    RANDOM_BYTES,
    RunAddress,
    mint_chat_id,
    mint_message_id,
    mint_run_id,
)
from schemas.topics import ACCOUNTS, TOKENS
from schemas.vocabulary import CancelReason, Tier
from tests.contracts.http_cases import ALL, HttpCase
from tests.integration.edge_peers import EdgeProcess, ScriptedPeer
from tests.integration.waiting import PATIENCE_S

RANDOM = bytes(range(RANDOM_BYTES))
OTHER_KEY = b"another key of thirty-two bytes!"


def token_of(kind: str, secrets: Secrets) -> str | None:
    """The Authorization header of a case."""
    key = secrets.token_key
    claims: dict[str, Any] = {
        "account": "anna",
        "tier": "plus",
        "iss": ISSUER,
        "aud": AUDIENCE,
        "exp": datetime.now(UTC) + timedelta(hours=1),
    }
    good = mint_token(key=key, account_id="anna", tier=Tier.PLUS, ttl=timedelta(hours=1))

    def signed(key: bytes = key, **changes: Any) -> str:
        changed = {name: value for name, value in {**claims, **changes}.items() if value}
        return "Bearer " + jwt.encode(changed, key, algorithm="HS256")

    head, body, signature = good.split(".")
    headers = {
        "valid": "Bearer " + good,
        "missing": None,
        "no bearer": "Basic YTpi",
        "empty": "Bearer",
        "nonsense": "Bearer x.y.z",
        "forged": signed(OTHER_KEY),
        "unsigned": "Bearer " + jwt.encode(claims, None, algorithm="none"),
        "expired": signed(exp=datetime.now(UTC) - timedelta(seconds=1)),
        "without a tier": signed(tier=None),
        "of an unknown tier": signed(tier="gold"),
        "for somebody else's service": signed(aud="other"),
        "without an end": signed(exp=None),
        "tampered with": f"Bearer {head}.{body[:-2]}{'AA' if body[-2:] != 'AA' else 'BB'}.{signature}",
    }
    return headers[kind]


@pytest.fixture
async def names(
    edges: tuple[EdgeProcess, EdgeProcess], peer: ScriptedPeer, edge_bootstrap: str
) -> dict[str, str]:
    """What the cases' placeholders stand for."""
    key, epoch = peer.secrets.id_key, await topic_epoch(edge_bootstrap)
    far = RunAddress(epoch=epoch, partition=3, mint_offset=1_000_000)
    async with peer.client(edges[0]) as client:
        chat = await peer.new_chat(client)
        with_leaf = await peer.new_chat(client)
        peer.auto = lambda prompt: peer.answer(prompt, ["x"])
        path = f"/v1/chats/{with_leaf}/messages"
        answered = await client.post(path, json={"content": "x", "stream": False})
        assert answered.status_code == 200, answered.text
        peer.auto = None
        first = (await client.get(path, params={"limit": 1})).json()
        chats = (await client.get("/v1/chats", params={"limit": 1})).json()
    return {
        "chat": chat,
        "CHAT": chat.upper(),
        "forged_chat": chat[:-1] + ("b" if chat[-1] == "a" else "a"),
        "chat_with_leaf": with_leaf,
        "answered_run": answered.json()["run_id"],
        "question": first["data"][0]["id"],
        "messages_cursor": first["next_cursor"],
        "chats_cursor": chats["next_cursor"],
        "run": mint_run_id(key=key, account_id="anna", address=far, random=RANDOM),
        "foreign_chat": mint_chat_id(key=key, account_id="ben", random=RANDOM),
        "foreign_run": mint_run_id(key=key, account_id="ben", address=far, random=RANDOM),
        "foreign_message": mint_message_id(key=key, account_id="ben", random=RANDOM),
    }


async def test_every_case_of_the_rim_is_answered_as_the_contract_says(
    edges: tuple[EdgeProcess, EdgeProcess],
    peer: ScriptedPeer,
    names: dict[str, str],
    edge_bootstrap: str,
) -> None:
    async with (
        httpx.AsyncClient(base_url=edges[0].url, timeout=PATIENCE_S) as client,
        SpanReader(bootstrap=edge_bootstrap, client_id="test") as reader,
    ):
        partitions = list(range(12))
        before = {topic: await reader.bounds(topic, partitions) for topic in (ACCOUNTS, TOKENS)}
        wrong = [line for case in ALL if (line := await _try(client, case, names, peer.secrets))]
        assert wrong == []
        for topic, ends in before.items():
            appended = [
                record
                for partition, now in (await reader.bounds(topic, partitions)).items()
                async for batch in reader.span(topic, partition, ends[partition].end, now.end)
                for record in batch
                if not _is_give_up(record)
            ]
            assert appended == [], "a refused request appends nothing"


def _is_give_up(record: LogRecord | BadRecord) -> bool:
    """An edge gives up an earlier test's prompt late. Those of this test are no prompts, which would show on the account log."""
    event = record.event if isinstance(record, LogRecord) else None
    return isinstance(event, RunCancelled) and event.reason is CancelReason.GAVE_UP


def _filled(text: str, names: dict[str, str]) -> str:
    return re.sub(r"\{([a-zA-Z_]+)\}", lambda match: names[match[1]], text)


async def _try(
    client: httpx.AsyncClient, case: HttpCase, names: dict[str, str], secrets: Secrets
) -> str | None:
    """What is wrong with the answer, None where nothing is."""
    headers = dict(case.headers)
    token = token_of(case.token, secrets)
    if token is not None:
        headers["authorization"] = token
    # As bytes, so that a header may hold what httpx would not encode.
    sent = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
    body = case.body
    if body is not None and b"{foreign_message}" in body:
        body = body.replace(b"{foreign_message}", names["foreign_message"].encode())
    response = await client.request(
        case.method, _filled(case.path, names), content=body, headers=sent
    )
    error = response.json().get("error", {}) if response.content else {}
    found = (response.status_code, error.get("code"), error.get("param"))
    wanted = (case.status, case.code, case.param)
    if found != wanted:
        return f"{case.name}: {found} instead of {wanted}"
    if not {"message", "type", "param", "code"} <= set(error):
        return f"{case.name}: not the one error shape"
    if not response.headers.get("x-request-id"):
        return f"{case.name}: no X-Request-Id"
    if case.status == 401 and "www-authenticate" not in response.headers:
        return f"{case.name}: no WWW-Authenticate"
    return None


async def test_a_body_without_a_length_is_cut_off_while_it_arrives(
    edges: tuple[EdgeProcess, EdgeProcess], peer: ScriptedPeer, names: dict[str, str]
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", edges[0].port)
    head = (
        f"POST /v1/chats/{names['chat']}/messages HTTP/1.1\r\nhost: x\r\n"
        f"authorization: Bearer {peer.token('anna')}\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    writer.write(head.encode())
    piece = b'{"content":"' + b"x" * 30_000
    for _ in range(10):
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
    await writer.drain()
    status = await asyncio.wait_for(reader.readline(), PATIENCE_S)
    assert status.startswith(b"HTTP/1.1 413 ")
    assert b"body_too_large" in await asyncio.wait_for(reader.readuntil(b"}}"), PATIENCE_S)
    writer.close()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00", b"400"),
        (b"GET / SPDY/9\r\n\r\n", b"400"),
        (b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 40_000, b"431"),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 8_000, b"431"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 40_000 + b"\r\n\r\n", b"431"),
        (b"GET /" + b"y" * 40_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", b"431"),
        # More than the server takes at once: it is still being sent when the answer is written.
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 4_000_000, b"431"),
        (
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nx: "
            + b"y" * 40_000
            + b"\r\n\r\n{}GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n",
            b"431",
        ),
    ],
)
async def test_what_is_no_request_is_answered_in_the_one_shape_and_closed(
    edges: tuple[EdgeProcess, EdgeProcess], sent: bytes, status: bytes
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", edges[0].port)
    writer.write(sent)
    answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
    assert answer.startswith(b"HTTP/1.1 " + status), answer
    assert b"x-request-id: " in answer
    assert b'{"error":{"message":' in answer
    writer.close()


async def test_a_head_that_is_never_finished_is_not_waited_for(
    edges: tuple[EdgeProcess, EdgeProcess],
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", edges[0].port)
    writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n")
    assert (await asyncio.wait_for(reader.read(), PATIENCE_S)).startswith(b"HTTP/1.1 408")
    writer.close()


async def test_a_request_id_is_echoed_where_it_is_sane(
    edges: tuple[EdgeProcess, EdgeProcess],
) -> None:
    async with httpx.AsyncClient(base_url=edges[0].url, timeout=PATIENCE_S) as client:
        echoed = await client.get("/healthz", headers={"x-request-id": "abc-1.2_3"})
        assert echoed.headers["x-request-id"] == "abc-1.2_3"
        made = await client.get("/healthz", headers={"x-request-id": "a b\tc" + "d" * 99})
        assert re.fullmatch("[0-9a-f]{24}", made.headers["x-request-id"])


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/chats", "GET, HEAD, POST"),
        ("/v1/chats/x", "DELETE, GET, HEAD, PATCH"),
        ("/v1/chats/x/runs/y/cancel", "POST"),
    ],
)
async def test_a_method_that_a_path_does_not_take_is_answered_with_those_that_it_does(
    edges: tuple[EdgeProcess, EdgeProcess], path: str, allowed: str
) -> None:
    async with httpx.AsyncClient(base_url=edges[0].url, timeout=PATIENCE_S) as client:
        answer = await client.put(path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allowed
