"""`turnlog ask` and `turnlog chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from edge.auth import mint_token
from infra.command.edge_client import EdgeClient, EdgeRefusedError
from infra.secrets import load_secrets
from infra.settings import exit_with_usage_error, read_settings_or_exit
from schemas.vocabulary import Tier

TOKEN_TTL: Final = timedelta(days=1)
_QUIET_FINISH: Final = "stop"

Account = Annotated[str, typer.Option(help="Who asks.")]
TierOption = Annotated[Tier, typer.Option(help="The account's tier.")]
Url = Annotated[str, typer.Option(help="The edge; empty: this machine's, at TURNLOG_PORT.")]
System = Annotated[str, typer.Option(help="The chat's system prompt.")]
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
) -> None:
    """Ask one question and stream the answer into the terminal. Ctrl-C stops the answer."""

    async def run(client: EdgeClient) -> None:
        chat = await client.call("POST", "/v1/chats", _chat(system))
        await _answer(client, chat["id"], question, max_tokens)

    _with_client(run, account=account, tier=tier, url=url)


def chat(
    account: Account = "local",
    tier: TierOption = Tier.PLUS,
    system: System = "",
    url: Url = "",
    max_tokens: MaxTokens = 0,
) -> None:
    """Talk; each line is a message. Ctrl-C stops an answer, Ctrl-D ends the chat."""

    async def run(client: EdgeClient) -> None:
        made = await client.call("POST", "/v1/chats", _chat(system))
        interactive = sys.stdin.isatty()
        while True:
            if interactive:
                typer.echo("you> ", nl=False)
            line = await asyncio.to_thread(sys.stdin.readline)
            if not line:
                return
            if line.strip():
                try:
                    await _answer(client, made["id"], line.rstrip("\n"), max_tokens)
                except EdgeRefusedError as error:
                    typer.echo(f"turnlog: {error}", err=True)

    _with_client(run, account=account, tier=tier, url=url)


def _chat(system: str) -> dict[str, Any]:
    return {"system_prompt": system} if system else {}


async def _answer(client: EdgeClient, chat_id: str, question: str, max_tokens: int) -> None:
    body: dict[str, Any] = {"content": question}
    if max_tokens:
        body["max_output_tokens"] = max_tokens
    run_id = ""
    stopping: asyncio.Task[Any] | None = None

    def stop() -> None:
        nonlocal stopping
        if run_id and stopping is None:
            path = f"/v1/chats/{chat_id}/runs/{run_id}/cancel"
            stopping = asyncio.ensure_future(client.call("POST", path))

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        async for event in client.say(chat_id, body):
            match event.name:
                case "run.queued":
                    run_id = event.data["run_id"]
                case "message.delta" | "run.snapshot":
                    sys.stdout.write(event.data["text"])
                    sys.stdout.flush()
                case "run.ended":
                    typer.echo("")
                    if event.data["finish_reason"] != _QUIET_FINISH:
                        typer.echo(f"[{event.data['finish_reason']}]", err=True)
                case _:
                    pass
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        if stopping is not None:
            with suppress(EdgeRefusedError):
                await stopping


def _with_client(run: Any, *, account: str, tier: Tier, url: str) -> None:
    settings = read_settings_or_exit(TalkSettings)
    try:
        token = mint_token(
            key=load_secrets(settings.home).token_key, account_id=account, tier=tier, ttl=TOKEN_TTL
        )
    except ValueError as error:  # Damaged secrets too.
        exit_with_usage_error(str(error))
    target = url or f"http://127.0.0.1:{settings.port}"

    async def talk() -> None:
        async with EdgeClient(url=target, token=token) as client:
            await run(client)

    try:
        asyncio.run(talk())
    except EdgeRefusedError as error:
        typer.echo(f"turnlog: {error}", err=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
