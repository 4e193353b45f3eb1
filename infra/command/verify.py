"""`turnlog verify`: everything recorded, checked against the invariants."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from infra.command.addresses import ClusterSettings
from infra.command.terminal import output
from infra.history import HistoryUnavailable
from infra.history.sqlite import HISTORY_FILE
from infra.log.span_reader import SpanFailed
from infra.log.tail import OffsetsGone
from infra.settings import read_settings_or_exit
from infra.verify.findings import GRACE_MS, Findings, Violation
from infra.verify.reading import NoTopics, RecordedSystem

SHOWN_MAX: Final = 50
SETTLE_S: Final = 20.0
CHECKED: Final = "I1 to I7, I11, I12, I14"
_ALWAYS: Final = (
    "records",
    "prompts",
    "runs",
    "finished runs",
    "deltas",
    "tokens",
    "attempts",
    "runs with a second attempt",
    "ignored records",
    "cancels",
    "refusals",
    "redirects",
    "open runs",
    "open reservations",
    "runs not judged",
    "undecodable records",
    "parked records",
)


def verify(
    settle_s: Annotated[
        float,
        typer.Option(
            min=0, max=3_600, help="Wait so long for open runs and whatever else is under way."
        ),
    ] = SETTLE_S,
    grace_s: Annotated[
        float,
        typer.Option(
            min=0,
            max=3_600,
            help="What is still missing so long after its cause is lost. More for a machine that is slow to start what died.",
        ),
    ] = GRACE_MS / 1_000,
) -> None:
    """Read all topics from the start and check I1 to I7, I11, I12 and I14; exit 1 on a violation."""
    settings = read_settings_or_exit(ClusterSettings)
    try:
        findings = asyncio.run(_audit(settings, int(settle_s * 1000), int(grace_s * 1000)))
    except* (NoTopics, SpanFailed, OffsetsGone, HistoryUnavailable) as failed:
        error: BaseException = failed
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        typer.echo(f"turnlog: nothing was verified: {error}", err=True)
        raise SystemExit(2) from None
    show(findings)
    if findings.violations:
        raise SystemExit(1)


async def _audit(settings: ClusterSettings, settle_ms: int, grace_ms: int) -> Findings:
    history = settings.home / HISTORY_FILE
    async with RecordedSystem(settings.bootstrap, history=history, grace_ms=grace_ms) as system:
        return await system.settle(settle_ms)


def show(findings: Findings) -> None:
    """Counts, what is under way, violations, and the verdict on the last line."""
    console = output()
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, number in _lines(findings.counts):
        table.add_row(name, f"{number:,}")
    console.print(table)
    _list(console, "under way", findings.pending)
    _list(console, "VIOLATED", findings.violations)
    if findings.violations:
        broken = ", ".join(sorted({each.invariant for each in findings.violations}, key=_number))
        console.print(f"{len(findings.violations)} violations of {broken}.")
    else:
        console.print(f"No violation. Checked: {CHECKED}.")


def _lines(counts: Counter[str]) -> list[tuple[str, int]]:
    """The counts that are always there, each with its parts (`cancels: user`) below; then the others."""
    lines = []
    parts = {name for name in counts if ": " in name}
    for name in (*_ALWAYS, *sorted(counts.keys() - set(_ALWAYS) - parts)):
        lines.append((name, counts[name]))
        prefix = {"finished runs": "finished", "ignored records": "ignored"}.get(name, name)
        for part in sorted(parts):
            if part.startswith(f"{prefix}: "):
                lines.append((f"  {part.removeprefix(f'{prefix}: ')}", counts[part]))
                parts.discard(part)
    return [*lines, *((part, counts[part]) for part in sorted(parts))]


def _list(console: Console, title: str, entries: Iterable[Violation]) -> None:
    shown = list(entries)
    for each in shown[:SHOWN_MAX]:
        console.print(f"{title}: {each.invariant} {each.subject}: {each.detail}", markup=False)
    if len(shown) > SHOWN_MAX:
        console.print(f"{title}: and {len(shown) - SHOWN_MAX} more")


def _number(invariant: str) -> int:
    return int(invariant[1:])
