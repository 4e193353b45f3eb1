"""Context assembly: `python -m processors.context_app`.

Reads chat.admissions, chat.outcomes and chat.chats, which are partitioned alike, and writes requests for engines. Several of these
processes may run; each owns some of the partitions.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.history.sqlite import HISTORY_FILE, open_history
from infra.models import ModelFileMissingError, UnknownModelError, load_model
from infra.process import announce_ready, start_logging, stop_requested
from infra.secrets import load_secrets
from infra.settings import (
    exit_with_usage_error,
    group_session_ms,
    kafka_bootstrap,
    read_settings_or_exit,
)
from processors.context_assembly import ContextAssembly
from processors.faust_process import (
    FaustSettings,
    acknowledge,
    broker_or_stop,
    build_app,
    consume,
    run_to_end,
    run_until,
)
from processors.groups import CONTEXT_GROUP
from producers.log_writer import LogWriter
from schemas.topics import ADMISSIONS, CHATS, OUTCOMES


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSettings:
    """What this process reads of its environment."""

    home: Path
    kafka: str
    kafka_port: int
    session_ms: int
    log: str
    models: tuple[str, ...]
    part: str


async def main(settings: ContextSettings) -> None:
    """Assemble until SIGTERM or SIGINT."""
    stop = stop_requested()
    bootstrap = kafka_bootstrap(kafka=settings.kafka, kafka_port=settings.kafka_port)
    if not await broker_or_stop(bootstrap, stop):
        return
    secrets = load_secrets(settings.home)
    try:
        models = {name: load_model(name) for name in settings.models}
    except (UnknownModelError, ModelFileMissingError) as error:
        exit_with_usage_error(f"TURNLOG_MODELS: {error}")
    app = build_app(
        FaustSettings(
            group=CONTEXT_GROUP,
            bootstrap=bootstrap,
            session_ms=group_session_ms(session_ms=settings.session_ms, kafka=settings.kafka),
            home=settings.home,
        )
    )
    async with (
        open_history(settings.home / HISTORY_FILE) as history,
        LogWriter(bootstrap=bootstrap, client_id=CONTEXT_GROUP) as writer,
        asyncio.TaskGroup() as tasks,
    ):
        assembly = ContextAssembly(
            writer=writer,
            history=history,
            models=models,
            cache_key=secrets.cache_key,
            tasks=tasks,
            acknowledge=lambda message: acknowledge(app, message),
        )
        # Asked now: at the end the broker may be gone.
        partitions = set(range(await writer.partitions_of(ADMISSIONS)))
        consume(app, CHATS, assembly.take_chat)
        consume(app, OUTCOMES, assembly.take_outcome)
        consume(app, ADMISSIONS, assembly.take_admission)

        async def on_assigned(*_: Any, **__: Any) -> None:
            announce_ready()

        async def on_revoked(_: Any, /, *given: Any, **__: Any) -> None:
            assembly.revoked({each.partition for each in given[0]})

        # Faust keeps no strong reference to a signal's receiver; these names do.
        app.on_partitions_assigned.connect(on_assigned)
        app.on_partitions_revoked.connect(on_revoked)
        await run_until(app, stop)
        assembly.revoked(partitions)


if __name__ == "__main__":
    found = read_settings_or_exit(ContextSettings)
    start_logging(found.part or "context", found.log)
    run_to_end(main(found))
