"""Operators' tokens: a kind of their own, which opens nothing that an account's does, and the other way round."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edge.auth import authenticate, authenticate_admin, mint_admin_token, mint_token
from edge.decisions.problems import Refused
from infra.command.main import command
from infra.secrets import load_secrets
from schemas.vocabulary import Tier

KEY = b"k" * 32
HOUR = timedelta(hours=1)


def bearer(token: str) -> str:
    return f"Bearer {token}"


def test_each_kind_of_token_opens_its_own_routes_alone() -> None:
    admin = bearer(mint_admin_token(key=KEY, name="olga", ttl=HOUR))
    account = bearer(mint_token(key=KEY, account_id="anna", tier=Tier.PLUS, ttl=HOUR))
    assert authenticate_admin(admin, key=KEY) == "olga"
    assert authenticate(account, key=KEY).account_id == "anna"
    for wrong in (
        account,
        None,
        bearer("x"),
        bearer(mint_admin_token(key=b"o" * 32, name="o", ttl=HOUR)),
    ):
        with pytest.raises(Refused) as refused:
            authenticate_admin(wrong, key=KEY)
        assert refused.value.problem.status == 401
    with pytest.raises(Refused):
        authenticate(admin, key=KEY)


def test_an_expired_token_and_an_impossible_name_are_refused() -> None:
    with pytest.raises(Refused) as refused:
        authenticate_admin(bearer(mint_admin_token(key=KEY, name="o", ttl=-HOUR)), key=KEY)
    assert refused.value.problem.code == "expired_token"
    with pytest.raises(ValueError, match="a name has"):
        mint_admin_token(key=KEY, name="two words", ttl=HOUR)


def test_the_command_prints_either_kind_and_refuses_both_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNLOG_HOME", str(tmp_path))
    run = CliRunner().invoke
    admin = run(command(), ["token", "--admin", "--name", "olga"])
    assert admin.exit_code == 0, admin.output
    key = load_secrets(tmp_path).token_key
    assert authenticate_admin(bearer(admin.output.strip()), key=key) == "olga"
    account = run(command(), ["token", "--account", "anna", "--tier", "team", "--seat", "s1"])
    assert authenticate(bearer(account.output.strip()), key=key).seat_id == "s1"
    for wrong in ([], ["--admin", "--account", "anna"], ["--account", "anna", "--name", "olga"]):
        assert run(command(), ["token", *wrong]).exit_code == 2
