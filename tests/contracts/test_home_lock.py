"""The lock of a home: one supervisor has it, and asking about it takes it from nobody."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import infra.supervisor.home as home_module
from infra.supervisor.home import (
    LOCK_NAME,
    HomeInUseError,
    is_locked,
    locked_home,
    own_state,
    running_system,
    write_state,
)

TIMES = 2_000


@contextmanager
def asked_all_the_time(home: Path) -> Iterator[None]:
    """As `turnlog down` asks, from elsewhere."""
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            is_locked(home)

    with ThreadPoolExecutor() as pool:
        asking = pool.submit(ask)
        try:
            yield
        finally:
            stop.set()
        asking.result()


def test_who_asks_about_a_home_keeps_nobody_from_taking_it(tmp_path: Path) -> None:
    with asked_all_the_time(tmp_path):
        for _ in range(TIMES):
            with locked_home(tmp_path):
                pass


def test_two_who_ask_at_once_do_not_take_each_other_for_a_supervisor(tmp_path: Path) -> None:
    with locked_home(tmp_path):
        assert is_locked(tmp_path)
    with asked_all_the_time(tmp_path):
        assert not any(is_locked(tmp_path) for _ in range(TIMES))


def test_who_stood_still_while_another_asked_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1_000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    with (tmp_path / LOCK_NAME).open("a") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)

        def stood_still(_: Path) -> None:
            now_s[0] += 60
            fcntl.flock(asking, fcntl.LOCK_UN)

        monkeypatch.setattr(home_module, "holder", stood_still)
        with locked_home(tmp_path):
            pass


def test_a_system_is_found_though_the_clock_was_set_and_not_after_another_start_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = own_state(started_at_s=0.0, ready=True, kafka="a:1", urls=(), parts=())
    write_state(tmp_path, state)
    set_clock = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda each: set_clock(each) + 3_600)
    assert running_system(tmp_path) == state
    write_state(tmp_path, replace(state, boot="another"))
    assert running_system(tmp_path) is None


def test_a_home_that_is_taken_is_refused_with_who_has_it(tmp_path: Path) -> None:
    with (
        locked_home(tmp_path),
        pytest.raises(HomeInUseError, match=r"in use by a running system \(pid \d+\)"),
        locked_home(tmp_path),
    ):
        pass
