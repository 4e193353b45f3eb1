"""A process of ours with other limits: `python -m tests.integration.changed_limits MODULE OTHER.MODULE.NAME=NUMBER…`.

For what must be shown on a machine of any speed, where a limit in time is not the point.
"""

from __future__ import annotations

import importlib
import runpy
import sys

if __name__ == "__main__":
    module, *changes = sys.argv[1:]
    for change in changes:
        path, _, number = change.partition("=")
        place, _, name = path.rpartition(".")
        limits = vars(importlib.import_module(place))
        assert isinstance(limits[name], int), f"{path} is no limit"
        limits[name] = int(number)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
