"""The `turnlog` command: each subcommand lives in a module of its own and is registered here.

Only the module that is asked for is imported: together they take a second, and a stop or a status should not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Final

import typer

# A name, and where its function or its own subcommands are: module and attribute.
COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "topics": ("topics_command", "topics"),
    "policy": ("policy_command", "policy"),
    "up": ("up", "up"),
    "down": ("running", "down"),
    "status": ("running", "status"),
    "token": ("token", "token"),
    "ask": ("talk", "ask"),
    "chat": ("talk", "chat"),
    "tail": ("tail", "tail"),
    "verify": ("verify", "verify"),
    "estimates": ("estimates", "estimates"),
    "simulate": ("simulate", "simulate"),
    "bench": ("bench", "bench"),
    "settings": ("settings", "settings"),
}


def command(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """`turnlog` with these subcommands."""
    app = typer.Typer(
        name="turnlog",
        help="Event-sourced LLM chat serving over Kafka.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    # With it, one subcommand alone is still named.
    app.callback()(_turnlog)
    for name in names:
        module, attribute = COMMANDS[name]
        found = getattr(import_module(f"infra.command.{module}"), attribute)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)
    return app


def _turnlog() -> None:
    """Event-sourced LLM chat serving over Kafka."""


def main() -> None:
    """Entry point of the installed `turnlog` script."""
    asked = [name for name in sys.argv[1:2] if name in COMMANDS]
    command(asked or COMMANDS)()


if __name__ == "__main__":
    main()
