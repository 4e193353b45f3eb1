"""`turnlog topics plan|apply|list`: the cluster against the registry."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import NoReturn

import typer
from rich.table import Table

from infra.command.addresses import ClusterSettings
from infra.command.terminal import output
from infra.command.topics import (
    Difference,
    PlanRefused,
    TopicPlanError,
    apply_topics,
    plan_topics,
)
from infra.settings import USAGE_ERROR_EXIT, read_settings_or_exit
from schemas.topics import Cleanup, all_topics

topics = typer.Typer(
    help="Compare the cluster's topics with the plan, and apply it.", no_args_is_help=True
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSettings(ClusterSettings):
    """And how many partitions new topics get."""

    partitions: int
    models: tuple[str, ...]


@topics.command()
def plan() -> None:
    """Show the difference; exit 2 where the cluster has what must not be changed."""
    settings = read_settings_or_exit(TopicSettings)
    try:
        todo = asyncio.run(
            plan_topics(settings.bootstrap, models=settings.models, partitions=settings.partitions)
        )
    except TopicPlanError as error:
        _fail(error)
    _show(todo, done=False)
    if todo.refused:
        raise SystemExit(USAGE_ERROR_EXIT)


@topics.command()
def apply() -> None:
    """Make the cluster as planned; refuses to change partition counts."""
    settings = read_settings_or_exit(TopicSettings)
    try:
        done = asyncio.run(
            apply_topics(settings.bootstrap, models=settings.models, partitions=settings.partitions)
        )
    except TopicPlanError as error:
        _fail(error)
    _show(done, done=True)


@topics.command(name="list")
def list_topics() -> None:
    """Show the registry: every topic, its key, events, retention, writers and readers."""
    table = Table("topic", "key", "events", "kept", "writers", "readers", box=None)
    for topic in all_topics(read_settings_or_exit(TopicSettings).models):
        kept = (
            "compacted"
            if topic.cleanup is Cleanup.COMPACT
            else f"{topic.retention_ms // 3_600_000} h"
        )
        table.add_row(
            topic.name,
            topic.key.value,
            ", ".join(event.__name__ for event in topic.events),
            kept,
            ", ".join(topic.writers),
            ", ".join(topic.readers),
        )
    output().print(table)


def _fail(error: TopicPlanError) -> NoReturn:
    typer.echo(f"turnlog: {error}", err=True)
    raise SystemExit(USAGE_ERROR_EXIT if isinstance(error, PlanRefused) else 1)


def _show(difference: Difference, *, done: bool) -> None:
    if difference.empty:
        typer.echo("The cluster is as planned.")
        return
    for topic in difference.create:
        typer.echo(f"{'made' if done else 'to make'}: {topic.name} ({topic.partitions} partitions)")
    for topic in difference.configure:
        changes = ", ".join(f"{name}={value}" for name, value in topic.configs.items())
        typer.echo(f"{'configured' if done else 'to configure'}: {topic.name} ({changes})")
    for line in difference.refused:
        typer.echo(f"refused: {line}", err=True)
