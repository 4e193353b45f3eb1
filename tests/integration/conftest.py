"""Fixtures on real processes. Nothing here is faked: a broker is Kafka, a system is `turnlog up`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.integration.running import RunningBroker, RunningSystem

SystemFactory = Callable[[Mapping[str, str]], RunningSystem]


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    """One broker for the whole session, without topics. Do not end it; use `own_broker` for that."""
    running = RunningBroker(tmp_path_factory.mktemp("broker"))
    running.start()
    yield running
    running.end()


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[RunningBroker]:
    """A broker that the test may kill and start again."""
    running = RunningBroker(tmp_path)
    running.start()
    yield running
    running.end()


@pytest.fixture
def system(tmp_path: Path) -> Iterator[SystemFactory]:
    """Start a whole system, `system({"TURNLOG_EDGES": "2"})`, and wait until it is ready.

    The scripted engine is the default here. Several may be started; all are ended with the test.
    """
    started: list[RunningSystem] = []

    def start(variables: Mapping[str, str]) -> RunningSystem:
        running = RunningSystem(tmp_path / f"home-{len(started)}")
        started.append(running)
        running.start(variables)
        running.wait_ready()
        return running

    yield start
    for running in started:
        running.end()
