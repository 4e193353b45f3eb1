"""`turnlog settings`: every variable."""

from __future__ import annotations

import typer

from infra.settings import KNOWN, PREFIX


def settings() -> None:
    """List every TURNLOG_ variable, its default and what it does."""
    for setting in KNOWN.values():
        default = f" [{setting.default}]" if setting.default not in ("", ()) else ""
        typer.echo(f"{PREFIX + setting.name}{default}: {setting.doc}")
