"""Names of the consumer groups of the Faust processes. In a module of their own, because importing Faust takes half a second."""

from __future__ import annotations

from typing import Final

ADMISSION_GROUP: Final = "processors-admission"
CONTEXT_GROUP: Final = "processors-context"
