"""A small client of the edge for the command: posts, follows a run's events, and resumes by event id when a stream breaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final, Self

import httpx

RESUMES_MAX: Final = 20
RESUME_WAIT_S: Final = 0.25
CONNECT_WAIT_S: Final = 5.0
READ_WAIT_S: Final = 45.0  # Three keepalives without a byte: the connection is dead.
NO_CONTENT: Final = 204
UNAVAILABLE: Final = 503


class EdgeRefusedError(Exception):
    """The edge answered with an error. The message is one line for a person; `status` is 0 where nothing answered."""

    def __init__(self, line: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(line)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEvent:
    """One server-sent event. `data` is its parsed JSON."""

    name: str
    id: str
    data: dict[str, Any]


class EdgeClient:
    """One account's connection to one edge."""

    def __init__(self, *, url: str, token: str) -> None:
        timeout = httpx.Timeout(READ_WAIT_S, connect=CONNECT_WAIT_S)
        headers = {"Authorization": f"Bearer {token}"}
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout)
        self._url = url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """One JSON request. Raises EdgeRefusedError."""
        try:
            response = await self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise self._unreachable() from error
        _raise_for_refusal(response.status_code, response.content)
        return response.json() if response.content else None

    async def say(
        self, chat_id: str, body: dict[str, Any], *, idempotency_key: str = ""
    ) -> AsyncIterator[ServerEvent]:
        """Post a message and follow its run to the end, over as many connections as it takes. Raises EdgeRefusedError.

        Without an `idempotency_key` a post whose answer is lost is not repeated.
        """
        path = f"/v1/chats/{chat_id}/messages"
        run_id = last_id = ""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        try:
            async with self._http.stream("POST", path, json=body, headers=headers) as response:
                if response.is_error:
                    _raise_for_refusal(response.status_code, await response.aread())
                run_id = response.headers["Turnlog-Run-Id"]
                async for event in _events(response):
                    last_id = event.id
                    yield event
                    if event.name == "run.ended":
                        return
        except httpx.TransportError as error:
            if not run_id:
                raise self._unreachable() from error
        async for event in self.follow(chat_id, run_id, last_id):
            yield event

    async def follow(
        self, chat_id: str, run_id: str, last_id: str = ""
    ) -> AsyncIterator[ServerEvent]:
        """A run's events after `last_id`, to the end. Raises EdgeRefusedError after RESUMES_MAX broken connections."""
        path = f"/v1/chats/{chat_id}/runs/{run_id}/events"
        refused: EdgeRefusedError | None = None
        for attempt in range(RESUMES_MAX):
            try:
                headers = {"Last-Event-ID": last_id} if last_id else {}
                async with self._http.stream("GET", path, headers=headers) as response:
                    if response.is_error:
                        _raise_for_refusal(response.status_code, await response.aread())
                    if response.status_code == NO_CONTENT:
                        return
                    async for event in _events(response):
                        last_id = event.id
                        yield event
                        if event.name == "run.ended":
                            return
            except httpx.TransportError:
                refused = None
            except EdgeRefusedError as error:
                if error.status != UNAVAILABLE:
                    raise
                refused = error
            else:
                continue
            # The edge is restarting, drains or is full: what it owes us is on the log.
            await asyncio.sleep(RESUME_WAIT_S * min(attempt + 1, 8))
        raise refused or self._unreachable()

    def _unreachable(self) -> EdgeRefusedError:
        return EdgeRefusedError(f"no Turnlog answers at {self._url}: start one with `turnlog up`")


def _raise_for_refusal(status: int, body: bytes) -> None:
    if status < 400:
        return
    try:
        error = json.loads(body)["error"]
        line, code = f"{error['message']} ({error['code']})", str(error["code"])
    except (ValueError, KeyError, TypeError):
        line, code = f"HTTP {status}", ""
    raise EdgeRefusedError(line, status=status, code=code)


async def _events(response: httpx.Response) -> AsyncIterator[ServerEvent]:
    name = event_id = data = ""
    async for line in _lines(response):
        if not line:
            if data:
                yield ServerEvent(name=name, id=event_id, data=json.loads(data))
            name = data = ""
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match field:
            case "event":
                name = value
            case "id":
                event_id = value
            case "data":
                data += value
            case _:
                pass  # A comment keeps the connection alive.


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Lines as this protocol means them: ended by a line feed only, whatever other separators a text holds."""
    rest = b""
    async for chunk in response.aiter_raw():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.decode()
