"""`turnlog up`, `status` and `down`, as a person in a terminal meets them."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import httpx
import psutil

from infra.supervisor.home import live_process, read_state
from infra.supervisor.plan import PROCESSORS
from tests.integration.conftest import SystemFactory
from tests.integration.processes import turnlog
from tests.integration.running import free_ports
from tests.integration.waiting import PATIENCE_S, eventually

MIB = 1024 * 1024
ALL_RSS_MIB_MAX = 2048
# 9 s after the stop was asked the last part is killed; the rest is the machine's.
STOP_S_MAX = 30


def test_a_system_comes_up_shows_its_parts_and_stops_leaving_nothing(
    system: SystemFactory,
) -> None:
    running = system({"TURNLOG_EDGES": "2"})
    # Its state file says so a moment earlier.
    eventually(
        lambda: f"Turnlog is ready: {running.url}" in running.output().splitlines(),
        what="the ready line",
    )
    wanted = {"kafka", *PROCESSORS, "worker-0", "edge-0", "edge-1"}
    assert set(running.parts()) == wanted

    # Every route works by then, at every edge, and a command needs no more than the home.
    home = {"TURNLOG_HOME": str(running.home)}
    token = turnlog("token", "--account", "me", "--tier", "plus", variables=home).stdout.strip()
    for url in running.urls:
        quota = httpx.get(
            f"{url}/v1/quota", headers={"Authorization": f"Bearer {token}"}, timeout=PATIENCE_S
        )
        assert quota.status_code == 200, quota.text
    policy = turnlog("policy", "show", variables=home)
    assert policy.returncode == 0, policy.stderr

    shown = turnlog("status", variables=home)
    assert shown.returncode == 0
    for name in wanted:
        assert f"{running.part(name).pid}" in shown.stdout

    state = running.state()
    assert state is not None
    family = psutil.Process(running.pid).children(recursive=True)
    rss = sum(process.memory_info().rss for process in family)
    assert rss < ALL_RSS_MIB_MAX * MIB

    code, seconds = running.stop(signal.SIGTERM)
    assert code == 0
    assert seconds < STOP_S_MAX
    assert [part.name for part in state.parts if live_process(part.pid, part.created_s)] == []
    assert [process.pid for process in family if process.is_running()] == []
    assert running.state() is None


def test_a_stopped_system_starts_again_on_its_data_and_down_stops_it(
    system: SystemFactory,
) -> None:
    running = system({})
    cluster = _cluster_id(running.home)
    code, _ = running.stop(signal.SIGINT)
    assert code == 0
    running.start({})
    running.wait_ready()
    assert _cluster_id(running.home) == cluster
    assert "topics     as planned" in running.output()

    stopped = turnlog("down", variables={"TURNLOG_HOME": str(running.home)})
    assert stopped.stdout == "Stopped.\n"
    assert running.supervisor.wait(timeout=PATIENCE_S) == 0
    again = turnlog("down", variables={"TURNLOG_HOME": str(running.home)})
    assert again.stdout == f"Nothing runs in {running.home}.\n"


def test_no_part_of_a_system_outlives_its_killed_supervisor(system: SystemFactory) -> None:
    running = system({})
    state = running.state()
    assert state is not None
    running.supervisor.kill()
    running.supervisor.wait()

    def left() -> list[str]:
        return [part.name for part in state.parts if live_process(part.pid, part.created_s)]

    eventually(lambda: left() == [], what=f"{left()} ended")


def test_a_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    port, free, controller = free_ports(3)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        for variable in ("TURNLOG_PORT", "TURNLOG_KAFKA_PORT"):
            variables = {
                "TURNLOG_HOME": str(tmp_path),
                "TURNLOG_PORT": str(free),
                "TURNLOG_KAFKA_PORT": str(free),
                "TURNLOG_KAFKA_CONTROLLER_PORT": str(controller),
                variable: str(port),
            }
            done = turnlog("up", variables=variables)
            assert done.returncode == 2
            assert done.stderr == (
                f"turnlog: port {port} is in use (Address already in use); "
                f"set {variable} to a free one\n"
            )


def test_a_misspelt_variable_is_one_clear_line(tmp_path: Path) -> None:
    done = turnlog("up", variables={"TURNLOG_HOME": str(tmp_path), "TURNLOG_WORKER": "2"})
    assert done.returncode == 2
    assert done.stderr == (
        "turnlog: unknown variable TURNLOG_WORKER; did you mean TURNLOG_WORKERS?\n"
    )


def test_a_cluster_that_does_not_answer_is_one_clear_line(tmp_path: Path) -> None:
    kafka_port, port = free_ports(2)
    variables = {
        "TURNLOG_HOME": str(tmp_path),
        "TURNLOG_KAFKA": f"127.0.0.1:{kafka_port}",
        "TURNLOG_PORT": str(port),
    }
    done = turnlog("up", variables=variables)
    assert done.returncode == 1
    assert done.stderr == (
        f"turnlog: topics: no Kafka broker answers at 127.0.0.1:{kafka_port} after 15 s\n"
    )


def test_status_without_a_system_says_so(tmp_path: Path) -> None:
    done = turnlog("status", variables={"TURNLOG_HOME": str(tmp_path)})
    assert done.returncode == 3
    assert done.stdout == f"Nothing runs in {tmp_path}.\n"


def test_a_damaged_state_file_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "supervisor.json").write_text(json.dumps({"parts": 7}))
    assert read_state(tmp_path) is None
    done = turnlog("down", variables={"TURNLOG_HOME": str(tmp_path)})
    assert done.stdout == f"Nothing runs in {tmp_path}.\n"


def _cluster_id(home: Path) -> str:
    text = (home / "kafka" / "log" / "meta.properties").read_text("utf-8")
    return next(line for line in text.splitlines() if line.startswith("cluster.id="))
