"""A rule that is broken on purpose, and the search for a seed that shows it."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from tests.simulation.run import Outcome, run_seed
from tests.simulation.swaps import Swap, all_of
from tests.simulation.world import Faults, Order

SEEDS_MAX: Final = 2_000


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
