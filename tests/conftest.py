"""How every tier is run."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from tests.reporting import pytest_terminal_summary

__all__ = ["pytest_terminal_summary"]

# A landing must not depend on luck: CI tries the same examples each time. Elsewhere every run searches anew.
# How quickly examples are made says something of the machine only.
SLOW_IS_FINE = [HealthCheck.too_slow]
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=SLOW_IS_FINE,
)
settings.register_profile(
    "search", deadline=None, print_blob=True, suppress_health_check=SLOW_IS_FINE
)
settings.load_profile("ci" if os.environ.get("CI") else "search")
