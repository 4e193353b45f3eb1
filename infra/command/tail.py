"""`turnlog tail <run id>`: a run's records as every reader sees them, accepted or ignored, until it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Annotated, Final, assert_never

import typer
from aiokafka.errors import KafkaError

from infra.command.addresses import ClusterSettings
from infra.log.epoch import topic_epoch
from infra.log.records import BadRecord, LogRecord
from infra.log.span_reader import SpanFailed, SpanReader
from infra.log.tail import OffsetsGone, Tail
from infra.settings import read_settings_or_exit
from infra.verify.verdicts import why_ignored
from schemas.events.tokens import (
    AttemptStarted,
    RunCancelled,
    RunEnded,
    RunEvent,
    RunQueued,
    RunRedirected,
    TokensGenerated,
)
from schemas.ids import BadId, RunAddress, run_address
from schemas.run_fold import NEW_RUN, RunState, fold
from schemas.topics import TOKENS

KINDS: Final = (
    RunQueued,
    RunRedirected,
    AttemptStarted,
    TokensGenerated,
    RunCancelled,
    RunEnded,
)


class NoRun(Exception):
    """There is nothing to follow. The message is one line."""


def tail(
    run_id: Annotated[str, typer.Argument(help="run_…")],
    text: Annotated[bool, typer.Option("--text", help="Show the text of deltas.")] = False,
) -> None:
    """Print a run's events as they are accepted or ignored, and follow it until it has ended."""
    settings = read_settings_or_exit(ClusterSettings)
    try:
        address = run_address(run_id)
    except BadId:
        typer.echo(f"turnlog: {run_id[:80]!r} is no run id", err=True)
        raise SystemExit(2) from None
    try:
        asyncio.run(_follow(settings.bootstrap, run_id, address, text=text))
    except (NoRun, SpanFailed, OffsetsGone) as error:
        typer.echo(f"turnlog: {error}", err=True)
        raise SystemExit(1) from None
    except (KafkaError, TimeoutError):
        typer.echo(f"turnlog: the Kafka cluster at {settings.bootstrap} does not answer", err=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


async def _follow(bootstrap: str, run_id: str, address: RunAddress, *, text: bool) -> None:
    if address.epoch != await topic_epoch(bootstrap):
        raise NoRun("this run belongs to another cluster")
    async with SpanReader(bootstrap=bootstrap, client_id="turnlog-tail") as reader:
        bounds = (await reader.bounds(TOKENS, [address.partition]))[address.partition]
        if address.mint_offset < bounds.first:
            raise NoRun("this run's records are no longer kept: ask history")
        if address.mint_offset > bounds.end:
            raise NoRun("there is no such run")
        state = NEW_RUN
        stop_at = None
        async with Tail(
            bootstrap=bootstrap,
            client_id="turnlog-tail",
            topic=TOKENS,
            starts={address.partition: address.mint_offset},
        ) as records:
            # Once it has ended, what is on the log by then is shown too: a zombie's words, ignored.
            while stop_at is None or records.positions[address.partition] < stop_at:
                for record in await records.read():
                    state = _show(state, record, run_id, text=text)
                if state.ended and stop_at is None:
                    stop_at = (await reader.bounds(TOKENS, [address.partition]))[
                        address.partition
                    ].end


def _show(state: RunState, record: LogRecord | BadRecord, run_id: str, *, text: bool) -> RunState:
    if isinstance(record, BadRecord) or not isinstance(record.event, KINDS):
        return state
    if record.event.run_id != run_id:
        return state
    after, accepted = fold(state, record.event)
    line = f"{record.offset:>8}  {type(record.event).__name__:<16}{said(record.event, text=text)}"
    if not accepted:
        ignored = why_ignored(state, record.event)
        line += f"  — ignored, {ignored.kind}: {ignored.why} ({ignored.rule})"
    elif after.ended:
        reason = after.finish_reason or after.ending
        line += f"  — ends the run: {reason}, {after.n} tokens"
    typer.echo(line)
    return after


def said(event: RunEvent, *, text: bool) -> str:
    """What the event says, in one line."""
    return " ".join(_parts(event, text=text))


def _parts(event: RunEvent, *, text: bool) -> Iterator[str]:
    match event:
        case RunQueued():
            yield f"{event.model} {event.lane} grant={event.granted_output_tokens}"
            yield f"input<={event.input_budget_tokens} deadline={event.deadline_ms / 1000:g}s"
        case RunRedirected():
            yield f"to {event.to_run_id}" if event.to_run_id else "conflict"
        case AttemptStarted():
            yield f"{event.attempt} by {event.worker_id} input={event.input_tokens}"
        case TokensGenerated():
            last = event.index + event.count - 1
            yield f"{event.index}..{last}" if event.count != 1 else f"{event.index}"
            if text:
                yield ascii(event.text)
        case RunCancelled():
            yield event.reason
        case RunEnded():
            yield f"{event.cause} by {event.writer}"
            if event.end is not None:
                yield f"at {event.end}"
            if event.refusal is not None:
                yield event.refusal.reason
        case _:
            assert_never(event)
