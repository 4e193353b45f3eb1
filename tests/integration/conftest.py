"""Fixtures on real processes. Nothing here is faked: a broker is Kafka, a system is `turnlog up`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import pytest

from infra.command.topics import apply_topics
from tests.integration.edge_peers import MODEL, EdgeProcess, ScriptedPeer, scripted_peer
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


@pytest.fixture(scope="session")
def edge_bootstrap(broker: RunningBroker) -> str:
    """The session's broker, with the topics of one system whose only real processes are edges."""
    asyncio.run(apply_topics(broker.bootstrap, models=(MODEL,), partitions=12))
    return broker.bootstrap


@pytest.fixture(scope="session")
def edge_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of that system."""
    return tmp_path_factory.mktemp("edge-home")


@pytest.fixture(scope="session")
def edges(edge_home: Path, edge_bootstrap: str) -> Iterator[tuple[EdgeProcess, EdgeProcess]]:
    """Two edges of one system. Do not end them."""
    first, second = (
        EdgeProcess(
            home=edge_home, bootstrap=edge_bootstrap, variables={"TURNLOG_PART": f"edge-{number}"}
        )
        for number in range(2)
    )
    yield first.wait_ready(), second.wait_ready()
    first.end()
    second.end()


@pytest.fixture
async def peer(edge_home: Path, edge_bootstrap: str) -> AsyncIterator[ScriptedPeer]:
    """Plays the other processes of that system on the log, as the test tells it."""
    async with scripted_peer(edge_home, edge_bootstrap) as found:
        yield found
