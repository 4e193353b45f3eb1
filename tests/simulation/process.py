"""A simulated process: a few actions, each of which does at most one small thing, and the ways in which it can end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from tests.simulation.log import Group
from tests.simulation.world import Producer, World

# How often a heartbeat brings no news yet.
HEARS_LATE: Final = 0.5

Action = Callable[[], bool]


class Process:
    """`actions` say whether they did anything. Everything in memory is lost with the object."""

    def __init__(self, world: World, kind: str, *, may_lose: bool = False) -> None:
        self.world = world
        self.kind = kind
        self.name = world.fresh(f"{kind}-")
        self.paused = False
        self.producer = Producer(world, self.name, may_lose=may_lose)
        self.actions: list[Action] = [self.producer.step]

    def step(self) -> bool:
        """One action, by chance; another one where that had nothing to do."""
        actions = self.actions
        at = int(self.world.rng.random() * len(actions))
        return any(actions[(at + turn) % len(actions)]() for turn in range(len(actions)))

    def run_through(self) -> bool:
        """Every action once, in order."""
        did = False
        for action in self.actions:
            did = action() or did
        return did

    def leave_groups(self) -> None:
        """Its sessions have expired."""

    def provoke_rebalance(self) -> None:
        """Its group assigns anew."""

    def die(self) -> None:
        """kill -9. The groups learn of it when the sessions expire."""
        self.producer.die()


S = TypeVar("S")


class Member(Process, Generic[S]):
    """A member of one group. It acts on the assignment that it last heard of, however old that is."""

    def __init__(self, world: World, kind: str, group: Group[S], *, may_lose: bool = False) -> None:
        super().__init__(world, kind, may_lose=may_lose)
        self.group = group
        self.generation = -1
        self.owned: list[S] = []
        group.join(self.name)
        self.actions.append(self.hear)

    def hear(self) -> bool:
        """The next heartbeat tells of a rebalance."""
        group = self.group
        if self.generation == group.generation or (
            not self.world.draining and self.world.chance(HEARS_LATE)
        ):
            return False
        if self.name not in group.members:
            group.join(self.name)  # Fenced while it was away: it comes back as a new member.
        self.generation = group.generation
        before, self.owned = self.owned, group.owned(self.name)
        if self.world.tracing:
            self.world.trace(f"{self.name}: owns {self.owned} (generation {self.generation})")
        self.assigned(before)
        return True

    def assigned(self, before: list[S]) -> None:
        """`owned` is what is ours now. Reading starts again at what was committed."""

    def start_of(self, source: S) -> int:
        """Where a consumer of the group begins."""
        return self.group.committed.get(source, 0)

    def leave_groups(self) -> None:
        self.group.leave(self.name)

    def provoke_rebalance(self) -> None:
        self.group.rebalance()
