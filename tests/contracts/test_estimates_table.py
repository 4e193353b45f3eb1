"""`turnlog estimates` into a pipe or a file."""

from __future__ import annotations

import pytest

from infra.command.estimates import show
from infra.verify.wait_audit import Wait
from schemas.vocabulary import Lane


def test_no_column_is_cut_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    model = "a-model-with-a-name-that-takes-much-of-a-line"
    show([Wait(model=model, lane=Lane.BACKGROUND, estimated_ms=90_000, waited_ms=123_456)])
    head, row, total = capsys.readouterr().out.splitlines()
    assert head.split() == (
        [
            "model",
            "lane",
            "runs",
            "wait",
            "p50",
            "p95",
            "told",
            "p50",
            "error",
            "p50",
            "p90",
            "within",
            "25%",
            "bias",
        ]
    )
    assert row.split()[:3] == [model, Lane.BACKGROUND.value, "1"]
    assert row.count("123.46 s") == 2
    assert total.split()[:2] == ["all", "1"]
