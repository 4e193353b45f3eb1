"""Starts that must fail: one line that says what is wrong, exit code 2, and nothing left behind."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from infra.supervisor.home import is_locked
from tests.integration.processes import turnlog
from tests.integration.running import free_ports, processes_of


def refused(home: Path, variables: Mapping[str, str], *words: str) -> str:
    """The line that says why."""
    done = turnlog(*words or ("up",), variables={"TURNLOG_HOME": str(home), **variables})
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert not is_locked(home)
    assert processes_of(home) == []
    assert not (home / "kafka").exists(), "nothing was begun"
    return line


def test_a_policy_that_cannot_be_obeyed_stops_the_start(tmp_path: Path) -> None:
    file = tmp_path / "policies.toml"
    file.write_text("[tiers.free", "utf-8")
    line = refused(tmp_path / "home", {"TURNLOG_POLICIES": str(file)})
    assert line.startswith(f"turnlog: {file}: Expected ']' at the end of a table declaration")


def test_damaged_secrets_stop_every_command_that_needs_them(tmp_path: Path) -> None:
    file = tmp_path / "secrets.json"
    file.write_text("{")
    for words in (("up",), ("token", "--account", "ada"), ("ask", "Hello")):
        assert refused(tmp_path, {}, *words) == (
            f"turnlog: {file} is unreadable or damaged: restore it, or remove it to start anew"
        )
    assert file.read_text() == "{", "what can perhaps be restored is left alone"


def test_a_damaged_history_stops_the_start_and_says_that_it_can_be_rebuilt(tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    file.write_bytes(b"no database" * 1_000)
    assert refused(tmp_path, {}) == (
        f"turnlog: {file} is damaged (file is not a database): remove it, it is rebuilt from the log"
    )


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"TURNLOG_WORKERS": "two"}, "TURNLOG_WORKERS must be a whole number, 0 to 64, not 'two'"),
        (
            {"TURNLOG_MODELS": "gpt"},
            "TURNLOG_MODELS: unknown model 'gpt'; known: gemma3-270m, smollm2-135m",
        ),
        (
            {"TURNLOG_EDGES": "2", "TURNLOG_EDGE_PORTS": "8080"},
            "TURNLOG_EDGE_PORTS names 1 ports for 2 edges (TURNLOG_EDGES)",
        ),
        ({"TURNLOG_PORT": "65535", "TURNLOG_EDGES": "2"}, "TURNLOG_PORT + TURNLOG_EDGES passes"),
    ],
    ids=lambda value: "",
)
def test_a_variable_that_makes_no_sense_stops_the_start(
    tmp_path: Path, variables: Mapping[str, str], why: str
) -> None:
    assert refused(tmp_path / "home", variables).startswith(f"turnlog: {why}")


def test_a_taken_port_of_any_edge_or_of_the_controller_stops_the_start(tmp_path: Path) -> None:
    port, other, free = free_ports(3)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        for variable, variables in (
            ("TURNLOG_KAFKA_CONTROLLER_PORT", {"TURNLOG_KAFKA_CONTROLLER_PORT": str(port)}),
            (
                "TURNLOG_EDGE_PORTS",
                {"TURNLOG_EDGES": "2", "TURNLOG_EDGE_PORTS": f"{other},{port}"},
            ),
        ):
            chosen = {"TURNLOG_PORT": str(other), "TURNLOG_KAFKA_PORT": str(free), **variables}
            assert refused(tmp_path / "home", chosen) == (
                f"turnlog: port {port} is in use (Address already in use); "
                f"set {variable} to a free one"
            )


def test_a_home_that_is_no_folder_stops_the_start(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    done = turnlog("up", variables={"TURNLOG_HOME": str(file)})
    assert done.returncode == 2
    assert done.stderr == f"turnlog: [Errno 17] File exists: '{file}'\n"


def test_an_account_that_cannot_be_is_one_clear_line(tmp_path: Path) -> None:
    line = refused(tmp_path, {}, "ask", "Hello", "--account", "no such name")
    assert line.startswith("turnlog: a name has 1 to 64 of the characters")
