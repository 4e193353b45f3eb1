"""The lock of a home: one supervisor has it, and asking about it takes it from nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.supervisor.home import HomeInUseError, is_locked, locked_home

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


def test_a_home_that_is_taken_is_refused_with_who_has_it(tmp_path: Path) -> None:
    with (
        locked_home(tmp_path),
        pytest.raises(HomeInUseError, match=r"in use by a running system \(pid \d+\)"),
        locked_home(tmp_path),
    ):
        pass
