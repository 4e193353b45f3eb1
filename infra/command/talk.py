"""`turnlog ask` and `turnlog chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from edge.auth import mint_token
from infra.command.addresses import edge_url
from infra.command.edge_client import EdgeClient, EdgeRefusedError
from infra.secrets import load_secrets
from infra.settings import exit_with_usage_error, read_settings_or_exit
from schemas.vocabulary import ServiceTier, Tier

TOKEN_TTL: Final = timedelta(days=1)
READ_BYTES_MAX: Final = 65_536
INTERRUPTED_EXIT: Final = 130
SENT_WAIT_S_MAX: Final = 3.0
_QUIET_FINISH: Final = "stop"

Account = Annotated[str, typer.Option(help="Who asks.")]
TierOption = Annotated[Tier, typer.Option(help="The account's tier.")]
Url = Annotated[
    str,
    typer.Option(
        help="The edge; empty: the one at TURNLOG_PORT, else of the system that runs in TURNLOG_HOME."
    ),
]
System = Annotated[str, typer.Option(help="The chat's system prompt.")]
Flex = Annotated[bool, typer.Option(help="It can wait: answered where nobody else waits.")]
MaxTokens = Annotated[int, typer.Option(help="Longest answer in tokens; 0: the tier's limit.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkSettings:
    """What the commands need to find and enter the local system."""

    home: Path
    port: int


def ask(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    account: Account = "local",
    tier: TierOption = Tier.PLUS,
    system: System = "",
    url: Url = "",
    max_tokens: MaxTokens = 0,
    flex: Flex = False,
) -> None:
    """Ask one question and stream the answer into the terminal. Ctrl-C stops the answer, a second one the command."""

    async def run(client: EdgeClient, interrupts: Interrupts) -> None:
        chat = await client.call("POST", "/v1/chats", _chat(system))
        await answer(client, interrupts, chat["id"], question, max_tokens, flex=flex)

    _with_client(run, account=account, tier=tier, url=url)


def chat(
    account: Account = "local",
    tier: TierOption = Tier.PLUS,
    system: System = "",
    url: Url = "",
    max_tokens: MaxTokens = 0,
) -> None:
    """Talk; each line is a message. Ctrl-C stops an answer and, where none is under way, the chat; so does Ctrl-D."""

    async def run(client: EdgeClient, interrupts: Interrupts) -> None:
        made = await client.call("POST", "/v1/chats", _chat(system))
        lines = InputLines(sys.stdin.fileno())
        while True:
            if sys.stdin.isatty():
                typer.echo("you> ", nl=False)
            line = await lines.next()
            if line is None:
                return
            if line.strip():
                try:
                    await answer(client, interrupts, made["id"], line, max_tokens)
                except EdgeRefusedError as error:
                    typer.echo(f"turnlog: {error}", err=True)

    _with_client(run, account=account, tier=tier, url=url)


def _chat(system: str) -> dict[str, Any]:
    return {"system_prompt": system} if system else {}


async def answer(
    client: EdgeClient,
    interrupts: Interrupts,
    chat_id: str,
    question: str,
    max_tokens: int,
    *,
    flex: bool = False,
) -> None:
    """Ask in a chat and print the answer as it comes. Raises EdgeRefusedError, and CancelledError where Ctrl-C ended the command."""
    body: dict[str, Any] = {"content": question}
    if max_tokens:
        body["max_output_tokens"] = max_tokens
    if flex:
        body["service_tier"] = ServiceTier.FLEX.value
    stop = _Stop(client, chat_id)
    with interrupts.go_to(stop):
        try:
            async for event in client.say(chat_id, body):
                match event.name:
                    case "run.queued":
                        stop.run_is(event.data["run_id"])
                    case "message.delta" | "run.snapshot":
                        sys.stdout.write(event.data["text"])
                        sys.stdout.flush()
                    case "run.ended":
                        stop.is_over()
                        typer.echo("")
                        if event.data["finish_reason"] != _QUIET_FINISH:
                            typer.echo(f"[{event.data['finish_reason']}]", err=True)
                    case _:
                        pass
        finally:
            await stop.sent()


class Interrupts:
    """Ctrl-C while the command runs: it stops the answer under way, and ends the command where there is none left to stop.

    One handler from the first line to the last: with one for each answer, a Ctrl-C between two answers would meet none and be lost.
    """

    def __init__(self) -> None:
        """For the task that makes it."""
        self._command = asyncio.current_task()
        self._stop: _Stop | None = None
        self._ended = False
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._heard)

    def _heard(self) -> None:
        if self._stop is not None and self._stop.ask():
            return
        self._ended = True
        if self._command is not None:
            self._command.cancel()

    @contextmanager
    def go_to(self, stop: _Stop) -> Iterator[None]:
        """Meanwhile they are for this answer. Raises CancelledError behind it where one has ended the command."""
        self._stop = stop
        try:
            yield
        finally:
            self._stop = None
        if self._ended:  # What closes a connection may have kept the cancellation to itself.
            raise asyncio.CancelledError


class _Stop:
    """Ctrl-C during an answer: the first one cancels the run, as soon as it is known; there is nothing to do for a second one, nor
    for one that comes when the answer is over already."""

    def __init__(self, client: EdgeClient, chat_id: str) -> None:
        self._client = client
        self._chat_id = chat_id
        self._run_id = ""
        self._asked = False
        self._over = False
        self._sending: asyncio.Task[Any] | None = None

    def ask(self) -> bool:
        """Ctrl-C. Tells whether it stops anything."""
        if self._asked or self._over:
            return False
        self._asked = True
        typer.echo("[stopping]", err=True)
        self._send()
        return True

    def is_over(self) -> None:
        """There is nothing left to stop."""
        self._over = True

    def run_is(self, run_id: str) -> None:
        """The answer's run is known from here on."""
        self._run_id = run_id
        self._send()

    def _send(self) -> None:
        if self._asked and self._run_id and self._sending is None:
            path = f"/v1/chats/{self._chat_id}/runs/{self._run_id}/cancel"
            self._sending = asyncio.ensure_future(self._client.call("POST", path))

    async def sent(self) -> None:
        """Wait until the edge has answered, if anything was asked of it; not long, for who asks twice wants to go."""
        if self._sending is not None:
            with suppress(EdgeRefusedError, TimeoutError):
                async with asyncio.timeout(SENT_WAIT_S_MAX):
                    await self._sending


class InputLines:
    """Lines of a file descriptor, read without a thread: one that waits for a terminal would outlive Ctrl-C."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self._ended = False

    async def next(self) -> str | None:
        """The next line without its end; None where there is no further one."""
        while b"\n" not in self._rest and not self._ended:
            await self._readable()
            piece = os.read(self._descriptor, READ_BYTES_MAX)
            self._ended = not piece
            self._rest += piece
        if not self._rest:
            return None
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode("utf-8", "replace").removesuffix("\r")

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        try:
            loop.add_reader(self._descriptor, ready.set)
        except PermissionError:
            return  # A regular file: it never lets anybody wait.
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._descriptor)


def _with_client(run: Any, *, account: str, tier: Tier, url: str) -> None:
    settings = read_settings_or_exit(TalkSettings)
    try:
        token = mint_token(
            key=load_secrets(settings.home).token_key, account_id=account, tier=tier, ttl=TOKEN_TTL
        )
    except ValueError as error:  # Damaged secrets too.
        exit_with_usage_error(str(error))
    target = url or edge_url(settings.home, port=settings.port)

    async def talk() -> None:
        interrupts = Interrupts()
        async with EdgeClient(url=target, token=token) as client:
            await run(client, interrupts)

    try:
        asyncio.run(talk())
    except EdgeRefusedError as error:
        typer.echo(f"turnlog: {error}", err=True)
        raise SystemExit(1) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise SystemExit(INTERRUPTED_EXIT) from None
