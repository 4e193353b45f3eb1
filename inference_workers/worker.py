"""The worker process: `python -m inference_workers.worker`.

It is a member of its model's group, reads the requests of its queues, follows their token partitions, and makes answers with one engine.
Read on in `intake.py` (where work comes from), `desk.py` (what happens to it), `attempt.py` (how an answer gets onto the log) and
`partition_tail.py` (how the log talks back); what each may do is decided in `decisions/`.

SIGTERM: nothing new starts, the group is left, and the answers under way stay open on the log; another worker goes on with them. A
short drain would help nobody: an answer is as safe in another worker's hands, and people wait for this process to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, NoReturn

from aiokafka.errors import KafkaError

from inference_workers.desk import Desk
from inference_workers.engine import Engine
from inference_workers.engine_llama import LlamaEngine, LlamaSettings
from inference_workers.engine_scripted import ScriptedEngine, ScriptedSettings
from inference_workers.intake import Intake
from inference_workers.load_report import REPORT_EVERY_S, Rates, load_report
from inference_workers.policy_tail import follow_shares
from infra.log.epoch import topic_epoch
from infra.log.span_reader import SpanReader
from infra.models import load_model
from infra.models.packaged import ModelFileMissingError
from infra.models.registry import UnknownModelError, model_spec
from infra.process import DEFECT_EXIT, announce_ready, start_logging, stop_requested
from infra.settings import (
    exit_with_usage_error,
    group_session_ms,
    kafka_bootstrap,
    read_settings_or_exit,
)
from producers.log_writer import AppendFailed, LogWriter
from schemas.ids import derived_event_id
from schemas.topics import WORKERS

logger = logging.getLogger(__name__)

TICK_S: Final = 0.1
LATE_TICKS_MAX: Final = 8
LAST_COMMIT_WAIT_S_MAX: Final = 0.5
LAST_SENDS_WAIT_S_MAX: Final = 5.0
LAST_SENDS_POLL_S: Final = 0.02
LAST_REPORT_WAIT_S_MAX: Final = 0.2
FREED_LOGGED_EVERY_REPORTS: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What this process reads of the environment."""

    log: str
    part: str
    kafka: str
    kafka_port: int
    session_ms: int
    model: str
    engine: str
    scripted_delay_ms: float
    scripted_slots: int
    scripted_tokens: int


class _Stopped(Exception):
    """SIGTERM: ends the task group."""


def build_engine(settings: WorkerSettings) -> Engine:
    """The engine that TURNLOG_ENGINE names, for TURNLOG_MODEL. Loads the tokenizer, not yet the model."""
    spec = model_spec(settings.model)
    if settings.engine == "scripted":
        return ScriptedEngine(
            ScriptedSettings(
                model=spec.name,
                slots=settings.scripted_slots,
                context_window=spec.context_window,
                tokens_per_answer=settings.scripted_tokens,
                token_delay_s=settings.scripted_delay_ms / 1000,
            )
        )
    return LlamaEngine(LlamaSettings(model=spec.name), load_model(spec.name))


class Worker:
    """One process's worth: `serve` runs until SIGTERM or until something fails."""

    def __init__(self, settings: WorkerSettings, *, engine: Engine, epoch: int) -> None:
        self._settings = settings
        self._engine = engine
        self._start_epoch = epoch
        part = settings.part or "worker"
        self._worker_id = f"{part}-{secrets.token_hex(4)}"
        self._bootstrap = kafka_bootstrap(kafka=settings.kafka, kafka_port=settings.kafka_port)
        self._session_ms = group_session_ms(session_ms=settings.session_ms, kafka=settings.kafka)
        self._rates = Rates()
        self._started = False

    async def serve(self, stop: asyncio.Event) -> None:
        """Work. Returns after `stop`, also while it is still starting; raises an ExceptionGroup with what failed."""
        serving = asyncio.create_task(self._serve(stop))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not self._started:
            serving.cancel()
        try:
            await serving
        except asyncio.CancelledError:
            logger.info("worker_stopped_while_starting")

    async def _serve(self, stop: asyncio.Event) -> None:
        try:
            async with self._parts() as (log, spans, tasks):
                await self._work(stop, log, spans, tasks)
        except* _Stopped:
            pass

    @contextlib.asynccontextmanager
    async def _parts(self) -> AsyncIterator[tuple[LogWriter, SpanReader, asyncio.TaskGroup]]:
        async with (
            LogWriter(bootstrap=self._bootstrap, client_id=self._worker_id) as log,
            SpanReader(bootstrap=self._bootstrap, client_id=self._worker_id) as spans,
            self._engine,
            asyncio.TaskGroup() as tasks,
        ):
            yield log, spans, tasks

    async def _work(
        self,
        stop: asyncio.Event,
        log: LogWriter,
        spans: SpanReader,
        tasks: asyncio.TaskGroup,
    ) -> None:
        defect: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_defect(error: BaseException) -> None:
            if not defect.done():
                defect.set_exception(error)

        desk = Desk(
            engine=self._engine,
            log=log,
            worker_id=self._worker_id,
            tasks=tasks,
            now_ms=_now_ms,
            on_defect=on_defect,
        )
        # First of all: an engine that is gone takes the process along, whatever else goes on.
        tasks.create_task(self._watch_engine(desk))
        intake = Intake(
            bootstrap=self._bootstrap,
            client_id=self._worker_id,
            model=self._settings.model,
            epoch=await topic_epoch(self._bootstrap),
            session_ms=self._session_ms,
            desk=desk,
            log=log,
            spans=spans,
            tasks=tasks,
            now_ms=_now_ms,
        )
        async with intake.membership:
            self._started = True
            tasks.create_task(_first_failure(defect, intake.membership.failure))
            intake.start()
            tasks.create_task(keep_ticking(desk.tick, _now_ms))
            tasks.create_task(self._report(desk, log))
            tasks.create_task(self._announce(intake))
            tasks.create_task(
                follow_shares(
                    bootstrap=self._bootstrap,
                    client_id=self._worker_id,
                    spans=spans,
                    on_shares=desk.share,
                )
            )
            await stop.wait()
            await self._stop(desk, intake, log)
        raise _Stopped

    async def _announce(self, intake: Intake) -> None:
        await intake.serving.wait()
        announce_ready()
        logger.info("worker_ready id=%s model=%s", self._worker_id, self._settings.model)

    async def _stop(self, desk: Desk, intake: Intake, log: LogWriter) -> None:
        logger.info("worker_stopping busy=%d queued=%d", desk.busy, desk.waiting)
        desk.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_COMMIT_WAIT_S_MAX):
                await intake.commit_now()
        await intake.stop()
        with contextlib.suppress(AppendFailed, TimeoutError):
            async with asyncio.timeout(LAST_REPORT_WAIT_S_MAX):
                await self._append_report(desk, log, ordinal=0, draining=True)
        logger.info("slot_freed_delays %s", desk.freed_delays)

    async def _watch_engine(self, desk: Desk) -> NoReturn:
        health = await self._engine.wait_failed()
        logger.error("engine_failed health=%s", health)
        desk.stop()
        # What was sent gets onto the log, so that an attempt which killed its engine is counted (G7).
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_SENDS_WAIT_S_MAX):
                while desk.unacknowledged:  # noqa: ASYNC110 - nobody waits for it in the ordinary course of things
                    await asyncio.sleep(LAST_SENDS_POLL_S)
        logging.shutdown()
        # At once: a stalled engine may hang every orderly way out, and others wait for its runs.
        os._exit(DEFECT_EXIT)

    async def _report(self, desk: Desk, log: LogWriter) -> NoReturn:
        """Say every second how loaded we are. Soft state: a report that cannot be sent is dropped."""
        ordinal, last_s, freed_logged = 0, time.monotonic(), 0
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            ordinal += 1
            now_s = time.monotonic()
            elapsed_s = now_s - last_s
            full = desk.second(elapsed_s=elapsed_s)
            self._rates.measure(self._engine.load(), full=full, elapsed_s=elapsed_s)
            last_s = now_s
            with contextlib.suppress(AppendFailed):
                await self._append_report(desk, log, ordinal=ordinal, draining=False)
            desk.set_aside_unqueued()
            if (
                ordinal % FREED_LOGGED_EVERY_REPORTS == 0
                and desk.freed_delays.total != freed_logged
            ):
                freed_logged = desk.freed_delays.total
                logger.info("slot_freed_delays %s", desk.freed_delays)

    async def _append_report(
        self, desk: Desk, log: LogWriter, *, ordinal: int, draining: bool
    ) -> None:
        kind = "draining" if draining else "load"
        lanes, free_ms = desk.outlook(full_tokens_per_s=self._rates.full)
        await log.append(
            WORKERS,
            load_report(
                worker_id=self._worker_id,
                model=self._settings.model,
                epoch=self._start_epoch,
                slots=self._engine.caps.slots,
                busy=desk.busy,
                lanes=lanes,
                kv_tokens=self._engine.load().kv_tokens,
                kv_tokens_max=self._engine.caps.kv_tokens_max,
                rates=self._rates,
                partitions=desk.tails,
                draining=draining,
                free_ms=free_ms,
            ),
            event_id=derived_event_id(f"{self._worker_id}/{self._start_epoch}", kind, ordinal),
        )


async def keep_ticking(tick: Callable[[], None], now_ms: Callable[[], int]) -> NoReturn:
    """Let time pass, every TICK_S, but for ticks that come late: at most LATE_TICKS_MAX of them in a row are left out."""
    late = 0
    while True:
        asked_ms = now_ms()
        await asyncio.sleep(TICK_S)
        # A process that stood still itself has heard nothing of the log meanwhile: it listens first, and judges at the next tick.
        late = late + 1 if now_ms() - asked_ms > 2_000 * TICK_S else 0
        if not 0 < late <= LATE_TICKS_MAX:
            tick()


async def _first_failure(*futures: asyncio.Future[None]) -> None:
    """Raise what happened where no task could."""
    done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    for future in done:
        future.result()


def _now_ms() -> int:
    return int(time.monotonic() * 1000)


async def _main(settings: WorkerSettings) -> None:
    stop = stop_requested()
    engine = build_engine(settings)
    # Milliseconds since 1970: only ever compared with other starts of the same worker.
    await Worker(settings, engine=engine, epoch=time.time_ns() // 1_000_000).serve(stop)


def main() -> int:
    """Run until SIGTERM (0), or until something fails (70)."""
    settings = read_settings_or_exit(WorkerSettings)
    try:
        model_spec(settings.model).path()
    except (UnknownModelError, ModelFileMissingError) as error:
        exit_with_usage_error(f"TURNLOG_MODEL: {error}")
    start_logging(settings.part or "worker", settings.log)
    try:
        asyncio.run(_main(settings))
    except BaseExceptionGroup as group:
        away, other = group.split((KafkaError, TimeoutError, AppendFailed))
        if away is not None:
            # The broker's absence is no news that needs a stack trace.
            logger.error("worker_failed %s", away.exceptions)  # noqa: TRY400
        if other is not None:
            logger.error("worker_failed", exc_info=other)  # noqa: TRY400
        return DEFECT_EXIT
    except (KafkaError, TimeoutError) as error:
        logger.error("worker_failed %s %s", type(error).__name__, error)  # noqa: TRY400
        return DEFECT_EXIT
    return 0


if __name__ == "__main__":
    sys.exit(main())
