"""A rule that is broken on purpose, and the search for a seed that shows it."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from tests.simulation.run import Outcome, run_seed
from tests.simulation.swaps import Swap, all_of
from tests.simulation.world import Faults, Order

SEEDS_MAX: Final = 2_000

# Ownership moves, and who lost it has not heard of it.
WORKER_ZOMBIES: Final = Faults(focus="worker", rebalance=0.06, pause=0.04, stall=0.15)
OWNER_ZOMBIES: Final = Faults(focus="admission", pause=0.1, late_ack=0.3)
WORKER_PAUSES: Final = Faults(focus="worker", pause=0.08)
WORKER_CRASHES: Final = Faults(focus="worker", crash=0.05)
OWNER_CRASHES: Final = Faults(focus="admission", crash=0.03)
POLICIES: Final = Faults(focus="admission", crash=0.05, policy=0.05, late_ack=0.3)
RECORDER_CRASHES: Final = Faults(focus="recorder", crash=0.05, late_ack=0.3)
CONTEXT_CRASHES: Final = Faults(focus="context", crash=0.03, stall=0.1)
EDGE_CRASHES: Final = Faults(focus="edge", crash=0.03)
LOSSES: Final = Faults(focus="worker", lose_acked=0.1)
REPLAYS: Final = Faults(duplicate=0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """`rule` is what does not hold any more; `caught_by` are invariants of which one must then be violated by some seed.

    `note` says why two rules fall together, where they overlap; `faults` are those under which it shows soonest.
    """

    rule: str
    caught_by: AbstractSet[str]
    note: str = ""
    swaps: tuple[Swap, ...] = ()
    order: Order | None = None
    faults: Faults | None = None


def hunt(mutation: Mutation, *, first: int = 0, seeds_max: int = SEEDS_MAX) -> Outcome | None:
    """The first seed that shows the broken rule, if any does."""
    with all_of(mutation.swaps):
        for seed in range(first, first + seeds_max):
            outcome = run_seed(seed, order=mutation.order, faults=mutation.faults)
            if outcome.invariants & mutation.caught_by:
                return outcome
    return None
