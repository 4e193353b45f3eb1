"""`turnlog down` and `status`: what is said to a system that runs, from another terminal."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from infra.settings import read_settings_or_exit
from infra.supervisor.home import (
    SystemState,
    created_s,
    end_leftovers,
    holder,
    is_locked,
    live_process,
    running_system,
)

if TYPE_CHECKING:
    from rich.table import Table

DOWN_WAIT_S: Final = 30.0
DOWN_POLL_S: Final = 0.05
MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSettings:
    """Which system."""

    home: Path


def down() -> None:
    """Stop the system of this home, from another terminal."""
    settings = read_settings_or_exit(RunningSettings)
    supervisor = holder(settings.home)
    if supervisor is None:
        ended = end_leftovers(settings.home) if not is_locked(settings.home) else ()
        typer.echo(f"Nothing runs in {settings.home}." if not ended else ended_line(ended))
        return
    pid, created = supervisor.pid, created_s(supervisor.pid)
    with suppress(ProcessLookupError):  # It has just ended by itself.
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + DOWN_WAIT_S
    pause = threading.Event()
    # Looked at, not waited for: it is not our child, and whose child it is may be slow to bury it.
    while live_process(pid, created) is not None:
        if time.monotonic() >= deadline:
            typer.echo(f"turnlog: pid {pid} did not stop in {DOWN_WAIT_S:g} s", err=True)
            raise SystemExit(1)
        pause.wait(DOWN_POLL_S)
    typer.echo("Stopped.")


def status() -> None:
    """Show the processes of this home's system; exit 3 when none runs, 4 while it is starting."""
    settings = read_settings_or_exit(RunningSettings)
    state = running_system(settings.home)
    if state is None:
        typer.echo(f"Nothing runs in {settings.home}.")
        raise SystemExit(3)
    from infra.command.terminal import output  # noqa: PLC0415 - slow to import, and only a table needs it

    output().print(_table(state))
    typer.echo(f"Kafka {state.kafka}; " + ", ".join(state.urls))
    if not state.ready:
        typer.echo("Starting.")
        raise SystemExit(4)


def ended_line(ended: tuple[str, ...]) -> str:
    """For a person."""
    return "Ended what an earlier run left behind: " + ", ".join(ended) + "."


def _table(state: SystemState) -> Table:
    from rich.table import Table  # noqa: PLC0415

    table = Table("part", "pid", "up for", "ready", "restarts", "port", "MiB", box=None)
    total = 0
    for part in state.parts:
        process = live_process(part.pid, part.created_s)
        rss = process.memory_info().rss if process is not None else 0
        total += rss
        seconds = int(time.time() - part.started_at_s)
        table.add_row(
            part.name,
            str(part.pid),
            f"{seconds // 60} min {seconds % 60} s",
            "yes" if part.ready else "no",
            str(part.restarts),
            str(part.port or ""),
            str(rss // MIB) if process is not None else "gone",
        )
    supervisor = live_process(state.supervisor_pid, state.supervisor_created_s)
    rss = supervisor.memory_info().rss if supervisor is not None else 0
    table.add_row("supervisor", str(state.supervisor_pid), "", "", "", "", str(rss // MIB))
    table.add_row("all", "", "", "", "", "", str((total + rss) // MIB))
    return table
