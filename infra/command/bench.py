"""`turnlog bench path|deltas`: measurements on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated

import typer
from rich.console import Console

from infra.bench.deltas import bench_deltas
from infra.bench.path import bench_path
from infra.bench.system import BenchError

bench = typer.Typer(help="Measure on this machine; needs it alone.", no_args_is_help=True)

Seconds = Annotated[int, typer.Option(min=2, max=600, help="How long each step lasts.")]


@bench.command()
def path(seconds: Seconds = 15) -> None:
    """What the pipeline adds to the time to first token, at 5, 20 and 50 prompts a second, hop by hop."""
    _run(bench_path(seconds, Console(soft_wrap=True)))


@bench.command()
def deltas(seconds: Seconds = 8) -> None:
    """Lateness of tokens at clients, at 100, 300 and rising numbers of streams."""
    _run(bench_deltas(seconds, Console(soft_wrap=True)))


def _run(measurement: Coroutine[None, None, None]) -> None:
    try:
        asyncio.run(measurement)
    except BenchError as error:
        typer.echo(f"turnlog: {error}", err=True)
        raise SystemExit(1) from None
