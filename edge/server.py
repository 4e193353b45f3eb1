"""The edge process: `python -m edge.server`.

Order of a start: settings, secrets and store; the broker; the tails at their end; only then the port. Order of an end: readiness
fails, streams end after a complete event, the port closes, and what is left is closed within a few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvicorn
from aiokafka.errors import KafkaError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from edge.app import build_app
from edge.appends import Appends, ProducerBroken
from edge.catch_up import CatchUp
from edge.direct_writer import EdgeProtocol, missing_names
from edge.loop_lag import LoopLag
from edge.metrics import Metrics
from edge.own_chats import OwnChats
from edge.runs import RunTable
from edge.soft_views import Accounts, BrokerClock, Workers
from edge.start_gap import StartGap
from edge.state import EdgeState
from edge.streams import Streams
from edge.tails import follow_accounts, follow_tokens, follow_workers, open_tail
from edge.wait_watch import WaitWatch
from infra.history import History, HistoryUnavailable
from infra.history.sqlite import HISTORY_FILE, open_history
from infra.log.epoch import topic_epoch
from infra.log.span_reader import START_WAIT_MS_MAX, SpanFailed, SpanReader
from infra.log.tail import OffsetsGone
from infra.models import ModelFileMissingError, PromptModel, UnknownModelError, load_model
from infra.process import DEFECT_EXIT, announce_ready, start_logging, stop_requested
from infra.secrets import Secrets, SecretsError, load_secrets
from infra.settings import exit_with_usage_error, kafka_bootstrap, read_settings_or_exit
from producers.log_writer import LogWriter
from schemas.topics import ACCOUNT_SNAPSHOTS, ACCOUNTS, ADMISSIONS, CHATS, TOKENS, WORKERS

# A client waits for it.
CLIENT_SPAN_WAIT_MS_MAX: Final = 10_000
CAUGHT_UP_WAIT_S_MAX: Final = 60.0
HOUSEKEEPING_EVERY_S: Final = 1.0
SHUTDOWN_S_MAX: Final = 2
KEEP_ALIVE_S: Final = 30
BACKLOG: Final = 2_048

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSettings:
    """What this process reads of the environment."""

    home: Path
    log: str
    kafka: str
    kafka_port: int
    port: int
    low_disk_mb: int
    models: tuple[str, ...]
    part: str

    @property
    def parks(self) -> bool:
        """Whether this is the edge that parks bad records of the topics that only edges read."""
        return self.part in ("", "edge-0")


class EdgeServer(uvicorn.Server):
    """uvicorn without signal handlers of its own: this process decides when it ends. `listening` is set when it does."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and only then say so."""
        await super().startup(sockets=sockets)
        self.listening.set()


async def say_ready(listening: asyncio.Event, accounts: Accounts) -> None:
    """Tell the supervisor that every route works. On a new log admission has to have said the limits first."""
    await listening.wait()
    if accounts.limits is None:
        log.info("listening; the limits are not known yet")
    await accounts.limits_known.wait()
    announce_ready()


def bind(port: int) -> socket.socket:
    """A listening socket on loopback, or one clear line and the end."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
    except OSError as error:
        listening.close()
        exit_with_usage_error(f"port {port} is in use ({error.strerror}); set TURNLOG_PORT")
    return listening


@contextlib.asynccontextmanager
async def open_edge(
    settings: EdgeSettings,
    *,
    secrets: Secrets,
    history: History,
    models: Mapping[str, PromptModel],
) -> AsyncIterator[tuple[EdgeState, asyncio.TaskGroup]]:
    """An edge whose tails are at their end, and the group of its tasks. A task that fails ends the process."""
    bootstrap = kafka_bootstrap(kafka=settings.kafka, kafka_port=settings.kafka_port)
    epoch = await topic_epoch(bootstrap)
    clock = BrokerClock(monotonic=time.monotonic, wall=time.time)
    workers, accounts, metrics, lag = Workers(clock), Accounts(clock), Metrics(), LoopLag()
    async with contextlib.AsyncExitStack() as stack:
        writer = await stack.enter_async_context(
            LogWriter(bootstrap=bootstrap, client_id="turnlog-edge")
        )
        reader = await stack.enter_async_context(
            SpanReader(
                bootstrap=bootstrap,
                client_id="turnlog-edge-spans",
                span_wait_ms_max=CLIENT_SPAN_WAIT_MS_MAX,
            )
        )
        for topic in (ACCOUNTS, CHATS):
            await writer.partitions_of(topic)  # Asked for before a client waits for it.
        partitions = await writer.partitions_of(TOKENS)
        rows, row_ends = await open_tail(
            bootstrap, reader, ACCOUNT_SNAPSHOTS, partitions, from_start=True
        )
        reports, _ = await open_tail(bootstrap, reader, WORKERS, partitions)
        tokens, token_ends = await open_tail(bootstrap, reader, TOKENS, partitions)
        for tail in (rows, reports, tokens):
            await stack.enter_async_context(tail)
        # After the tail's start, so that what was queued before it was most likely admitted before this.
        admitted = await reader.bounds(
            ADMISSIONS, list(range(partitions)), wait_ms_max=START_WAIT_MS_MAX
        )
        appends = Appends(writer)
        runs = RunTable(epoch=epoch, starts=token_ends, now=time.monotonic)
        runs.on_written = metrics.written
        watch = WaitWatch(workers, metrics)
        runs.on_turned = watch.turned
        edge = EdgeState(
            home=settings.home,
            low_disk_mb=settings.low_disk_mb,
            secrets=secrets,
            partitions=partitions,
            models=models,
            appends=appends,
            reader=reader,
            history=history,
            chats=OwnChats(history),
            runs=runs,
            catch_up=CatchUp(runs=runs, reader=reader, history=history),
            workers=workers,
            accounts=accounts,
            clock=clock,
            gap=StartGap(history=history, ends={p: b.end for p, b in admitted.items()}),
            streams=Streams(),
            lag=lag,
            metrics=metrics,
        )
        caught_up = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(follow_accounts(rows, row_ends, accounts, caught_up)),
                group.create_task(
                    follow_workers(reports, workers, clock, writer, parks=settings.parks)
                ),
                group.create_task(follow_tokens(tokens, runs, clock)),
                group.create_task(lag.probe()),
                group.create_task(appends.watch()),
                group.create_task(_keep_house(edge, watch)),
            ]
            async with asyncio.timeout(CAUGHT_UP_WAIT_S_MAX):
                await caught_up.wait()
            yield edge, group
            for task in tasks:
                task.cancel()


async def _keep_house(edge: EdgeState, watch: WaitWatch) -> None:
    clock = asyncio.get_running_loop().time
    while True:
        await asyncio.sleep(HOUSEKEEPING_EVERY_S)
        edge.streams.keep_alive(clock())
        edge.runs.forget_old()
        edge.floods.tell(clock())
        watch.look()


def _http_protocol() -> type[asyncio.Protocol]:
    """The protocol class with the fast path, where the installed uvicorn is as it was tried."""
    missing = missing_names()
    if missing:
        log.warning("no fast path for streams; missing: %s", ", ".join(missing))
        return HttpToolsProtocol
    return EdgeProtocol


async def serve(settings: EdgeSettings) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = stop_requested()
    listening = bind(settings.port)
    try:
        secrets, store = load_secrets(settings.home), open_history(settings.home / HISTORY_FILE)
    except (SecretsError, HistoryUnavailable) as error:
        exit_with_usage_error(str(error))
    try:
        models = {name: await asyncio.to_thread(load_model, name) for name in settings.models}
    except (UnknownModelError, ModelFileMissingError) as error:
        exit_with_usage_error(f"TURNLOG_MODELS: {error}")
    async with (
        store as history,
        open_edge(settings, secrets=secrets, history=history, models=models) as (edge, group),
    ):
        server = EdgeServer(
            uvicorn.Config(
                build_app(edge),
                http=_http_protocol(),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=SHUTDOWN_S_MAX,
            )
        )

        async def drain() -> None:
            await stop.wait()
            log.info("draining %d streams", len(edge.streams.open))
            edge.streams.drain()
            for run in edge.runs.all_runs():
                run.wake()  # Whoever waits for a decision or an end learns of the drain.
            server.should_exit = True

        # Models and modules live as long as the process: no collection needs to look at them again.
        gc.collect()
        gc.freeze()
        tasks = [
            group.create_task(drain()),
            group.create_task(say_ready(server.listening, edge.accounts)),
        ]
        listening.listen(BACKLOG)
        await server.serve(sockets=[listening])
        for task in tasks:
            task.cancel()


def main() -> None:
    """Entry point."""
    settings = read_settings_or_exit(EdgeSettings)
    start_logging("edge", settings.log)
    try:
        asyncio.run(serve(settings))
    except* (KafkaError, OffsetsGone, ProducerBroken, SpanFailed, TimeoutError) as group:
        names = sorted({f"{type(error).__name__} {error}".strip() for error in group.exceptions})
        log.error("the log cannot be used: %s", ", ".join(names))  # noqa: TRY400
        os._exit(DEFECT_EXIT)


if __name__ == "__main__":
    main()
