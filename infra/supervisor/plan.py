"""From settings to the parts of a system: which processes, with which environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from infra.embedded.kafka import BrokerCommand, BrokerPlan, require_free_port, wait_until_serving
from infra.models.packaged import ModelFileMissingError
from infra.models.registry import UnknownModelError, require_models
from infra.settings import (
    SettingsError,
    cache_folder,
    group_session_ms,
    kafka_bootstrap,
)
from infra.supervisor.part import START_DEADLINE_S, PartPlan, Phase

PROCESSORS: Final = {
    "admission": "processors.admission_app",
    "context": "processors.context_app",
    "recorder": "processors.recorder",
    "projector": "processors.projector",
}
WORKER_MODULE: Final = "inference_workers.worker"
EDGE_MODULE: Final = "edge.server"
PORT_MAX: Final = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """What `turnlog up` needs to know; every process reads its own beside it."""

    home: Path
    cache: Path
    policies: Path
    kafka: str
    kafka_port: int
    kafka_controller_port: int
    kafka_heap_mb: int
    session_ms: int
    partitions: int
    port: int
    edges: int
    edge_ports: tuple[int, ...]
    workers: int
    models: tuple[str, ...]
    restarts_max: int

    @property
    def bootstrap(self) -> str:
        """Where the processes find Kafka."""
        return kafka_bootstrap(kafka=self.kafka, kafka_port=self.kafka_port)

    @property
    def ports(self) -> tuple[int, ...]:
        """The port of each edge. Raises SettingsError where they do not fit."""
        ports = self.edge_ports or tuple(self.port + i for i in range(self.edges))
        if len(ports) != self.edges:
            raise SettingsError(
                f"TURNLOG_EDGE_PORTS names {len(ports)} ports for {self.edges} edges (TURNLOG_EDGES)"
            )
        if ports[-1] > PORT_MAX:
            raise SettingsError(f"TURNLOG_PORT + TURNLOG_EDGES passes {PORT_MAX}")
        return ports

    @property
    def urls(self) -> tuple[str, ...]:
        """Where each edge serves."""
        return tuple(f"http://127.0.0.1:{port}" for port in self.ports)


def require_free_ports(settings: UpSettings) -> None:
    """Raise BrokerError or SettingsError where an edge's port is taken or does not fit."""
    variable = "TURNLOG_EDGE_PORTS" if settings.edge_ports else "TURNLOG_PORT"
    for port in settings.ports:
        require_free_port(port, variable)


def require_installed(settings: UpSettings) -> None:
    """Raise SettingsError where a model is unknown or its file is not there; one in parts is joined."""
    try:
        require_models(settings.models)
    except (UnknownModelError, ModelFileMissingError) as error:
        raise SettingsError(f"TURNLOG_MODELS: {error}") from error


def broker_plan(settings: UpSettings) -> BrokerPlan:
    """The embedded broker of this system."""
    return BrokerPlan(
        data=settings.home / "kafka",
        logs=settings.home / "logs",
        jars=cache_folder(cache=settings.cache, home=settings.home) / "kafka",
        port=settings.kafka_port,
        controller_port=settings.kafka_controller_port or settings.kafka_port + 1,
        heap_mb=settings.kafka_heap_mb,
    )


def planned_parts(settings: UpSettings, broker: BrokerCommand | None) -> tuple[PartPlan, ...]:
    """Every part of the system, in no order."""
    parts: list[PartPlan] = []
    if broker is not None:
        parts.append(_broker_part(settings, broker))
    make = _PythonParts(settings=settings)
    parts.extend(make.part(name, module, Phase.PROCESSOR) for name, module in PROCESSORS.items())
    for model in settings.models:
        # The first model's workers have short names: mostly it is the only one.
        prefix = "worker" if model == settings.models[0] else f"worker-{model}"
        parts.extend(
            make.part(
                f"{prefix}-{i}", WORKER_MODULE, Phase.WORKER, environ={"TURNLOG_MODEL": model}
            )
            for i in range(settings.workers)
        )
    for i, port in enumerate(settings.ports):
        parts.append(
            make.part(
                f"edge-{i}", EDGE_MODULE, Phase.EDGE, port=port, environ={"TURNLOG_PORT": str(port)}
            )
        )
    return tuple(parts)


def _broker_part(settings: UpSettings, broker: BrokerCommand) -> PartPlan:
    async def probe() -> None:
        # Whoever waits for this gives up first, and says what is missing.
        await wait_until_serving(broker.bootstrap, deadline_s=2 * START_DEADLINE_S)

    return PartPlan(
        name="kafka",
        argv=broker.argv,
        phase=Phase.BROKER,
        # What the Java runtime says; the broker itself has a log of its own.
        log=settings.home / "logs" / "kafka.out",
        own_log=settings.home / "logs" / "kafka.log",
        ready_file=settings.home / "run" / "kafka.ready",
        port=settings.kafka_port,
        probe=probe,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PythonParts:
    settings: UpSettings
    shared: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        session_ms = group_session_ms(session_ms=settings.session_ms, kafka=settings.kafka)
        object.__setattr__(
            self,
            "shared",
            {
                "TURNLOG_HOME": str(settings.home),
                "TURNLOG_KAFKA": settings.bootstrap,
                "TURNLOG_SESSION_MS": str(session_ms),
                # A crash in native code (the engine, the codecs) leaves its place in the log.
                "PYTHONFAULTHANDLER": "1",
            },
        )

    def part(
        self,
        name: str,
        module: str,
        phase: Phase,
        *,
        port: int | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> PartPlan:
        return PartPlan(
            name=name,
            argv=(sys.executable, "-m", module),
            phase=phase,
            log=self.settings.home / "logs" / f"{name}.log",
            ready_file=self.settings.home / "run" / f"{name}.ready",
            environ={**self.shared, "TURNLOG_PART": name, **(environ or {})},
            port=port,
        )
