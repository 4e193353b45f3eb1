"""`turnlog token`: a signed token for one account of this home's system, or for an operator. Prints the token and nothing else."""

from __future__ import annotations

import getpass
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Final

import typer

from edge.auth import mint_admin_token, mint_token
from infra.secrets import SecretsError, load_secrets
from infra.settings import exit_with_usage_error, read_settings_or_exit
from schemas.vocabulary import Tier

TTL_H_DEFAULT: Final = 24.0
TTL_H_MAX: Final = 24.0 * 365


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSettings:
    """Where the signing key is."""

    home: Path


def token(
    account: Annotated[str, typer.Option(help="The account's name.")] = "",
    tier: Annotated[Tier, typer.Option(help="What the account pays for.")] = Tier.FREE,
    seat: Annotated[str | None, typer.Option(help="A seat of a team account.")] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="For an operator, not an account.")
    ] = False,
    name: Annotated[str, typer.Option(help="The operator's name; default: who runs this.")] = "",
    ttl_h: Annotated[
        float, typer.Option("--ttl-h", min=0.001, max=TTL_H_MAX, help="Hours until it expires.")
    ] = TTL_H_DEFAULT,
) -> None:
    """Print a signed token for an account, or with --admin for an operator: whom it names comes from it alone."""
    settings = read_settings_or_exit(TokenSettings)
    if bool(account) == admin or (name and not admin):
        exit_with_usage_error("give either --account, or --admin (and --name)")
    ttl = timedelta(hours=ttl_h)
    try:
        key = load_secrets(settings.home).token_key
        if admin:
            text = mint_admin_token(key=key, name=name or getpass.getuser(), ttl=ttl)
        else:
            text = mint_token(key=key, account_id=account, tier=tier, seat_id=seat, ttl=ttl)
    except (SecretsError, ValueError) as error:
        exit_with_usage_error(str(error))
    typer.echo(text)
