"""What an edge says of a chat, or does to it: with what the log has had when it was asked, also where its tail is a moment behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx

from edge.app import build_app
from edge.appends import Appends
from edge.auth import mint_token
from edge.catch_up import CatchUp
from edge.decisions.requests import fingerprint
from edge.loop_lag import LoopLag
from edge.metrics import Metrics
from edge.own_chats import OwnChats
from edge.runs import RunTable
from edge.soft_views import Accounts, BrokerClock, Workers
from edge.start_gap import StartGap
from edge.state import EdgeState
from edge.streams import Streams
from infra.history.sqlite import HISTORY_FILE, open_history
from infra.history.sqlite_writer import HistoryWriter
from infra.log.records import LogRecord
from infra.log.span_reader import SpanReader
from infra.secrets import load_secrets
from producers.log_writer import Appended, LogWriter
from schemas.codec import Envelope
from schemas.events import Event
from schemas.events.account_snapshots import IdempotencyKeyBound
from schemas.events.chats import ChatCreated, ChatDeleted
from schemas.events.tokens import RunCancelled
from schemas.ids import RANDOM_BYTES, RunAddress, mint_chat_id, mint_message_id, mint_run_id
from schemas.topics import Topic
from schemas.vocabulary import Tier
from tests.run_samples import queued

DEADLINE_S = 60.0
ACCOUNT = "anna"
EPOCH = 7
FAR_MS = 1 << 50
"""No bucket has got anything back by then."""
RANDOM = bytes(RANDOM_BYTES)


def _record(offset: int, event: Event) -> LogRecord:
    return LogRecord(0, offset, 1_000, Envelope(event=event, event_id="e", cause_id="", trace=""))


def store(home: Path, record: LogRecord) -> None:
    writer = HistoryWriter(home / HISTORY_FILE)
    writer.apply([record], {})
    writer.close()


class AheadLog(SpanReader):
    """A log that has one record which the edge's tail brings only after it was asked where it ends."""

    runs: RunTable
    record: LogRecord

    async def ends(self, topic: Topic, partitions: list[int]) -> dict[int, int]:
        asyncio.get_running_loop().call_soon(self.runs.apply, [self.record])
        return dict.fromkeys(partitions, self.record.offset + 1)


class TakingLog(LogWriter):
    """A log that takes everything at once."""

    def __init__(self) -> None:
        super().__init__(bootstrap="127.0.0.1:1", client_id="test")
        self.taken: list[Event] = []

    async def partitions_of(self, topic: Topic) -> int:
        return 1

    async def send(self, topic: Topic, event: Event, **_: Any) -> asyncio.Future[Appended]:
        self.taken.append(event)
        appended: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        appended.set_result(Appended(partition=0, offset=1, appended_ms=2_000))
        return appended


class BehindEdge:
    """An edge whose store has the chat, and which has read nothing of the run that another edge has begun in it."""

    edge: EdgeState
    record: LogRecord

    def __init__(self, home: Path) -> None:
        key = load_secrets(home).id_key
        address = RunAddress(epoch=EPOCH, partition=0, mint_offset=10)
        self.chat_id = mint_chat_id(key=key, account_id=ACCOUNT, random=RANDOM)
        self.answer_id = mint_message_id(key=key, account_id=ACCOUNT, random=RANDOM)
        self.run_id = mint_run_id(key=key, account_id=ACCOUNT, address=address, random=RANDOM)
        self.log = TakingLog()

    @asynccontextmanager
    async def client(self, home: Path) -> AsyncIterator[httpx.AsyncClient]:
        """A client of the chat's account."""
        store(home, _record(0, ChatCreated(chat_id=self.chat_id, account_id=ACCOUNT)))
        clock = BrokerClock(monotonic=time.monotonic, wall=time.time)
        secrets = load_secrets(home)
        runs = RunTable(epoch=EPOCH, starts={0: 10}, now=time.monotonic)
        reader = AheadLog(bootstrap="127.0.0.1:1", client_id="test")
        reader.runs = runs
        run = queued(
            self.run_id,
            account_id=ACCOUNT,
            chat_id=self.chat_id,
            assistant_message_id=self.answer_id,
        )
        reader.record = self.record = _record(10, run)
        async with asyncio.timeout(DEADLINE_S), open_history(home / HISTORY_FILE) as history:
            edge = EdgeState(
                home=home,
                low_disk_mb=0,
                secrets=secrets,
                partitions=1,
                models={},
                appends=Appends(self.log),
                reader=reader,
                history=history,
                chats=OwnChats(history),
                runs=runs,
                catch_up=CatchUp(runs=runs, reader=reader, history=history),
                workers=Workers(clock),
                accounts=Accounts(clock),
                clock=clock,
                gap=StartGap(history=history, ends={}),
                streams=Streams(),
                lag=LoopLag(),
                metrics=Metrics(),
            )
            self.edge = edge
            token = mint_token(
                key=secrets.token_key,
                account_id=ACCOUNT,
                tier=Tier.PLUS,
                ttl=timedelta(hours=1),
            )
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(build_app(edge)),
                base_url="http://edge",
                headers={"authorization": f"Bearer {token}"},
            ) as client:
                yield client


async def test_a_chat_is_deleted_with_the_run_that_another_edge_has_begun_in_it(
    tmp_path: Path,
) -> None:
    behind = BehindEdge(tmp_path)
    async with behind.client(tmp_path) as client:
        answer = await client.delete(f"/v1/chats/{behind.chat_id}")
        assert answer.status_code == 204, answer.text
    cancelled, deleted = behind.log.taken
    assert isinstance(cancelled, RunCancelled)
    assert cancelled.run_id == behind.run_id
    assert isinstance(deleted, ChatDeleted)


async def test_a_chat_is_told_with_the_answer_that_another_edge_has_begun_in_it(
    tmp_path: Path,
) -> None:
    """I15: the other edge has shown it."""
    behind = BehindEdge(tmp_path)
    path = f"/v1/chats/{behind.chat_id}"
    async with behind.client(tmp_path) as client:
        read = await client.get(path)
        assert read.json()["current_leaf"] == behind.answer_id


async def test_chats_are_listed_with_the_answer_that_another_edge_has_begun(
    tmp_path: Path,
) -> None:
    behind = BehindEdge(tmp_path)
    async with behind.client(tmp_path) as client:
        (chat,) = (await client.get("/v1/chats")).json()["data"]
        assert chat["current_leaf"] == behind.answer_id


async def test_a_chat_is_renamed_and_told_with_the_answer_that_another_edge_has_begun_in_it(
    tmp_path: Path,
) -> None:
    behind = BehindEdge(tmp_path)
    async with behind.client(tmp_path) as client:
        renamed = await client.patch(f"/v1/chats/{behind.chat_id}", json={"title": "new"})
        assert renamed.json()["current_leaf"] == behind.answer_id


async def test_a_repeat_amid_a_flood_attaches_as_long_as_the_chat_is_there(tmp_path: Path) -> None:
    behind = BehindEdge(tmp_path)
    path, body = f"/v1/chats/{behind.chat_id}/messages", {"content": "Hi", "background": True}
    async with behind.client(tmp_path) as client:
        edge = behind.edge
        edge.runs.apply([behind.record])
        edge.accounts.note(
            IdempotencyKeyBound(
                account_id=ACCOUNT,
                idempotency_key="k",
                run_id=behind.run_id,
                fingerprint=fingerprint(path, body),
                source_offset=1,
                appended_ms=edge.clock.now_ms(),
            ),
            0,
        )
        while not edge.bounds.prompt(ACCOUNT, Tier.PLUS, None, now_ms=FAR_MS):
            pass
        repeated = await client.post(path, json=body, headers={"idempotency-key": "k"})
        assert (repeated.status_code, repeated.json()["id"]) == (202, behind.run_id)
        deleted = ChatDeleted(chat_id=behind.chat_id, account_id=ACCOUNT)
        store(tmp_path, _record(1, deleted))
        gone = await client.post(path, json=body, headers={"idempotency-key": "k"})
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_found")
    assert behind.log.taken == []
