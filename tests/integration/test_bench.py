"""That the benchmark of admission runs and prints figures, at a load that any machine bears. What the figures are is not judged."""

from __future__ import annotations

import os
import re

from tests.integration.processes import turnlog

FIGURE = r" +([0-9.]+|nan)"
"""Where a starved machine answers nobody there is none."""


def bench_admission(*words: str) -> str:
    """What `turnlog bench admission` prints; it ends with 0."""
    done = turnlog(
        *("bench", "admission", "--seconds", "2", *words),
        variables={"COLUMNS": os.environ.get("COLUMNS", "200")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_decision_times_and_a_highest_rate_are_printed() -> None:
    said = bench_admission("--rate", "20", "--part", "spread")
    found = rf"20 prompts/s  decision ms p50{FIGURE}  p99{FIGURE} .* 40 decided"
    assert re.search(found, said), said
    assert re.search(r"with p99 < 100 ms: (0|20) prompts/s", said), said


def test_refusals_at_twice_what_a_system_can_answer_are_printed() -> None:
    said = bench_admission("--part", "refusals")
    assert re.search(rf"status line of an answer, ms +p50{FIGURE} +p99{FIGURE}", said), said
    assert re.search(r"\d+ prompts: \d+ x ", said), said
    assert re.search(r"queued at most \d+ \(", said), said
