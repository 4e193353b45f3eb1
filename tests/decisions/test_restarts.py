"""The supervisor's rules R1 to R3."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infra.supervisor.restarts import (
    DEATHS_WINDOW_S,
    RESTART_DELAY_S_MAX,
    RESTART_DELAY_S_MIN,
    GiveUp,
    Restart,
    after_death,
    death_in_words,
    last_reason,
)


def test_the_first_death_is_answered_soon() -> None:
    """R1."""
    decision = after_death(deaths_s=[100.0], now_s=100.0, exit_code=70, forgiven_max=5)
    assert decision == Restart(delay_s=RESTART_DELAY_S_MIN)


def test_each_death_within_a_minute_doubles_the_delay_up_to_its_bound() -> None:
    """R1."""
    delays = []
    for count in range(1, 9):
        decision = after_death(deaths_s=[0.0] * count, now_s=1.0, exit_code=-9, forgiven_max=100)
        assert isinstance(decision, Restart)
        delays.append(decision.delay_s)
    assert delays == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


def test_one_death_more_than_is_forgiven_within_a_minute_gives_up() -> None:
    """R2."""
    deaths = [float(i) for i in range(6)]
    assert isinstance(
        after_death(deaths_s=deaths[:5], now_s=5.0, exit_code=1, forgiven_max=5), Restart
    )
    decision = after_death(deaths_s=deaths, now_s=5.0, exit_code=1, forgiven_max=5)
    assert decision == GiveUp(reason="died 6 times within a minute")


def test_a_usage_error_is_not_tried_again() -> None:
    """R3."""
    decision = after_death(deaths_s=[1.0], now_s=1.0, exit_code=2, forgiven_max=5)
    assert decision == GiveUp(reason="cannot work with its settings")


@given(
    old=st.lists(st.floats(0, 1_000), max_size=50),
    exit_code=st.integers(-15, 255).filter(lambda code: code != 2),
)
def test_deaths_of_more_than_a_minute_ago_are_forgotten(old: list[float], exit_code: int) -> None:
    """R1, R2."""
    now_s = 1_000 + DEATHS_WINDOW_S + 1
    decision = after_death(deaths_s=[*old, now_s], now_s=now_s, exit_code=exit_code, forgiven_max=1)
    assert decision == Restart(delay_s=RESTART_DELAY_S_MIN)
    assert RESTART_DELAY_S_MIN <= RESTART_DELAY_S_MAX


def test_a_death_is_told_as_a_signal_or_as_an_exit_code() -> None:
    assert death_in_words(-9) == "signal 9"
    assert death_in_words(70) == "exit code 70"


def test_the_reason_of_an_end_is_the_last_critical_line_else_the_last_exception() -> None:
    java = [
        "12:00 ERROR Kafka$ Exiting Kafka due to fatal exception",
        "java.lang.RuntimeException: Error: node ID not found in /x",
        "\tat kafka.Kafka.main(Kafka.scala)",
        "12:00 INFO SocketServer stopped",
    ]
    assert last_reason(java) == java[1]
    assert last_reason([*java, "12:01 CRITICAL edge ending: broken", "ValueError: x"]) == (
        "12:01 CRITICAL edge ending: broken"
    )
    assert last_reason(["a", "  File x", "KeyError: 'y'"]) == "KeyError: 'y'"
    assert last_reason(["turnlog: TURNLOG_PORT must be a port"]) == "TURNLOG_PORT must be a port"
    assert last_reason([]) == ""
