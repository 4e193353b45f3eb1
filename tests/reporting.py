"""What a run of the tests says at its end: each failure in a few lines, with its processes' last words, and the time of each tier."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Final

import pytest

PROCESSES: Final = "last words of the processes"
"""The property of a report that holds them."""
FAILURES_TOLD_MAX: Final = 5
REASON_LINES_MAX: Final = 6


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Called by pytest just before its own list of what failed and was skipped."""
    stats = terminalreporter.stats
    failed = [r for kind in ("failed", "error") for r in stats.get(kind, ())]
    for report in failed[:FAILURES_TOLD_MAX]:
        terminalreporter.section(f"why {report.nodeid}", sep="-")
        reason = str(report.longrepr.reprcrash.message if _crashed(report) else report.longrepr)
        terminalreporter.line("\n".join(reason.splitlines()[:REASON_LINES_MAX]))
        for name, content in getattr(report, "user_properties", ()):
            if name == PROCESSES and content:
                terminalreporter.line(str(content))
    spent: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, int] = defaultdict(int)
    for reports in stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                tier = Path(report.nodeid.partition("::")[0]).parent.name
                spent[tier] += report.duration
                counts[tier] += report.when == "call"
    terminalreporter.section("time of each tier", sep="-")
    for tier, seconds in spent.items():
        terminalreporter.line(f"{tier:<12} {seconds:6.0f} s  {counts[tier]:5} tests")


def _crashed(report: pytest.TestReport) -> bool:
    return getattr(report.longrepr, "reprcrash", None) is not None
