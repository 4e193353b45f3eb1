"""What every writer of a stream promises, over a real server and real sockets, without a broker."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from edge.answers import json_answer
from edge.decisions.token_cursor import START
from edge.direct_writer import EdgeProtocol, missing_names
from edge.event_stream import EventStream
from edge.runs import RunTable
from edge.server import EdgeServer
from edge.streams import Streams
from infra.log.records import LogRecord
from schemas.codec import Envelope
from schemas.events.tokens import AttemptStarted, RunEnded, RunEvent, TokensGenerated
from schemas.ids import RANDOM_BYTES, RunAddress, mint_run_id
from schemas.vocabulary import EndCause, EndWriter
from tests.run_samples import queued

RUN = mint_run_id(
    key=b"k",
    account_id="a",
    address=RunAddress(epoch=1, partition=0, mint_offset=0),
    random=bytes(RANDOM_BYTES),
)
GET = b"GET /run HTTP/1.1\r\nhost: x\r\n\r\n"
PATIENCE_S = 60.0
PING = b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n"


@dataclass(slots=True)
class Stage:
    """A server with one run, which the test tells."""

    runs: RunTable
    streams: Streams
    port: int
    server: EdgeServer
    offset: int = 0
    tokens: int = 0

    def tell(self, *events: RunEvent) -> None:
        records = []
        for event in events:
            envelope = Envelope(event=event, event_id="e", cause_id="", trace="")
            records.append(LogRecord(0, self.offset, 0, envelope))
            self.offset += 1
        self.runs.apply(records)

    def begin(self) -> None:
        self.tell(
            queued(RUN),
            AttemptStarted(run_id=RUN, attempt=1, nonce="n", worker_id="w", input_tokens=1),
        )

    def say(self, text: str) -> None:
        self.tell(TokensGenerated(run_id=RUN, nonce="n", index=self.tokens, count=1, text=text))
        self.tokens += 1

    def finish(self) -> None:
        self.tell(
            RunEnded(
                run_id=RUN,
                cause=EndCause.STOP,
                writer=EndWriter.WORKER,
                nonce="n",
                end=self.tokens,
            )
        )

    async def connect(
        self, request: bytes = GET
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        return reader, writer

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not condition():  # noqa: ASYNC110 - a condition of the server's, with a deadline
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"not in time: {what}") from None

    async def viewers(self, count: int) -> None:
        run = self.runs.expect(RUN)
        await self.until(lambda: len(run.sinks) == count, f"{count} viewers have joined")


def _app(runs: RunTable, streams: Streams) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        answer = (
            EventStream(run=runs.expect(RUN), cursor=START, streams=streams, headers={})
            if scope["path"] == "/run"
            else json_answer({"pong": True})
        )
        await answer(scope, receive, send)

    return app


@pytest.fixture(params=[EdgeProtocol, HttpToolsProtocol])
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    runs, streams = RunTable(epoch=1, starts={0: 0}, now=time.monotonic), Streams()
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        _app(runs, streams),
        http=request.param,
        lifespan="off",
        log_config=None,
        ws="none",
        timeout_graceful_shutdown=int(PATIENCE_S),
    )
    server = EdgeServer(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    stage = Stage(runs=runs, streams=streams, port=listening.getsockname()[1], server=server)
    await stage.until(lambda: server.started, "the server listens")
    yield stage
    streams.drain()
    server.should_exit = True
    await asyncio.wait_for(serving, PATIENCE_S)


async def read_response(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of one chunked or sized response, parsed strictly."""
    async with asyncio.timeout(PATIENCE_S):
        head = await reader.readuntil(b"\r\n\r\n")
        if b"content-length: " in head:
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            return head, await reader.readexactly(length)
        assert b"transfer-encoding: chunked\r\n" in head
        body = b""
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            assert await reader.readexactly(2) == b"\r\n"
        assert await reader.readexactly(2) == b"\r\n"
        return head, body


def test_the_installed_uvicorn_is_the_one_that_the_fast_path_was_tried_with() -> None:
    assert missing_names() == []


async def test_a_stream_is_strictly_chunked_and_its_connection_is_kept(stage: Stage) -> None:
    reader, writer = await stage.connect()
    stage.begin()
    await stage.viewers(1)
    stage.say("one")
    stage.say("two")
    stage.finish()
    head, body = await read_response(reader)
    assert head.startswith(b"HTTP/1.1 200 ")
    assert body.count(b"event: ") == 5
    assert body.endswith(b"\n\n")
    writer.write(PING)
    _, answer = await read_response(reader)
    assert answer == b'{"pong":true}'
    writer.close()


async def test_all_viewers_get_the_same_bytes_and_late_ones_the_same_text(stage: Stage) -> None:
    stage.begin()
    first, second = await stage.connect(), await stage.connect()
    await stage.viewers(2)
    stage.say("a")
    stage.say("b")
    late = await stage.connect()
    await stage.viewers(3)
    stage.say("c")
    stage.finish()
    bodies = [(await read_response(reader))[1] for reader, _ in (first, second, late)]
    assert bodies[0] == bodies[1]
    assert b'"text":"ab","index":0,"count":2' in bodies[2]
    assert bodies[2].endswith(bodies[0][bodies[0].index(b"event: run.ended") :])
    for _, writer in (first, second, late):
        writer.close()


async def test_a_request_sent_ahead_is_answered_after_the_stream(stage: Stage) -> None:
    stage.begin()
    reader, writer = await stage.connect(GET + PING)
    await stage.viewers(1)
    stage.say("x")
    stage.finish()
    assert b"run.ended" in (await read_response(reader))[1]
    assert (await read_response(reader))[1] == b'{"pong":true}'
    writer.close()


@pytest.mark.parametrize("ahead", [b"", PING])
@pytest.mark.parametrize("hard", [False, True])
async def test_a_viewer_that_leaves_is_forgotten(stage: Stage, ahead: bytes, hard: bool) -> None:
    if ahead and stage.server.config.http_protocol_class is HttpToolsProtocol:
        pytest.skip("plain uvicorn tells only the request that was sent ahead")
    stage.begin()
    _, writer = await stage.connect(GET + ahead)
    await stage.viewers(1)
    if hard:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    run = stage.runs.expect(RUN)

    def gone() -> bool:
        stage.say("x")  # With a request ahead reading is paused: only writing finds out.
        return not run.sinks

    await stage.until(gone, "the viewer is forgotten")
    await stage.until(lambda: not stage.streams.open, "its stream is closed")


async def test_a_stalled_viewer_is_dropped_within_bounds_while_another_goes_on(
    stage: Stage,
) -> None:
    stage.begin()
    healthy = await stage.connect()
    stalled = socket.socket()
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    stalled.setblocking(False)
    await asyncio.get_running_loop().sock_connect(stalled, ("127.0.0.1", stage.port))
    await asyncio.get_running_loop().sock_sendall(stalled, GET)
    await stage.viewers(2)
    reading = asyncio.ensure_future(read_response(healthy[0]))
    text, said = "x" * 2_000, 0
    while stage.streams.dropped == 0:
        stage.say(text)
        said += 1
        assert said < 4_000, "eight megabytes for a viewer that reads nothing"
        await asyncio.sleep(0)
    if isinstance(next(iter(stage.server.server_state.connections)), EdgeProtocol):
        assert said * len(text) < 1_000_000
    stage.finish()
    _, body = await reading
    assert body.count(text.encode()) == said
    stalled.close()
    healthy[1].close()


async def test_a_long_answer_reaches_a_slow_but_reading_viewer_that_comes_late(
    stage: Stage,
) -> None:
    stage.begin()
    text = "é" * 500
    for _ in range(600):
        stage.say(text)
    reader, writer = await stage.connect()
    stage.finish()
    _, body = await read_response(reader)
    assert body.count("é".encode()) == 600 * 500
    assert stage.streams.dropped == 0
    writer.close()


async def test_a_quiet_stream_gets_a_comment(stage: Stage) -> None:
    stage.begin()
    reader, writer = await stage.connect()
    await stage.viewers(1)
    now = asyncio.get_running_loop().time()
    stage.streams.keep_alive(now)
    stage.streams.keep_alive(now + 16)
    stage.finish()
    _, body = await read_response(reader)
    assert body.count(b": keepalive\n\n") == 1
    writer.close()


async def test_a_drain_completes_every_response_and_closes(stage: Stage) -> None:
    stage.begin()
    opened = [await stage.connect() for _ in range(20)]
    await stage.viewers(20)
    stage.say("x")
    stage.streams.drain()
    stage.server.should_exit = True
    for reader, writer in opened:
        _, body = await read_response(reader)
        assert body.endswith(b'{"text":"x","index":0,"count":1}\n\n')
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        writer.close()


async def test_a_head_request_and_an_old_client_get_what_they_can_read(stage: Stage) -> None:
    stage.begin()
    stage.say("x")
    stage.finish()
    reader, writer = await stage.connect(GET.replace(b"GET", b"HEAD") + PING)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
    assert b"text/event-stream" in head
    assert (await read_response(reader))[1] == b'{"pong":true}'
    writer.close()
    if stage.server.config.http_protocol_class is EdgeProtocol:
        reader, writer = await stage.connect(GET.replace(b"1.1", b"1.0"))
        whole = await asyncio.wait_for(reader.read(), PATIENCE_S)
        head, _, body = whole.partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert body.startswith(b"event: run.queued\n")
        assert body.endswith(b"\n\n")
        writer.close()
