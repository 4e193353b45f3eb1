"""`turnlog up`, `down` and `status`: the life of one system, seen from a terminal."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import Final

import typer
from rich.console import Console
from rich.table import Table

from infra.command.policy import PolicyNotWritten, sync_policy
from infra.command.topics import PlanRefused, TopicPlanError, apply_topics
from infra.embedded.jars import JarError
from infra.embedded.kafka import BrokerCommand, BrokerError, prepare_broker, wait_until_serving
from infra.history import HistoryUnavailable
from infra.history.sqlite import HISTORY_FILE, connect
from infra.models.registry import MODELS
from infra.policies import read_policies
from infra.policy_checks import PolicyError
from infra.secrets import SecretsError, load_secrets
from infra.settings import SettingsError, exit_with_usage_error, read_settings_or_exit
from infra.supervisor.home import (
    FREE_MIB_MIN,
    HomeInUseError,
    SystemState,
    end_leftovers,
    free_mib,
    holder,
    is_locked,
    live_process,
    locked_home,
    read_state,
)
from infra.supervisor.plan import (
    UpSettings,
    broker_plan,
    planned_parts,
    require_free_ports,
    require_installed,
)
from infra.supervisor.supervise import NAME_WIDTH, Supervisor, say

EXISTING_CLUSTER_WAIT_S: Final = 15.0
DOWN_WAIT_S: Final = 15.0
DOWN_POLL_S: Final = 0.05
MIB: Final = 1024 * 1024
# What stops a start before anything was started.
UNUSABLE: Final = (
    HomeInUseError,
    BrokerError,
    HistoryUnavailable,
    JarError,
    PolicyError,
    SecretsError,
    SettingsError,
    OSError,
)


def up() -> None:
    """Start the whole system in the foreground; Ctrl-C or SIGTERM drains and stops it."""
    settings = read_settings_or_exit(UpSettings)
    try:
        with locked_home(settings.home):
            raise SystemExit(_run(settings))
    except UNUSABLE as error:
        exit_with_usage_error(str(error))


def down() -> None:
    """Stop the system of this home, from another terminal."""
    settings = read_settings_or_exit(UpSettings)
    supervisor = holder(settings.home)
    if supervisor is None:
        ended = end_leftovers(settings.home) if not is_locked(settings.home) else ()
        typer.echo(f"Nothing runs in {settings.home}." if not ended else _ended_line(ended))
        return
    pid, created_s = supervisor.pid, supervisor.create_time()
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + DOWN_WAIT_S
    pause = threading.Event()
    # Looked at, not waited for: it is not our child, and whose child it is may be slow to bury it.
    while live_process(pid, created_s) is not None:
        if time.monotonic() >= deadline:
            typer.echo(f"turnlog: pid {pid} did not stop in {DOWN_WAIT_S:g} s", err=True)
            raise SystemExit(1)
        pause.wait(DOWN_POLL_S)
    typer.echo("Stopped.")


def status() -> None:
    """Show the processes of this home's system; exit 3 when none runs, 4 while it is starting."""
    settings = read_settings_or_exit(UpSettings)
    state = read_state(settings.home)
    if state is None or live_process(state.supervisor_pid, state.supervisor_created_s) is None:
        typer.echo(f"Nothing runs in {settings.home}.")
        raise SystemExit(3)
    Console().print(_table(state))
    typer.echo(f"Kafka {state.kafka}; " + ", ".join(state.urls))
    if not state.ready:
        typer.echo("Starting.")
        raise SystemExit(4)


def _run(settings: UpSettings) -> int:
    windows = {name: spec.context_window for name, spec in MODELS.items()}
    limits = read_policies(settings.policies, models=windows, changed_by="turnlog up")
    require_installed(settings)
    if (free := free_mib(settings.home)) < FREE_MIB_MIN:
        raise SettingsError(
            f"only {free} MiB are free for {settings.home}; it needs {FREE_MIB_MIN}"
        )
    load_secrets(settings.home)
    ended = end_leftovers(settings.home)
    if ended:
        say(_ended_line(ended))
    connect(settings.home / HISTORY_FILE).close()
    require_free_ports(settings)
    broker: BrokerCommand | None = None
    if not settings.kafka:
        broker = prepare_broker(
            broker_plan(settings), progress=lambda line: say(f"{'kafka':<{NAME_WIDTH}} {line}")
        )

    async def topics() -> str:
        if broker is None:
            await wait_until_serving(settings.bootstrap, deadline_s=EXISTING_CLUSTER_WAIT_S)
        try:
            done = await apply_topics(
                settings.bootstrap, models=settings.models, partitions=settings.partitions
            )
            written = await sync_policy(settings.bootstrap, limits)
        except PlanRefused as error:
            raise SettingsError(str(error)) from error
        except (TopicPlanError, PolicyNotWritten) as error:
            raise RuntimeError(str(error)) from error
        policy = f", policy written to {written} partitions" if written else ""
        if done.empty:
            return "as planned" + policy
        return f"{len(done.create)} made, {len(done.configure)} changed" + policy

    supervisor = Supervisor(
        home=settings.home,
        plans=planned_parts(settings, broker),
        kafka=settings.bootstrap,
        urls=settings.urls,
        forgiven_max=settings.restarts_max,
        after_broker=topics,
    )
    say(
        f"{'turnlog':<{NAME_WIDTH}} home {settings.home}, ports {', '.join(map(str, settings.ports))}"
    )
    return asyncio.run(supervisor.run())


def _ended_line(ended: tuple[str, ...]) -> str:
    return "Ended what an earlier run left behind: " + ", ".join(ended) + "."


def _table(state: SystemState) -> Table:
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
