"""The `turnlog` command: each subcommand lives in a module of its own and is registered here."""

from __future__ import annotations

import typer

from infra.command import (
    bench,
    estimates,
    policy_command,
    simulate,
    tail,
    talk,
    token,
    topics_command,
    up,
    verify,
)

app = typer.Typer(
    name="turnlog",
    help="Event-sourced LLM chat serving over Kafka.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def turnlog() -> None:
    """Event-sourced LLM chat serving over Kafka."""


app.add_typer(topics_command.topics, name="topics")
app.add_typer(policy_command.policy, name="policy")
app.command()(up.up)
app.command()(up.down)
app.command()(up.status)
app.command()(token.token)
app.command()(talk.ask)
app.command()(talk.chat)
app.command()(tail.tail)
app.command()(verify.verify)
app.command()(estimates.estimates)
app.command()(simulate.simulate)
app.add_typer(bench.bench, name="bench")


@app.command()
def settings() -> None:
    """List every TURNLOG_ variable, its default and what it does."""
    from infra.settings import KNOWN, PREFIX  # noqa: PLC0415 - keeps the command quick to start

    for setting in KNOWN.values():
        default = f" [{setting.default}]" if setting.default not in ("", ()) else ""
        typer.echo(f"{PREFIX + setting.name}{default}: {setting.doc}")


def main() -> None:
    """Entry point of the installed `turnlog` script."""
    app()


if __name__ == "__main__":
    main()
