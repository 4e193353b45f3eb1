"""`turnlog policy`: the limits that are on the log, other limits put there, and what other limits would have done."""

from __future__ import annotations

import asyncio
import getpass
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Final, NoReturn, cast

import msgspec
import typer
from aiokafka.errors import KafkaError
from rich.console import Console
from rich.table import Table

from infra.command.addresses import ClusterSettings
from infra.command.policy import PolicyNotRead, PolicyNotWritten, read_policy, sync_policy
from infra.command.terminal import output
from infra.log.records import LogRecord
from infra.log.span_reader import SpanFailed, SpanReader
from infra.log.tail import OffsetsGone
from infra.models.registry import MODELS
from infra.policies import policy_text, read_policies
from infra.policy_checks import PolicyError
from infra.settings import exit_with_usage_error, read_settings_or_exit
from processors.decisions.what_if import Recorded, Report, Tally, WhatIf, WhatWas
from schemas.events.accounts import AccountEvent, LimitsChanged
from schemas.topics import ACCOUNTS
from schemas.vocabulary import Tier

NAME_CHARS_MAX: Final = 64

policy = typer.Typer(
    help="Show, change and try limits. Who changed what is on the log.", no_args_is_help=True
)

PolicyFile = Annotated[Path, typer.Argument(help="A policy file, as infra/policies.toml.")]


@policy.command()
def apply(
    file: PolicyFile,
    by: Annotated[str, typer.Option(help="Who changes it; default: the user who runs this.")] = "",
) -> None:
    """Put the limits of FILE on the log, where they hold from then on; the same limits again change nothing.

    The next `turnlog up` applies the file of TURNLOG_POLICIES again.
    """
    settings = read_settings_or_exit(ClusterSettings)
    limits = _read(file, by=(by or getpass.getuser())[:NAME_CHARS_MAX])
    try:
        written = asyncio.run(sync_policy(settings.bootstrap, limits))
    except PolicyNotWritten as error:
        _fail(error)
    where = f"written to {written} partitions" if written else "already there"
    typer.echo(f"Version {limits.version} by {limits.changed_by}: {where}.")


@policy.command()
def show() -> None:
    """Print the limits that are on the log, as a policy file; exit 1 where the partitions do not agree."""
    settings = read_settings_or_exit(ClusterSettings)
    try:
        newest = asyncio.run(read_policy(settings.bootstrap))
    except PolicyNotRead as error:
        _fail(error)
    versions = Counter(limits.version if limits else "none" for limits in newest.values())
    commonest = versions.most_common(1)[0][0] if versions else "none"
    for limits in newest.values():
        if limits is not None and limits.version == commonest:
            typer.echo(policy_text(limits), nl=False)
            break
    else:
        typer.echo("No limits are on the log.")
    if len(versions) > 1:
        counted = ", ".join(f"{version} in {count}" for version, count in versions.items())
        typer.echo(f"turnlog: the partitions do not agree: {counted}; apply one again", err=True)
        raise SystemExit(1)


@policy.command(name="try")
def try_policy(
    file: PolicyFile,
    as_json: Annotated[bool, typer.Option("--json", help="The counts as JSON.")] = False,
) -> None:
    """Fold the recorded account log again under the limits of FILE: who would have been admitted, refused, shortened, and the cost.

    Load is taken as it was, and what runs that were refused would have used is guessed. Nothing is written.
    """
    settings = read_settings_or_exit(ClusterSettings)
    limits = _read(file, by="try")
    try:
        report, late = asyncio.run(what_if_recorded(settings.bootstrap, limits))
    except (SpanFailed, OffsetsGone, KafkaError, TimeoutError) as error:
        _fail(PolicyNotRead(f"the account log was not read: {type(error).__name__}"))
    if as_json:
        typer.echo(msgspec.json.encode(_plain(report)))
        return
    show_report(report, output())
    if late:
        typer.echo(f"In {late} partitions the log no longer begins at its first record.")


async def what_if_recorded(bootstrap: str, limits: LimitsChanged) -> tuple[Report, int]:
    """The report over all partitions, and in how many of them the first records are gone."""
    report, late = Report(), 0
    async with SpanReader(bootstrap=bootstrap, client_id="turnlog-policy-try") as reader:
        partitions = await reader.partitions(ACCOUNTS)
        for number, kept in (await reader.bounds(ACCOUNTS, partitions)).items():
            late += kept.first > 0
            was = WhatWas(limits)
            async for record in _records(reader, number, kept.first, kept.end):
                was.take(record)
            other, last = WhatIf(was), None
            async for last in _records(reader, number, kept.first, kept.end):
                other.take(last)
            report.add(other.report(last))
    return report, late


async def _records(
    reader: SpanReader, partition: int, first: int, end: int
) -> AsyncIterator[Recorded]:
    async for batch in reader.span(ACCOUNTS, partition, first, end):
        for record in batch:
            if not isinstance(record, LogRecord):
                continue
            yield Recorded(
                offset=record.offset,
                appended_ms=record.appended_ms,
                event_id=record.envelope.event_id,
                event=cast("AccountEvent", record.event),
            )


def show_report(report: Report, console: Console) -> None:
    """Two tables: the counts of each tier side by side, and what became of the prompts that would have fared otherwise."""
    table = Table("tier", "", "was", "would be", "change", box=None, title="Under these limits")
    for tier in Tier:
        was, would_be = report.was[tier], report.would_be[tier]
        if not was.decisions and not would_be.decisions:
            continue
        names = sorted(
            {*was.decisions, *would_be.decisions}, key=lambda name: (name != "admitted", name)
        )
        rows = [(name, was.decisions[name], would_be.decisions[name]) for name in names]
        rows += [(label, one, other) for label, one, other in _sums(was, would_be)]
        for at, (label, one, other) in enumerate(rows):
            table.add_row(
                tier.value if at == 0 else "", label, f"{one:,}", f"{other:,}", f"{other - one:+,}"
            )
    console.print(table)
    moved = Table(
        "tier", "was", "would be", "prompts", box=None, title="Prompts that fare otherwise"
    )
    for (tier, before, after), count in sorted(report.changes.items()):
        if before != after:
            moved.add_row(tier.value, before, after, f"{count:,}")
    if moved.row_count:
        console.print(moved)
    else:
        console.print("No prompt fares otherwise.")


def _sums(was: Tally, would_be: Tally) -> list[tuple[str, int, int]]:
    return [
        ("to a smaller model", was.downgraded, would_be.downgraded),
        ("shortened", was.shortened, would_be.shortened),
        ("cancelled by limits", was.cancelled, would_be.cancelled),
        ("input tokens", was.input_tokens, would_be.input_tokens),
        ("output tokens", was.output_tokens, would_be.output_tokens),
        ("cost in tokens", was.cost // 100, would_be.cost // 100),
    ]


def _plain(report: Report) -> dict[str, object]:
    return {
        "was": {tier.value: msgspec.to_builtins(tally) for tier, tally in report.was.items()},
        "would_be": {
            tier.value: msgspec.to_builtins(tally) for tier, tally in report.would_be.items()
        },
        "changes": [
            {"tier": tier.value, "was": before, "would_be": after, "prompts": count}
            for (tier, before, after), count in sorted(report.changes.items())
        ],
    }


def _read(file: Path, *, by: str) -> LimitsChanged:
    windows = {name: spec.context_window for name, spec in MODELS.items()}
    try:
        return read_policies(file, models=windows, changed_by=by)
    except PolicyError as error:
        exit_with_usage_error(str(error))


def _fail(error: Exception) -> NoReturn:
    typer.echo(f"turnlog: {error}", err=True)
    raise SystemExit(1)
