"""`turnlog estimates`: the waits that clients were told against the waits that they had."""

from __future__ import annotations

import asyncio
from typing import Final

import typer
from rich.table import Table

from infra.command.addresses import ClusterSettings
from infra.command.terminal import output
from infra.log.records import LogRecord
from infra.log.span_reader import SpanFailed, SpanReader
from infra.log.tail import OffsetsGone
from infra.settings import read_settings_or_exit
from infra.verify.findings import Record
from infra.verify.reading import NoTopics, partition_counts
from infra.verify.wait_audit import GOOD_ERROR_MAX, Wait, WaitAudit, summary
from schemas.topics import TOKENS

READERS: Final = 4


def estimates() -> None:
    """Read the token log from the start and say how right the estimated waits were, by model and lane."""
    settings = read_settings_or_exit(ClusterSettings)
    try:
        waits = asyncio.run(_read(settings.bootstrap))
    except* (NoTopics, SpanFailed, OffsetsGone) as failed:
        error: BaseException = failed
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        typer.echo(f"turnlog: nothing was read: {error}", err=True)
        raise SystemExit(2) from None
    show(waits)


async def _read(bootstrap: str) -> list[Wait]:
    partitions = (await partition_counts(bootstrap))[TOKENS.name]
    audit = WaitAudit()
    async with SpanReader(
        bootstrap=bootstrap, client_id="turnlog-estimates", readers_max=READERS
    ) as reader:
        bounds = await reader.bounds(TOKENS, list(range(partitions)))
        for partition, kept in bounds.items():
            async for records in reader.span(TOKENS, partition, kept.first, kept.end):
                for record in records:
                    if isinstance(record, LogRecord):
                        audit.take(
                            Record(
                                partition=partition,
                                offset=record.offset,
                                appended_ms=record.appended_ms,
                                event_id=record.envelope.event_id,
                                event=record.event,
                            )
                        )
    return audit.waits


def show(waits: list[Wait]) -> None:
    """One line for each model and lane, and one for all."""
    console = output()
    table = Table(box=None, pad_edge=False)
    for title in ("model", "lane"):
        table.add_column(title)
    good = f"within {GOOD_ERROR_MAX:.0%}"
    for title in ("runs", "wait p50", "p95", "told p50", "error p50", "p90", good, "bias"):
        table.add_column(title, justify="right")
    groups = sorted({(wait.model, wait.lane) for wait in waits})
    rows = [
        (model, lane.value, [wait for wait in waits if (wait.model, wait.lane) == (model, lane)])
        for model, lane in groups
    ]
    for model, lane_name, found in [*rows, ("all", "", waits)]:
        of = summary(found)
        if of is None:
            console.print("No run has started.")
            return
        table.add_row(
            model,
            lane_name,
            f"{of.runs:,}",
            f"{of.waited_median_ms / 1000:.2f} s",
            f"{of.waited_p95_ms / 1000:.2f} s",
            f"{of.estimated_median_ms / 1000:.2f} s",
            f"{of.error_median:.0%}",
            f"{of.error_p90:.0%}",
            f"{of.good_share:.0%}",
            "–" if of.bias is None else f"{of.bias:+.0%}",
        )
    console.print(table)
