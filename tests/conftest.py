"""How every tier is run."""

from __future__ import annotations

import os

from hypothesis import settings

# A landing must not depend on luck: CI tries the same examples each time. Elsewhere every run searches anew.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("search", deadline=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "search")
