"""`turnlog bench path|deltas|admission`: measurements on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console

from infra.bench.admission import Parts, bench_admission
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


class Part(StrEnum):
    """What `bench admission` measures."""

    SPREAD = "spread"
    HOT = "hot"
    REFUSALS = "refusals"


@bench.command()
def admission(
    seconds: Seconds = 5,
    rate: Annotated[
        list[int] | None, typer.Option(min=1, max=10_000, help="Prompts a second; several.")
    ] = None,
    part: Annotated[list[Part] | None, typer.Option(help="Only this one; several.")] = None,
    profile: Annotated[
        bool, typer.Option(help="Also sample the process at half the knee.")
    ] = False,
) -> None:
    """Decision times of one process at rising rates, spread and on one key; refusals at twice what can be served."""
    wanted = part or list(Part)
    parts = Parts(
        seconds=seconds,
        rates=tuple(rate or ()),
        spread=Part.SPREAD in wanted,
        hot=Part.HOT in wanted,
        refusals=Part.REFUSALS in wanted,
        profile=profile,
    )
    _run(bench_admission(parts, Console(soft_wrap=True)))


def _run(measurement: Coroutine[None, None, None]) -> None:
    try:
        asyncio.run(measurement)
    except BenchError as error:
        typer.echo(f"turnlog: {error}", err=True)
        raise SystemExit(1) from None
