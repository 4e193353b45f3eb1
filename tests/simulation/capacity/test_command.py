"""`turnlog simulate`: what it prints and writes, and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from infra.capacity import admission
from infra.command.main import command

SMALL = ["simulate", "--workers", "4", "--prompts-per-s", "40", "--seconds", "3"]


def told(*options: str) -> Result:
    return CliRunner().invoke(command(["simulate"]), [*SMALL, *options])


def test_it_says_each_law_and_writes_the_report(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    result = told("--report", str(report), "--faults", "duplicates,dead-workers")
    assert result.exit_code == 0, result.output
    assert "seed 1" in result.output
    assert "held    Each admitted run ends, once (I1): 0 breaches" in result.output
    assert report.read_text().startswith("<!doctype html>")


def test_it_ends_with_1_where_a_law_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "DECIDE_MS", 150.0)
    result = told()
    assert result.exit_code == 1, result.output
    assert "BROKEN  Quick answers" in result.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--faults", "earthquake"], "'earthquake' is no fault; there are redelivery, "),
        (["--policy", "/nowhere.toml"], "/nowhere.toml: No such file"),
        (["--report", "/nowhere/report.html"], "/nowhere/report.html"),
    ],
)
def test_what_cannot_be_simulated_is_one_line_and_2(options: list[str], says: str) -> None:
    result = told(*options)
    assert result.exit_code == 2
    assert says in result.output
    assert result.output.count("\n") == 1
