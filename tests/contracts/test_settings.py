"""What a person who sets a `TURNLOG_` variable may rely on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.settings import (
    KNOWN,
    PREFIX,
    SettingsError,
    default_of,
    group_session_ms,
    kafka_bootstrap,
    read_settings,
    read_settings_or_exit,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    home: Path
    port: int
    kafka: str
    scripted_delay_ms: float
    edge_ports: tuple[int, ...]


def test_unset_variables_have_their_defaults() -> None:
    settings = read_settings(Example, {"PATH": "/bin"})
    assert settings == Example(
        home=Path.cwd() / ".turnlog", port=8080, kafka="", scripted_delay_ms=0.0, edge_ports=()
    )


def test_set_variables_are_read_with_their_types() -> None:
    settings = read_settings(
        Example,
        {
            "TURNLOG_HOME": "/srv/turnlog",
            "TURNLOG_PORT": "9000",
            "TURNLOG_KAFKA": "a:9092,b:9092",
            "TURNLOG_SCRIPTED_DELAY_MS": "2.5",
            "TURNLOG_EDGE_PORTS": "9000,9001",
        },
    )
    assert settings == Example(
        home=Path("/srv/turnlog"),
        port=9000,
        kafka="a:9092,b:9092",
        scripted_delay_ms=2.5,
        edge_ports=(9000, 9001),
    )


def test_an_unknown_variable_is_refused_and_the_nearest_name_suggested() -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings(Example, {"TURNLOG_PROT": "9000"})
    assert str(caught.value) == "unknown variable TURNLOG_PROT; did you mean TURNLOG_PORT?"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TURNLOG_PORT", ""),
        ("TURNLOG_PORT", "0"),
        ("TURNLOG_PORT", "65536"),
        ("TURNLOG_PORT", "80 80x"),
        ("TURNLOG_KAFKA", "localhost"),
        ("TURNLOG_KAFKA", "localhost:"),
        ("TURNLOG_KAFKA", "a:9092,,b:9092"),
        ("TURNLOG_KAFKA", "a:99999"),
        ("TURNLOG_SCRIPTED_DELAY_MS", "nan"),
        ("TURNLOG_SCRIPTED_DELAY_MS", "-1"),
        ("TURNLOG_EDGE_PORTS", "80,,81"),
        ("TURNLOG_EDGE_PORTS", "80,80"),
        ("TURNLOG_ENGINE", "gpt"),
        ("TURNLOG_LOG", "loud"),
        ("TURNLOG_WORKERS", "-1"),
    ],
)
def test_a_malformed_value_is_refused_in_one_line_that_names_the_variable(
    variable: str, value: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings(Example, {variable: value})
    assert str(caught.value).startswith(f"{variable} must be ")
    assert "\n" not in str(caught.value)


def test_a_variable_that_this_process_does_not_read_is_checked_too() -> None:
    with pytest.raises(SettingsError, match="TURNLOG_PARTITIONS"):
        read_settings(Example, {"TURNLOG_PARTITIONS": "many"})


def test_a_process_with_a_bad_variable_says_so_and_exits_with_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TURNLOG_PORT", "eighty")
    with pytest.raises(SystemExit) as caught:
        read_settings_or_exit(Example)
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        "turnlog: TURNLOG_PORT must be a whole number, 1 to 65535, not 'eighty'\n"
    )


def test_every_default_is_a_value_that_could_have_been_set() -> None:
    for setting in KNOWN.values():
        if not isinstance(setting.default, tuple | bool):
            assert setting.parse(str(setting.default)) == default_of(setting), PREFIX + setting.name
        assert setting.doc.endswith("."), PREFIX + setting.name


def test_the_session_is_short_only_on_the_embedded_broker() -> None:
    assert group_session_ms(session_ms=0, kafka="") == 3000
    assert group_session_ms(session_ms=0, kafka="a:9092") == 6000
    assert group_session_ms(session_ms=4500, kafka="a:9092") == 4500


def test_clients_connect_to_the_existing_cluster_when_one_is_named() -> None:
    assert kafka_bootstrap(kafka="a:9092", kafka_port=19092) == "a:9092"
    assert kafka_bootstrap(kafka="", kafka_port=19093) == "127.0.0.1:19093"
