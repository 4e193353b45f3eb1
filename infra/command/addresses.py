"""Where the system of a home is reached: where a variable says, else where the one that runs there says, else at the defaults.

So a command needs the home alone, on whatever ports its system was started.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infra.settings import kafka_bootstrap
from infra.supervisor.home import running_system

PORT: Final = "TURNLOG_PORT"
KAFKA: Final = ("TURNLOG_KAFKA", "TURNLOG_KAFKA_PORT")


def edge_url(home: Path, *, port: int) -> str:
    """The first edge's. `port` is the setting, which counts where this process's environment names it."""
    if PORT not in os.environ:
        system = running_system(home)
        if system is not None and system.urls:
            return system.urls[0]
    return f"http://127.0.0.1:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Which cluster a command reads."""

    home: Path
    kafka: str
    kafka_port: int

    @property
    def bootstrap(self) -> str:
        """Where to connect. The settings count where this process's environment names one of them."""
        if not any(variable in os.environ for variable in KAFKA):
            system = running_system(self.home)
            if system is not None:
                return system.kafka
        return kafka_bootstrap(kafka=self.kafka, kafka_port=self.kafka_port)
