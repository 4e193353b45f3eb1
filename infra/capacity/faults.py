"""What breaks, as data: each fault by its name, at parts of the time, and how far it reaches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final

from infra.capacity.workers import SESSION_MS

if TYPE_CHECKING:
    from infra.capacity.node import Node
    from infra.capacity.simulation import Simulation

DUPLICATE_EVERY: Final = 50
DEAD_SHARE: Final = 0.03
DEAD_MS: Final = 12_000.0
ZOMBIE_SHARE: Final = 0.03
ZOMBIE_MS: Final = 4_000.0
"""How long it goes on after the others have taken over."""
MOVED_SHARE: Final = 0.05
RECORDER_LATE_MS: Final = 5_000.0
REPORTS_LATE_MS: Final = 3_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`at` and `until` are parts of the time; a fault without `until` happens once at each `at`."""

    name: str
    says: str
    at: tuple[float, ...]
    until: float | None = None


FAULTS: Final = {
    fault.name: fault
    for fault in (
        Fault(
            name="redelivery",
            says="an admission process is killed before it saved, and decides again",
            at=(0.3, 0.45, 0.6, 0.75),
        ),
        Fault(
            name="duplicates",
            says=f"one record of {DUPLICATE_EVERY} of the account log lies there twice",
            at=(0.0,),
        ),
        Fault(
            name="rebalance",
            says=f"{MOVED_SHARE:.0%} of the partitions get another worker",
            at=(0.35, 0.7),
        ),
        Fault(
            name="dead-workers",
            says=f"{DEAD_SHARE:.0%} of the workers are killed; they come back {DEAD_MS / 1000:g} s later",
            at=(0.4,),
        ),
        Fault(
            name="zombie-workers",
            says=f"{ZOMBIE_SHARE:.0%} of the workers lose the group and write on",
            at=(0.5,),
        ),
        Fault(
            name="slow-recorder",
            says=f"the recorder is {RECORDER_LATE_MS / 1000:g} s late",
            at=(0.5,),
            until=0.7,
        ),
        Fault(
            name="late-reports",
            says=f"half of the edges read load reports {REPORTS_LATE_MS / 1000:g} s late",
            at=(0.4,),
            until=0.8,
        ),
    )
}


class UnknownFault(ValueError):
    """Its message names the ones there are."""


def faults_of(text: str) -> tuple[str, ...]:
    """The names in a list like `dead-workers,duplicates`; `all` and `none` are words for them. Raises UnknownFault."""
    if text in {"", "none"}:
        return ()
    if text == "all":
        return tuple(FAULTS)
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in FAULTS:
            raise UnknownFault(f"{name!r} is no fault; there are {', '.join(FAULTS)}, all, none")
    return names


class Faults:
    """Books what the scenario says."""

    def __init__(self, simulation: Simulation) -> None:
        self._sim = simulation
        self._random = Random(f"faults {simulation.scenario.seed}")
        calls: dict[str, tuple[Callable[[], None], Callable[[], None] | None]] = {
            "redelivery": (self._redelivery, None),
            "duplicates": (self._duplicates, None),
            "rebalance": (self._rebalance, None),
            "dead-workers": (self._dead, None),
            "zombie-workers": (self._zombies, None),
            "slow-recorder": (self._recorder_slow, self._recorder_well),
            "late-reports": (self._reports_late, self._reports_well),
        }
        assert set(calls) == set(FAULTS), "each fault has its code"
        for name in simulation.scenario.faults:
            fault, (begin, end) = FAULTS[name], calls[name]
            for at in fault.at:
                simulation.timeline.at(at * simulation.scenario.end_ms, begin)
            if fault.until is not None and end is not None:
                simulation.timeline.at(fault.until * simulation.scenario.end_ms, end)

    def _some(self, share: float) -> list[Node]:
        """So many of each model's healthy workers, one at least, but never the last two."""
        found: list[Node] = []
        for nodes in self._sim.fleet.nodes.values():
            well = [node for node in nodes if node.alive and not node.cut_off]
            count = min(max(1, round(share * len(nodes))), max(0, len(well) - 2))
            found += self._random.sample(well, count)
        return found

    def _redelivery(self) -> None:
        admission = self._sim.admission
        count = max(1, len(admission.partitions) // 8)
        for partition in self._random.sample(admission.partitions, count):
            again = admission.restart(partition)
            self._sim.figures.sometimes["records decided again"] += again

    def _duplicates(self) -> None:
        self._sim.admission.duplicate_every = DUPLICATE_EVERY

    def _rebalance(self) -> None:
        fleet = self._sim.fleet
        for model, owners in fleet.owners.items():
            count = max(1, round(MOVED_SHARE * len(owners)))
            for partition in self._random.sample(range(len(owners)), count):
                well = [node for node in fleet.nodes[model] if node.alive and not node.cut_off]
                fleet.move(model, partition, self._random.choice(well))
                self._sim.figures.sometimes["partition moved"] += 1

    def _dead(self) -> None:
        fleet, timeline = self._sim.fleet, self._sim.timeline
        for node in self._some(DEAD_SHARE):
            node.die()
            self._sim.figures.sometimes["worker died"] += 1
            timeline.after(SESSION_MS, fleet.spread, node)
            timeline.after(DEAD_MS, fleet.come_back, node)

    def _zombies(self) -> None:
        fleet, timeline = self._sim.fleet, self._sim.timeline
        for node in self._some(ZOMBIE_SHARE):
            node.cut_off = True
            self._sim.figures.sometimes["worker became a zombie"] += 1
            timeline.after(SESSION_MS, fleet.spread, node)
            timeline.after(SESSION_MS + ZOMBIE_MS, self._zombie_notices, node)

    def _zombie_notices(self, node: Node) -> None:
        node.die()
        self._sim.fleet.come_back(node)

    def _recorder_slow(self) -> None:
        self._sim.recorder.late_ms = RECORDER_LATE_MS

    def _recorder_well(self) -> None:
        self._sim.recorder.late_ms = 0.0

    def _reports_late(self) -> None:
        late = self._sim.edges.late_ms
        for edge in range(0, len(late), 2):
            late[edge] = REPORTS_LATE_MS

    def _reports_well(self) -> None:
        late = self._sim.edges.late_ms
        late[:] = [0.0] * len(late)
