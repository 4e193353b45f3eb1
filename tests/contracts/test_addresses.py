"""Commands find the system of their home on whatever ports it was started."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infra.command.addresses import ClusterSettings, edge_url
from infra.command.main import command
from infra.supervisor.home import own_state, write_state

KAFKA = "127.0.0.1:29999"


def _runs_in(home: Path, *urls: str) -> None:
    """A state file as this process would write it, were it the supervisor."""
    state = own_state(started_at_s=0.0, ready=True, kafka=KAFKA, urls=urls, parts=())
    write_state(home, state)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TURNLOG_PORT", "TURNLOG_KAFKA", "TURNLOG_KAFKA_PORT"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def nobody_listens() -> Iterator[int]:
    """A port that is taken, so that nobody else comes to listen there either."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def _cluster(home: Path) -> str:
    return ClusterSettings(home=home, kafka="", kafka_port=19092).bootstrap


def test_the_system_that_runs_in_the_home_says_where_it_is(tmp_path: Path) -> None:
    _runs_in(tmp_path, "http://127.0.0.1:9001", "http://127.0.0.1:9002")
    assert edge_url(tmp_path, port=8080) == "http://127.0.0.1:9001"
    assert _cluster(tmp_path) == KAFKA


def test_a_variable_that_is_set_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _runs_in(tmp_path, "http://127.0.0.1:9001")
    monkeypatch.setenv("TURNLOG_PORT", "8080")
    monkeypatch.setenv("TURNLOG_KAFKA_PORT", "19092")
    assert edge_url(tmp_path, port=8080) == "http://127.0.0.1:8080"
    assert _cluster(tmp_path) == "127.0.0.1:19092"


def test_where_nothing_runs_the_defaults_are_tried(tmp_path: Path) -> None:
    assert edge_url(tmp_path, port=8080) == "http://127.0.0.1:8080"
    assert _cluster(tmp_path) == "127.0.0.1:19092"


def test_ask_goes_to_the_edge_of_its_home(
    tmp_path: Path, nobody_listens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{nobody_listens}"
    _runs_in(tmp_path, url)
    monkeypatch.setenv("TURNLOG_HOME", str(tmp_path))
    done = CliRunner().invoke(command(["ask"]), ["ask", "Hi"])
    assert done.exit_code == 1
    assert f"no Turnlog answers at {url}" in done.output
