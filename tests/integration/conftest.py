"""Fixtures on real processes. Nothing here is faked: a broker is Kafka, a system is `turnlog up`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from pathlib import Path

import pytest

from infra.command.topics import apply_topics
from tests.integration.class_archive import use_class_archive
from tests.integration.edge_peers import MODEL, EdgeProcess, ScriptedPeer, scripted_peer
from tests.integration.processes import last_words, started_so_far
from tests.integration.running import RunningBroker, RunningSystem
from tests.integration.waiting import PATIENCE_S
from tests.reporting import PROCESSES

SystemFactory = Callable[[Mapping[str, str]], RunningSystem]
EdgeFactory = Callable[..., EdgeProcess]

PATIENT = {
    "edge.submission.DECISION_WAIT_S_MAX": int(PATIENCE_S),
    "edge.chat_routes.APPEND_WAIT_MS_MAX": int(PATIENCE_S * 1000),
    "edge.run_routes.CANCEL_APPEND_WAIT_MS_MAX": int(PATIENCE_S * 1000),
    "edge.server.CLIENT_SPAN_WAIT_MS_MAX": int(PATIENCE_S * 1000),
    "edge.loop_lag.LAG_S_MAX": int(PATIENCE_S),
}
"""A starved broker, and what a test plays of the other parts, may take longer than an edge waits for them elsewhere."""

_begun = pytest.StashKey[int]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note which processes are older than the test."""
    item.stash[_begun] = started_so_far()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows what its processes said last."""
    report = yield
    if report.failed:
        report.user_properties.append((PROCESSES, last_words(item.stash.get(_begun, 0))))
    return report


@pytest.fixture(scope="session", autouse=True)
def _class_archive() -> None:
    use_class_archive()


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


@pytest.fixture(scope="module")
def shared_system(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningSystem]:
    """A system for all tests of a file, with the file's VARIABLES: starting one costs more than most tests do."""
    running = RunningSystem(tmp_path_factory.mktemp("shared") / "home")
    try:
        running.start(request.module.VARIABLES)
        running.wait_ready()
        yield running
    finally:
        running.end()


@pytest.fixture
def running(shared_system: RunningSystem) -> RunningSystem:
    """The file's system, whole: what the test before has killed runs again. Each test needs accounts of its own."""
    shared_system.wait_whole()
    return shared_system


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
    """Two edges of one system that wait as long for a decision as tests do. Do not end them."""
    first, second = (
        EdgeProcess(
            home=edge_home,
            bootstrap=edge_bootstrap,
            variables={"TURNLOG_PART": f"edge-{number}"},
            limits=PATIENT,
        )
        for number in range(2)
    )
    yield first.wait_ready(), second.wait_ready()
    assert (first.stop(), second.stop()) == (0, 0)


@pytest.fixture
def another_edge(edge_home: Path, edge_bootstrap: str) -> Iterator[EdgeFactory]:
    """Start one more edge of that system, `another_edge(TURNLOG_PART="edge-7")`; it is ended with the test."""
    started: list[EdgeProcess] = []

    def start(**variables: str) -> EdgeProcess:
        started.append(EdgeProcess(home=edge_home, bootstrap=edge_bootstrap, variables=variables))
        return started[-1]

    yield start
    for edge in started:
        edge.end()


@pytest.fixture
async def peer(edge_home: Path, edge_bootstrap: str) -> AsyncIterator[ScriptedPeer]:
    """Plays the other processes of that system on the log, as the test tells it."""
    async with scripted_peer(edge_home, edge_bootstrap) as found:
        yield found
