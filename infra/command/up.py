"""`turnlog up`: the life of one system, seen from a terminal."""

from __future__ import annotations

import asyncio
from typing import Final

from infra.command.policy import PolicyNotWritten, sync_policy
from infra.command.running import ended_line
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
    end_leftovers,
    free_mib,
    locked_home,
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
        say(ended_line(ended))
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
