"""Real edge processes over a real broker, and a scripted peer that plays admission, worker and projector on the log."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Self

import httpx

from edge.auth import mint_token
from infra.history.sqlite import HISTORY_FILE
from infra.history.sqlite_writer import HistoryWriter
from infra.log.records import LogRecord
from infra.log.span_reader import SpanReader
from infra.log.tail import Tail
from infra.secrets import load_secrets
from producers.log_writer import Appended, LogWriter
from schemas.codec import Envelope
from schemas.events import Event
from schemas.events.accounts import PromptSubmitted
from schemas.events.admissions import PromptAdmitted
from schemas.events.chats import ChatCreated
from schemas.events.outcomes import RunConcluded
from schemas.events.tokens import (
    AttemptStarted,
    Refusal,
    RunCancelled,
    RunEnded,
    RunQueued,
    RunRedirected,
    TokensGenerated,
)
from schemas.ids import derived_event_id
from schemas.topics import ACCOUNTS, ADMISSIONS, CHATS, OUTCOMES, TOKENS, WORKERS, Topic
from schemas.vocabulary import EndCause, EndWriter, FinishReason, Lane, Tier
from tests.integration.changed_limits import with_limits
from tests.integration.processes import end_process, start_module
from tests.integration.running import free_ports
from tests.integration.waiting import ACK_WAIT_MS, PATIENCE_S, eventually, eventually_async

MODEL: Final = "smollm2-135m"
NONCE: Final = "nonce-1"
LATE: Final = (b'"log_behind"', b"as many streams as it can serve in time")
"""What an edge on a slow machine says of itself."""


class EdgeProcess:
    """One `python -m edge.server`. `limits` are constants of modules that are others than usual."""

    def __init__(
        self,
        *,
        home: Path,
        bootstrap: str,
        variables: Mapping[str, str] = {},
        limits: Mapping[str, int] = {},
    ) -> None:
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = home / f"edge-{self.port}.log"
        home.mkdir(parents=True, exist_ok=True)
        chosen = {
            "TURNLOG_HOME": str(home),
            "TURNLOG_KAFKA": bootstrap,
            "TURNLOG_PORT": str(self.port),
            "TURNLOG_LOW_DISK_MB": "0",
        }
        self.process = start_module(
            *with_limits("edge.server", limits),
            log=self.log_path,
            variables={**chosen, **variables},
        )

    def wait_ready(self) -> Self:
        """Wait until it serves."""

        def ready() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"the edge ended early ({self.process.returncode})")
            with suppress(httpx.TransportError):
                return httpx.get(f"{self.url}/readyz", timeout=PATIENCE_S).status_code == 200
            return False

        eventually(ready, what="the edge is ready")
        return self

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send the signal, wait for the end and give the exit code."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        """Wait until it ends by itself; its exit code."""
        return self.process.wait(timeout=PATIENCE_S)

    def end(self) -> None:
        """However it stands."""
        end_process(self.process)


class _ComingBack(httpx.AsyncHTTPTransport):
    """Comes back where an edge says that it is late itself, as clients do: that tells of the machine, and not of what is tested."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        async def answer() -> httpx.Response | None:
            response = await super(_ComingBack, self).handle_async_request(request)
            if response.status_code != 503:
                return response
            body = await response.aread()
            if any(words in body for words in LATE):
                return None
            return httpx.Response(503, headers=response.headers, content=body)

        return await eventually_async(answer, what="the edge is in time")


class ScriptedPeer:
    """Speaks on the log as the other processes would, exactly as told."""

    def __init__(self, writer: LogWriter, home: Path) -> None:
        self.writer = writer
        self.secrets = load_secrets(home)
        self.prompts: asyncio.Queue[PromptSubmitted] = asyncio.Queue()
        self.cancels: asyncio.Queue[RunCancelled] = asyncio.Queue()
        """Also those of earlier tests' runs, which an edge gives up late."""
        self.cancelled: dict[str, RunCancelled] = {}
        """The first cancel of each run."""
        self._another_cancel = asyncio.Event()
        self.auto: Callable[[PromptSubmitted], Any] | None = None
        """Called with each prompt; its coroutine is awaited in order."""
        self.projecting = asyncio.Event()
        """Clear it to hold the projection back."""
        self.projecting.set()
        self._history = HistoryWriter(home / HISTORY_FILE)
        self._writing = asyncio.Lock()
        self._reached: dict[tuple[str, int], int] = {}
        self._chats: set[str] = set()
        self._stored = asyncio.Event()
        self._serial = 0

    async def append(self, topic: Topic, event: Event) -> Appended:
        """Append with a fresh event id."""
        self._serial += 1
        event_id = derived_event_id(f"peer-{os.getpid()}-{time.monotonic_ns()}", str(self._serial))
        return await self.writer.append(topic, event, event_id=event_id, wait_ms_max=ACK_WAIT_MS)

    async def queue(self, prompt: PromptSubmitted, **changes: Any) -> Appended:
        """Admit the prompt; unless the projection is held back, the store has it when this returns."""
        admitted: dict[str, Any] = {
            "run_id": prompt.run_id,
            "account_id": prompt.account_id,
            "chat_id": prompt.chat_id,
            "tier": prompt.tier,
            "lane": Lane.PLUS,
            "model": MODEL,
            "user_message_id": prompt.user_message_id,
            "assistant_message_id": prompt.assistant_message_id,
            "parent_id": prompt.parent_id,
            "input_budget_tokens": 1_000,
            "granted_output_tokens": 500,
            "deadline_ms": 60_000,
        }
        queued = RunQueued(**{**admitted, **changes})
        appended = await self.append(TOKENS, queued)
        last = await self.append(ADMISSIONS, PromptAdmitted(**admitted, content=prompt.content))
        if self.projecting.is_set():
            at = (ADMISSIONS.name, last.partition)
            await self._until(lambda: self._reached.get(at, 0) > last.offset)
        return appended

    async def new_chat(self, client: httpx.AsyncClient, **fields: Any) -> str:
        """A new chat's id; unless the projection is held back, the store has it, and so every edge, when this returns."""
        chat_id = await new_chat(client, **fields)
        if self.projecting.is_set():
            await self._until(lambda: chat_id in self._chats)
        return chat_id

    async def _until(self, stored: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not stored():
                self._stored.clear()
                await self._stored.wait()

    async def refuse(self, prompt: PromptSubmitted, refusal: Refusal) -> Appended:
        """Refuse the prompt."""
        ended = RunEnded(
            run_id=prompt.run_id,
            cause=EndCause.REFUSED,
            writer=EndWriter.ADMISSION,
            refusal=refusal,
        )
        return await self.append(TOKENS, ended)

    async def redirect(self, prompt: PromptSubmitted, to_run_id: str | None) -> Appended:
        """The idempotency key was bound already."""
        redirected = RunRedirected(
            run_id=prompt.run_id, account_id=prompt.account_id, to_run_id=to_run_id
        )
        return await self.append(TOKENS, redirected)

    async def start(
        self, run_id: str, *, attempt: int = 1, nonce: str = NONCE, input_tokens: int = 7
    ) -> Appended:
        """Start an attempt."""
        return await self.append(
            TOKENS,
            AttemptStarted(
                run_id=run_id,
                attempt=attempt,
                nonce=nonce,
                worker_id="peer",
                input_tokens=input_tokens,
            ),
        )

    async def say(
        self, run_id: str, index: int, text: str, *, count: int = 1, nonce: str = NONCE
    ) -> Appended:
        """One delta."""
        return await self.append(
            TOKENS,
            TokensGenerated(run_id=run_id, nonce=nonce, index=index, count=count, text=text),
        )

    async def finish(
        self, run_id: str, end: int, *, cause: EndCause = EndCause.STOP, nonce: str = NONCE
    ) -> Appended:
        """The worker's end."""
        return await self.append(
            TOKENS,
            RunEnded(run_id=run_id, cause=cause, writer=EndWriter.WORKER, nonce=nonce, end=end),
        )

    async def conclude(self, prompt: PromptSubmitted, text: str, ended: Appended, n: int) -> None:
        """What the recorder writes after the end."""
        await self.append(
            OUTCOMES,
            RunConcluded(
                run_id=prompt.run_id,
                account_id=prompt.account_id,
                chat_id=prompt.chat_id,
                user_message_id=prompt.user_message_id,
                assistant_message_id=prompt.assistant_message_id,
                tier=prompt.tier,
                model=MODEL,
                text=text,
                input_tokens=7,
                output_tokens=n,
                finish_reason=FinishReason.STOP,
                attempts=1,
                end_offset=ended.offset,
            ),
        )

    async def store_past_answer(
        self, chat_id: str, run_id: str, text: str, *, end_offset: int
    ) -> None:
        """A concluded run straight into the store, as if its log were long gone."""
        concluded = RunConcluded(
            run_id=run_id,
            account_id="anna",
            chat_id=chat_id,
            user_message_id="msg_past_user",
            assistant_message_id="msg_past_answer",
            tier=Tier.PLUS,
            model=MODEL,
            text=text,
            input_tokens=7,
            output_tokens=2,
            finish_reason=FinishReason.STOP,
            attempts=1,
            end_offset=end_offset,
        )
        envelope = Envelope(event=concluded, event_id="past", cause_id="", trace="")
        async with self._writing:
            await asyncio.to_thread(self._history.apply, [LogRecord(0, 0, 1_000, envelope)], {})

    async def answer(self, prompt: PromptSubmitted, pieces: list[str]) -> Appended:
        """The whole course: admitted, started, one delta a piece, stopped, concluded."""
        await self.queue(prompt)
        await self.start(prompt.run_id)
        for index, piece in enumerate(pieces):
            await self.say(prompt.run_id, index, piece)
        ended = await self.finish(prompt.run_id, len(pieces))
        await self.conclude(prompt, "".join(pieces), ended, len(pieces))
        return ended

    async def next_prompt(self) -> PromptSubmitted:
        """The next prompt that an edge has appended."""
        return await asyncio.wait_for(self.prompts.get(), PATIENCE_S)

    async def cancel_of(self, run_id: str) -> RunCancelled:
        """The run's first cancel, once there is one."""
        async with asyncio.timeout(PATIENCE_S):
            while run_id not in self.cancelled:
                self._another_cancel.clear()
                await self._another_cancel.wait()
        return self.cancelled[run_id]

    def token(self, account: str, *, tier: Tier = Tier.PLUS, ttl_s: float = 3600) -> str:
        """A token of this system."""
        return mint_token(
            key=self.secrets.token_key,
            account_id=account,
            tier=tier,
            ttl=timedelta(seconds=ttl_s),
        )

    def client(self, edge: EdgeProcess, account: str = "anna") -> httpx.AsyncClient:
        """An HTTP client of one account on one edge."""
        headers = {"authorization": f"Bearer {self.token(account)}"}
        return httpx.AsyncClient(
            base_url=edge.url, headers=headers, timeout=PATIENCE_S, transport=_ComingBack()
        )

    async def _read_prompts(self, tail: Tail) -> None:
        while True:
            for record in await tail.read():
                if isinstance(record, LogRecord) and isinstance(record.event, PromptSubmitted):
                    if self.auto is not None:
                        await self.auto(record.event)
                    else:
                        self.prompts.put_nowait(record.event)

    async def _read_cancels(self, tail: Tail) -> None:
        while True:
            for record in await tail.read():
                if isinstance(record, LogRecord) and isinstance(record.event, RunCancelled):
                    self.cancels.put_nowait(record.event)
                    self.cancelled.setdefault(record.event.run_id, record.event)
            self._another_cancel.set()

    async def _store(self, topic: Topic, records: list[LogRecord], tail: Tail) -> None:
        reached = {(topic.name, p): offset for p, offset in tail.positions.items()}
        async with self._writing:
            await asyncio.to_thread(self._history.apply, records, reached)
        self._reached.update(reached)
        self._chats.update(r.event.chat_id for r in records if isinstance(r.event, ChatCreated))
        self._stored.set()

    async def _project(self, topic: Topic, tail: Tail) -> None:
        while True:
            records = [r for r in await tail.read(wait_ms=50) if isinstance(r, LogRecord)]
            await self.projecting.wait()
            if records:
                await self._store(topic, records, tail)


@asynccontextmanager
async def scripted_peer(home: Path, bootstrap: str) -> AsyncIterator[ScriptedPeer]:
    """A peer that reads prompts and projects history while the block lasts."""
    async with (
        LogWriter(bootstrap=bootstrap, client_id="peer") as writer,
        SpanReader(bootstrap=bootstrap, client_id="peer") as reader,
    ):
        peer = ScriptedPeer(writer, home)
        for topic in (ADMISSIONS, OUTCOMES, WORKERS):
            await writer.partitions_of(topic)  # Asked for now, and not in the middle of a test.
        partitions = list(range(await writer.partitions_of(TOKENS)))
        topics = (ACCOUNTS, TOKENS, CHATS, ADMISSIONS, OUTCOMES)
        tails = []
        for topic in topics:
            ends = {p: b.end for p, b in (await reader.bounds(topic, partitions)).items()}
            tails.append(Tail(bootstrap=bootstrap, client_id="peer", topic=topic, starts=ends))
        accounts, tokens, *projected = tails
        async with (
            accounts,
            tokens,
            projected[0],
            projected[1],
            projected[2],
            asyncio.TaskGroup() as group,
        ):
            for topic, tail in zip(topics[2:], projected, strict=True):
                await peer._store(topic, [], tail)  # What lies before counts as projected.
            tasks = [
                group.create_task(peer._read_prompts(accounts)),
                group.create_task(peer._read_cancels(tokens)),
                *(
                    group.create_task(peer._project(topic, tail))
                    for topic, tail in zip(topics[2:], projected, strict=True)
                ),
            ]
            yield peer
            for task in tasks:
                task.cancel()


@dataclass(frozen=True, slots=True, kw_only=True)
class SseEvent:
    """One event as a client reads it."""

    name: str
    id: str
    data: dict[str, Any]


def parse_events(raw: bytes) -> list[SseEvent]:
    """Whole events, strictly: three lines and a blank one, or a comment."""
    events = []
    assert raw == b"" or raw.endswith(b"\n\n"), "ends after a complete event"
    for block in raw.split(b"\n\n")[:-1]:
        if block.startswith(b":"):
            continue
        lines = block.split(b"\n")
        assert [line.split(b": ", 1)[0] for line in lines] == [b"event", b"id", b"data"], block
        name, event_id, data = (line.split(b": ", 1)[1] for line in lines)
        events.append(SseEvent(name=name.decode(), id=event_id.decode(), data=json.loads(data)))
    return events


async def read_events(
    client: httpx.AsyncClient, path: str, *, after: str | None = None
) -> list[SseEvent]:
    """All events of a stream, to its end."""
    headers = {"last-event-id": after} if after is not None else {}
    response = await client.get(path, headers=headers)
    if response.status_code == 204:
        return []
    assert response.status_code == 200, response.text
    return parse_events(response.content)


def text_of(events: list[SseEvent]) -> str:
    """What a client shows: a snapshot replaces, a delta adds."""
    text = ""
    for event in events:
        if event.name == "run.snapshot":
            text = event.data["text"]
        elif event.name == "message.delta":
            text += event.data["text"]
    return text


async def new_chat(client: httpx.AsyncClient, **fields: Any) -> str:
    """A new chat's id."""
    response = await client.post("/v1/chats", json=fields)
    assert response.status_code == 201, response.text
    return str(response.json()["id"])


async def metric(client: httpx.AsyncClient, name: str) -> float:
    """What the client's edge has counted under this name, with its labels; 0 before it has any."""
    lines = (await client.get("/metrics")).text.splitlines()
    found = (line.rpartition(" ") for line in lines)
    return next((float(value) for key, _, value in found if key == name), 0.0)


async def until_run(client: httpx.AsyncClient, path: str, **fields: Any) -> None:
    """Wait until the client's edge says this of the run: another edge may have read further."""

    async def said() -> bool:
        found = (await client.get(path)).json()
        return all(found.get(name) == value for name, value in fields.items())

    await eventually_async(said, what=f"the run is told with {fields}")


async def until_cancelled(client: httpx.AsyncClient, path: str) -> None:
    """Repeat the cancel of the run until the client's edge has read that it is."""

    async def cancelled() -> bool:
        answer = await client.post(path + "/cancel")
        assert answer.status_code == 202, answer.text
        return bool(answer.json()["status"] == "cancelled")

    await eventually_async(cancelled, what="the cancel is told")


class OpenStream:
    """A stream that is being read: what has come so far, event by event."""

    def __init__(self, client: httpx.AsyncClient, method: str, path: str, **options: Any) -> None:
        self._request = (client, method, path, options)
        self._task: asyncio.Future[None] | None = None
        self._body = b""
        self._changed = asyncio.Event()
        self.status = 0
        self.headers = httpx.Headers()
        self.broken = False
        """The connection ended without a complete response."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.ensure_future(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        client, method, path, options = self._request
        try:
            async with client.stream(method, path, **options) as response:
                self.status, self.headers = response.status_code, response.headers
                async for piece in response.aiter_raw():
                    self._body += piece
                    self._changed.set()
        except httpx.TransportError:
            self.broken = True
        finally:
            self._changed.set()

    @property
    def events(self) -> list[SseEvent]:
        """The complete events so far."""
        whole, _, _ = self._body.rpartition(b"\n\n")
        return parse_events(whole + b"\n\n") if whole else []

    @property
    def text(self) -> str:
        """The text so far."""
        return text_of(self.events)

    @property
    def raw(self) -> bytes:
        """The body so far."""
        return self._body

    async def until(self, condition: Callable[[list[SseEvent]], bool]) -> None:
        """Wait until the events so far fulfil the condition."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition(self.events):
                assert self._task is not None
                assert not self._task.done(), f"ended with {self.status}: {self._body[-300:]!r}"
                self._changed.clear()
                await self._changed.wait()

    async def until_text(self, text: str) -> None:
        """Wait until this is the text so far."""
        await self.until(lambda events: text_of(events) == text)

    async def to_end(self) -> list[SseEvent]:
        """Wait for the end of the stream and give all events."""
        assert self._task is not None
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait([self._task])
        return self.events
