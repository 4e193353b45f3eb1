"""Admission and quota: `python -m processors.admission_app`.

Reads chat.accounts and decides each record by the account fold (decisions/account.py). Everything it knows comes from that topic and
from its own rows in chat.account-snapshots. Several of these processes may run; each owns some of the partitions.
"""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.log.span_reader import SpanReader
from infra.process import announce_ready, start_logging, stop_requested
from infra.settings import group_session_ms, kafka_bootstrap, read_settings_or_exit
from processors.account_ledger import AccountLedger
from processors.faust_process import (
    FaustSettings,
    acknowledge,
    broker_or_stop,
    build_app,
    consume,
    or_die,
    run_to_end,
    run_until,
)
from processors.groups import ADMISSION_GROUP
from producers.log_writer import LogWriter
from schemas.topics import ACCOUNTS


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSettings:
    """What this process reads of its environment."""

    home: Path
    kafka: str
    kafka_port: int
    session_ms: int
    log: str
    part: str


async def main(settings: AdmissionSettings) -> None:
    """Decide until SIGTERM or SIGINT."""
    stop = stop_requested()
    bootstrap = kafka_bootstrap(kafka=settings.kafka, kafka_port=settings.kafka_port)
    if not await broker_or_stop(bootstrap, stop):
        return
    app = build_app(
        FaustSettings(
            group=ADMISSION_GROUP,
            bootstrap=bootstrap,
            session_ms=group_session_ms(session_ms=settings.session_ms, kafka=settings.kafka),
            home=settings.home,
        )
    )
    async with (
        LogWriter(bootstrap=bootstrap, client_id=ADMISSION_GROUP) as writer,
        SpanReader(bootstrap=bootstrap, client_id=f"{ADMISSION_GROUP}-spans") as reader,
        asyncio.TaskGroup() as tasks,
    ):
        ledger = AccountLedger(
            writer=writer,
            reader=reader,
            bootstrap=bootstrap,
            group=ADMISSION_GROUP,
            tasks=tasks,
            acknowledge=lambda message: acknowledge(app, message),
        )
        # Asked now: at the end the broker may be gone.
        partitions = range(await writer.partitions_of(ACCOUNTS))
        consume(app, ACCOUNTS, ledger.take)

        async def ready(partitions: list[int]) -> None:
            await ledger.assigned(partitions)
            # What is there now stays. A full collection that looked at it all would hold up decisions for 20 to 50 ms.
            gc.collect()
            gc.freeze()
            announce_ready()

        # Faust keeps no strong reference to a signal's receiver; these names do.
        async def on_assigned(_: Any, /, *given: Any, **__: Any) -> None:
            tasks.create_task(ready(_ours(given[0])))

        async def on_revoked(_: Any, /, *given: Any, **__: Any) -> None:
            ledger.revoked(_ours(given[0]))

        app.on_partitions_assigned.connect(on_assigned)
        app.on_partitions_revoked.connect(on_revoked)
        saving = tasks.create_task(or_die("a save failed", ledger.save_forever()))
        await run_until(app, stop)
        saving.cancel()
        ledger.revoked(partitions)


def _ours(partitions: Any) -> list[int]:
    return [each.partition for each in partitions if each.topic == ACCOUNTS.name]


if __name__ == "__main__":
    found = read_settings_or_exit(AdmissionSettings)
    start_logging(found.part or "admission", found.log)
    run_to_end(main(found))
