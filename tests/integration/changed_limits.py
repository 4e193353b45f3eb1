"""A process of ours with other limits: `python -m tests.integration.changed_limits MODULE OTHER.MODULE.NAME=NUMBER…`.

For what must be shown on a machine of any speed, where a limit in time is not the point.
"""

from __future__ import annotations

import importlib
import inspect
import runpy
import sys
from collections.abc import Mapping
from typing import Final

CHANGED_LIMITS: Final = "tests.integration.changed_limits"


def with_limits(module: str, limits: Mapping[str, int]) -> tuple[str, ...]:
    """What to start in place of the module: itself where nothing is changed."""
    changes = [f"{path}={number}" for path, number in limits.items()]
    return (CHANGED_LIMITS, module, *changes) if changes else (module,)


if __name__ == "__main__":
    module, *changes = sys.argv[1:]
    for change in changes:
        path, _, number = change.partition("=")
        place, _, name = path.rpartition(".")
        limits = vars(importlib.import_module(place))
        assert isinstance(limits[name], int | float), f"{path} is no limit"
        limits[name] = int(number)
    begin = vars(importlib.import_module(module)).get("main")
    if begin is not None and not inspect.signature(begin).parameters:
        begin()  # So a limit of this very module counts too.
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
