"""The client of the engine's port against a server that misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from inference_workers.loopback_http import EVENT_BYTES_MAX, LoopbackPort

PATIENCE_S = 60.0
STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@asynccontextmanager
async def answering(*parts: bytes) -> AsyncIterator[LoopbackPort]:
    """A server that reads the head of a request, writes the parts one by one, and hangs up."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield LoopbackPort(host="127.0.0.1", port=server.sockets[0].getsockname()[1], key="k")


async def events_of(port: LoopbackPort) -> tuple[list[bytes], bool]:
    events: list[bytes] = []
    async with asyncio.timeout(PATIENCE_S):
        call = await port.open("/x", b"{}", events.append)
        return events, await call.done


async def test_events_cut_anywhere_come_whole_and_in_order() -> None:
    body = STREAM + b"".join(
        chunk(part) for part in (b"data: 1\n", b"\nda", b"ta: 2\n\ndata: 3\n\n", b": ping\n\n")
    )
    body += chunk(b"data: 4\n\n") + b"0\r\n\r\n"
    for size in (1, 7, len(body)):
        parts = [body[at : at + size] for at in range(0, len(body), size)]
        async with answering(*parts) as port:
            assert await events_of(port) == ([b"1", b"2", b"3", b"4"], True)


async def test_a_stream_that_is_cut_off_is_not_complete() -> None:
    async with answering(STREAM, chunk(b"data: 1\n\n")) as port:
        assert await events_of(port) == ([b"1"], False)


async def test_what_is_not_http_is_cut_off() -> None:
    async with answering(b"\x00\x01 nonsense\r\n\r\n") as port:
        assert await events_of(port) == ([], False)
        with pytest.raises(OSError, match="cut off"):
            await port.ask("/x", timeout_s=PATIENCE_S)


async def test_an_event_without_an_end_is_bounded() -> None:
    async with answering(STREAM, *[chunk(b"a" * 65_536)] * (EVENT_BYTES_MAX // 65_536 + 2)) as port:
        assert await events_of(port) == ([], False)


async def test_a_refusal_is_a_status_and_a_body() -> None:
    refusal = b"HTTP/1.1 400 Bad\r\nContent-Length: 4\r\n\r\nnope"
    async with answering(refusal) as port:
        assert await port.ask("/x", b"{}", timeout_s=PATIENCE_S) == (400, b"nope")
    async with answering(refusal) as port:
        assert await events_of(port) == ([], True)


async def test_a_defect_in_the_listener_reaches_whoever_awaits_the_call() -> None:
    def broken(_: bytes) -> None:
        raise ZeroDivisionError

    async with answering(STREAM, chunk(b"data: 1\n\n"), b"0\r\n\r\n") as port:
        call = await port.open("/x", b"{}", broken)
        with pytest.raises(ZeroDivisionError):
            await call.done


async def test_a_late_answer_is_an_error_in_time() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        port = LoopbackPort(host="127.0.0.1", port=server.sockets[0].getsockname()[1], key="k")
        with pytest.raises(OSError):  # noqa: PT011 - the kind is the promise
            await port.ask("/x", timeout_s=0.05)
    with pytest.raises(OSError):  # noqa: PT011
        await port.ask("/x", timeout_s=PATIENCE_S)
