"""Every `TURNLOG_` variable, once, and how a process reads those it needs.

A process states a frozen dataclass whose field names are variables in lower case without the
prefix, and calls `read_settings`:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class EdgeSettings:
        port: int
        home: Path

The type, default and bounds come from `KNOWN`, so two processes cannot read one variable in two
ways. Adding a variable is adding one line to `KNOWN`. All variables that are set are checked,
not only those that the process reads: a mistake stops the system at its start.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

PREFIX: Final = "TURNLOG_"
USAGE_ERROR_EXIT: Final = 2

SettingsT = TypeVar("SettingsT")


class SettingsError(ValueError):
    """A malformed or unknown variable. The message is one line that names the variable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One variable. `parse` raises ValueError with what was expected ("a port, 1 to 65535")."""

    name: str
    type: Any
    default: Any
    parse: Callable[[str], Any]
    doc: str


def text(name: str, default: str, doc: str) -> Setting:
    """Any text, also an empty one."""
    return Setting(name=name, type=str, default=default, parse=str, doc=doc)


def integer(name: str, default: int, low: int, high: int, doc: str) -> Setting:
    """A whole number from low to high, both included."""

    def parse(raw: str) -> int:
        expected = f"a whole number, {low} to {high}"
        try:
            number = int(raw)
        except ValueError:
            raise ValueError(expected) from None
        if not low <= number <= high:
            raise ValueError(expected)
        return number

    return Setting(name=name, type=int, default=default, parse=parse, doc=doc)


def number(name: str, default: float, low: float, high: float, doc: str) -> Setting:
    """A number from low to high, both included; never NaN."""

    def parse(raw: str) -> float:
        expected = f"a number, {low:g} to {high:g}"
        try:
            value = float(raw)
        except ValueError:
            raise ValueError(expected) from None
        if not low <= value <= high:
            raise ValueError(expected)
        return value

    return Setting(name=name, type=float, default=default, parse=parse, doc=doc)


def flag(name: str, default: bool, doc: str) -> Setting:
    """`1` or `0`."""

    def parse(raw: str) -> bool:
        if raw not in {"0", "1"}:
            raise ValueError("0 or 1")
        return raw == "1"

    return Setting(name=name, type=bool, default=default, parse=parse, doc=doc)


def choice(name: str, default: str, options: tuple[str, ...], doc: str) -> Setting:
    """One of the options."""

    def parse(raw: str) -> str:
        if raw not in options:
            raise ValueError("one of " + ", ".join(options))
        return raw

    return Setting(name=name, type=str, default=default, parse=parse, doc=doc)


def folder(name: str, default: str, doc: str) -> Setting:
    """A path, made absolute. Empty stays `Path()`, which means "not set"."""

    def parse(raw: str) -> Path:
        return Path(raw).expanduser().absolute() if raw else Path()

    return Setting(name=name, type=Path, default=default, parse=parse, doc=doc)


def names(name: str, default: str, doc: str) -> Setting:
    """Names separated by commas, each once, at least one."""

    def parse(raw: str) -> tuple[str, ...]:
        found = tuple(part.strip() for part in raw.split(","))
        if not all(found) or len(set(found)) != len(found):
            raise ValueError("names separated by commas, each once")
        return found

    return Setting(name=name, type=tuple[str, ...], default=default, parse=parse, doc=doc)


def address(name: str, default: str, doc: str) -> Setting:
    """`host:port`, several separated by commas, or empty."""

    def parse(raw: str) -> str:
        for part in raw.split(",") if raw else ():
            host, _, port = part.rpartition(":")
            if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
                raise ValueError("host:port, several separated by commas")
        return raw

    return Setting(name=name, type=str, default=default, parse=parse, doc=doc)


def ports(name: str, doc: str) -> Setting:
    """Ports separated by commas, or empty."""

    def parse(raw: str) -> tuple[int, ...]:
        found = tuple(raw.split(",")) if raw else ()
        if not all(part.isdecimal() and 1 <= int(part) <= 65535 for part in found):
            raise ValueError("ports from 1 to 65535 separated by commas")
        if len(set(found)) != len(found):
            raise ValueError("ports separated by commas, each once")
        return tuple(int(part) for part in found)

    return Setting(name=name, type=tuple[int, ...], default=(), parse=parse, doc=doc)


# fmt: off
KNOWN: Final[Mapping[str, Setting]] = {setting.name: setting for setting in (
    # The whole
    folder("HOME", ".turnlog", "Folder that keeps all data of one system."),
    folder("CACHE", "", "Folder of downloaded jars; empty: cache/ under TURNLOG_HOME."),
    choice("LOG", "info", ("debug", "info", "warning", "error"), "Least level that is logged."),
    integer("LOW_DISK_MB", 512, 0, 1_000_000, "Free MiB below which prompts are refused."),
    folder("POLICIES", "", "The policy file; empty: the packaged infra/policies.toml."),
    # Kafka
    address("KAFKA", "", "An existing cluster; empty: the embedded broker."),
    integer("KAFKA_PORT", 19092, 1, 65535, "Port of the embedded broker, best below 32768."),
    integer("KAFKA_CONTROLLER_PORT", 0, 0, 65535, "Its controller's; 0: TURNLOG_KAFKA_PORT + 1."),
    integer("KAFKA_HEAP_MB", 384, 128, 65_536, "Heap of the embedded broker."),
    integer("PARTITIONS", 12, 1, 1_024, "Partitions of each topic when it is made."),
    integer("SESSION_MS", 0, 0, 60_000, "Group session; 0: 3000 embedded, 6000 elsewhere."),
    # Processes
    integer("PORT", 8080, 1, 65535, "HTTP port of this edge; `up` gives the first edge this one."),
    integer("EDGES", 1, 1, 16, "Edge processes; the i-th listens on TURNLOG_PORT + i."),
    ports("EDGE_PORTS", "The edges' ports instead of TURNLOG_PORT + i, one for each."),
    integer("WORKERS", 1, 0, 64, "Worker processes for each of TURNLOG_MODELS."),
    integer("RESTARTS_MAX", 5, 0, 10_000, "Deaths of one part within a minute that are forgiven."),
    text("READY_FILE", "", "Set by the supervisor: the file a process makes when it is ready."),
    text("PART", "", "Set by the supervisor: the name of the part that this process is."),
    # Engines
    names("MODELS", "smollm2-135m", "The models that are served."),
    text("MODEL", "smollm2-135m", "The model of a worker's group and engine, set by `up`."),
    choice("ENGINE", "llama", ("llama", "scripted"), "What generates."),
    number("SCRIPTED_DELAY_MS", 0.0, 0, 60_000, "Scripted engine: time between two tokens."),
    integer("SCRIPTED_SLOTS", 64, 1, 4_096, "Scripted engine: generations at once."),
    integer("SCRIPTED_TOKENS", 64, 1, 100_000, "Scripted engine: tokens of an answer."),
)}
# fmt: on


def read_settings(cls: type[SettingsT], environ: Mapping[str, str]) -> SettingsT:
    """Fill `cls` from the `TURNLOG_` variables of environ; raise SettingsError on a bad one."""
    values: dict[str, Any] = {}
    for variable, raw in environ.items():
        if variable.startswith(PREFIX):
            values[variable] = _parse(variable, raw)
    hints = typing.get_type_hints(cls)
    filled: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        setting = KNOWN[field.name.upper()]
        assert hints[field.name] == setting.type, (
            f"{cls.__name__}.{field.name} must be of type {setting.type}"
        )
        variable = PREFIX + setting.name
        filled[field.name] = values[variable] if variable in values else default_of(setting)
    return cls(**filled)


def read_settings_or_exit(cls: type[SettingsT]) -> SettingsT:
    """As `read_settings` of this process's environment; a bad one ends the process: one line, 2."""
    try:
        return read_settings(cls, os.environ)
    except SettingsError as error:
        exit_with_usage_error(str(error))


def exit_with_usage_error(line: str) -> NoReturn:
    """Say what is wrong in one line on stderr and end with exit code 2."""
    print(f"turnlog: {line}", file=sys.stderr)  # noqa: T201 - the last word of a process
    raise SystemExit(USAGE_ERROR_EXIT)


def default_of(setting: Setting) -> Any:
    """The value that stands where the variable is not set."""
    if isinstance(setting.default, str):
        return setting.parse(setting.default)
    return setting.default


def kafka_bootstrap(*, kafka: str, kafka_port: int) -> str:
    """Where clients connect first: the existing cluster, else the embedded broker."""
    return kafka or f"127.0.0.1:{kafka_port}"


def group_session_ms(*, session_ms: int, kafka: str) -> int:
    """Group session timeout: as set, else what the broker in use is known to accept."""
    if session_ms:
        return session_ms
    return 6000 if kafka else 3000


def cache_folder(*, cache: Path, home: Path) -> Path:
    """Where jars are kept: several homes may share one TURNLOG_CACHE."""
    return cache if cache != Path() else home / "cache"


def _parse(variable: str, raw: str) -> Any:
    setting = KNOWN.get(variable.removeprefix(PREFIX))
    if setting is None:
        near = difflib.get_close_matches(variable, [PREFIX + name for name in KNOWN], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise SettingsError(f"unknown variable {variable}{hint}")
    try:
        return setting.parse(raw)
    except ValueError as error:
        raise SettingsError(f"{variable} must be {error}, not {raw[:80]!r}") from None
