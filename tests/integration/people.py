"""People who use a running system: they hold a token, post, read streams frame by frame, lose connections and come back."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self, TypeVar

import httpx

from edge.auth import mint_token
from infra.command.edge_client import EdgeClient, EdgeRefusedError, ServerEvent
from infra.secrets import load_secrets
from schemas.vocabulary import Tier
from tests.integration.running import RunningSystem
from tests.integration.waiting import PATIENCE_S, eventually_async

T = TypeVar("T")


@dataclass
class Reading:
    """What one reader has seen of one run: every frame, in order."""

    frames: list[ServerEvent] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The concatenated deltas."""
        return "".join(f.data["text"] for f in self.frames if f.name == "message.delta")

    @property
    def tokens(self) -> int:
        """Tokens of the deltas; their indices must be dense."""
        n = 0
        for frame in self.frames:
            if frame.name == "message.delta":
                assert frame.data["index"] == n, "deltas leave no gap and repeat nothing"
                n += frame.data["count"]
        return n

    @property
    def last_id(self) -> str:
        """Where to resume from."""
        return self.frames[-1].id if self.frames else ""

    @property
    def end(self) -> dict[str, Any]:
        """The data of run.ended."""
        assert self.frames, "nothing was read"
        assert self.frames[-1].name == "run.ended", self.frames[-1]
        return self.frames[-1].data

    async def read(self, events: AsyncIterator[ServerEvent], *, deltas: int | None = None) -> Self:
        """Read to the end, or until `deltas` more deltas have come."""
        seen = 0
        async with asyncio.timeout(2 * PATIENCE_S):
            async for event in events:
                self.frames.append(event)
                seen += event.name == "message.delta"
                if deltas is not None and seen >= deltas:
                    break
        return self


class Person:
    """One account at one edge."""

    def __init__(self, client: EdgeClient, http: httpx.AsyncClient) -> None:
        self.client = client
        self.http = http

    async def new_chat(self, **fields: Any) -> str:
        """Create a chat; give its id."""
        return str((await self.client.call("POST", "/v1/chats", fields))["id"])

    async def ask_until_answered(self, content: str, **fields: Any) -> tuple[str, Reading]:
        """As `ask`, by a client that comes back with its idempotency key while the system is not there."""
        chat_id = await self.until_answered(self.new_chat)
        return chat_id, await self.say_until_answered(chat_id, content, **fields)

    async def say_until_answered(self, chat_id: str, content: str, **fields: Any) -> Reading:
        """A question in the chat, read to the end, by a client that comes back with its idempotency key."""
        key = uuid.uuid4().hex
        return await self.until_answered(
            lambda: Reading().read(
                self.client.say(chat_id, {"content": content, **fields}, idempotency_key=key)
            )
        )

    async def start_until_taken(self, chat_id: str, content: str, **fields: Any) -> dict[str, Any]:
        """As `start`, by a client that comes back with its idempotency key while the system is not there."""
        headers = {"idempotency-key": uuid.uuid4().hex}
        body = {"content": content, "background": True, **fields}

        async def taken() -> dict[str, Any]:
            try:
                answer = await self.http.post(
                    f"/v1/chats/{chat_id}/messages", json=body, headers=headers
                )
            except httpx.TransportError as error:
                raise EdgeRefusedError("nobody answers") from error
            found: dict[str, Any] = answer.json()
            if answer.is_error:
                raise EdgeRefusedError(answer.text, status=answer.status_code)
            return found

        return await self.until_answered(taken)

    async def until_answered(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Come back while the system is not there, or late: that tells of the machine, and not of what is tested."""
        async with asyncio.timeout(4 * PATIENCE_S):
            while True:
                try:
                    return await attempt()
                except EdgeRefusedError as error:
                    if error.status not in {0, 503}:
                        raise
                await asyncio.sleep(0.2)

    async def _call_until_answered(self, method: str, path: str) -> Any:
        return await self.until_answered(lambda: self.client.call(method, path))

    async def ask(self, content: str, **fields: Any) -> tuple[str, Reading]:
        """A question in a new chat, read to the end."""
        chat_id = await self.new_chat()
        return chat_id, await Reading().read(
            self.client.say(chat_id, {"content": content, **fields})
        )

    async def start(self, chat_id: str, content: str, **fields: Any) -> dict[str, Any]:
        """Start a run without following it; give the run."""
        body = {"content": content, "background": True, **fields}
        run: dict[str, Any] = await self.client.call("POST", f"/v1/chats/{chat_id}/messages", body)
        return run

    async def run(self, chat_id: str, run_id: str) -> dict[str, Any]:
        """The run as the edge knows it now."""
        path = f"/v1/chats/{chat_id}/runs/{run_id}"
        found: dict[str, Any] = await self._call_until_answered("GET", path)
        return found

    async def cancel(self, chat_id: str, run_id: str) -> dict[str, Any]:
        """Cancel; give the answer."""
        path = f"/v1/chats/{chat_id}/runs/{run_id}/cancel"
        answer: dict[str, Any] = await self._call_until_answered("POST", path)
        return answer

    async def messages(self, chat_id: str) -> list[dict[str, Any]]:
        """The current branch of the chat, oldest first."""
        path = f"/v1/chats/{chat_id}/messages"
        found: list[dict[str, Any]] = (await self._call_until_answered("GET", path))["data"]
        return found

    async def stored_answer(self, chat_id: str) -> dict[str, Any]:
        """The newest answer of the chat as history has it."""
        return (await self.messages(chat_id))[-1]

    async def quota(self) -> dict[str, Any]:
        """The account's quota."""
        found: dict[str, Any] = await self._call_until_answered("GET", "/v1/quota")
        return found

    async def is_settled(self) -> None:
        """Wait until nothing of the account is under way any more."""

        async def settled() -> bool:
            quota = await self.quota()
            return (quota["reserved"], quota["open_runs"]) == (0, 0)

        await eventually_async(settled, what="nothing is reserved")

    async def settles_at(self, tokens: int) -> None:
        """Wait until the account has settled exactly these tokens and reserves none (invariants I5, I6)."""

        async def settled() -> bool:
            quota = await self.quota()
            rest = (quota["reserved"], quota["open_runs"])
            assert (quota["settled"], *rest) == (tokens, 0, 0), quota
            return True

        await eventually_async(settled, what=f"{tokens} tokens are settled")


@asynccontextmanager
async def person(
    system: RunningSystem,
    account: str = "ada",
    *,
    tier: Tier = Tier.TEAM,
    edge: int = 0,
    seat: str | None = None,
) -> AsyncIterator[Person]:
    """`account` at the system's edge number `edge`."""
    token = mint_token(
        key=load_secrets(system.home).token_key,
        account_id=account,
        seat_id=seat,
        tier=tier,
        ttl=timedelta(hours=1),
    )
    url = system.urls[edge]
    async with (
        EdgeClient(url=url, token=token) as client,
        httpx.AsyncClient(
            base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=PATIENCE_S
        ) as http,
    ):
        # The command's own patience with a connection is less than a starved test's loop may stand still.
        client._http.timeout = httpx.Timeout(PATIENCE_S)
        yield Person(client, http)
