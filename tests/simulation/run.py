"""One seed, or many: `python -m tests.simulation.run --seed N [--trace]`, or `--seeds 5000 [--first 1000]`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from infra.verify.findings import Violation
from tests.simulation.checks import check
from tests.simulation.simulation import simulate
from tests.simulation.world import Faults, Order, World

ASSERTION: Final = "assertion"


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one seed violates, and what it saw. A broken assertion of a decision module is a violation, too."""

    seed: int
    violations: list[Violation]
    sometimes: Counter[str]

    @property
    def invariants(self) -> frozenset[str]:
        """The numbers that do not hold."""
        return frozenset(violation.invariant for violation in self.violations)


@dataclass(slots=True, kw_only=True)
class Batch:
    """Many seeds. `failed` are those that violate something."""

    seeds: int = 0
    failed: list[Outcome] = field(default_factory=list)
    sometimes: Counter[str] = field(default_factory=Counter)


def run_seed(seed: int, *, order: Order | None = None, faults: Faults | None = None) -> Outcome:
    """Simulate and check one seed. `faults` None: as the seed draws them."""
    outcome, _ = _run(World(seed, order=order or Order()), faults)
    return outcome


def run_batch(seeds: Iterable[int]) -> Batch:
    """Simulate and check many."""
    batch = Batch()
    for seed in seeds:
        outcome = run_seed(seed)
        batch.seeds += 1
        batch.sometimes.update(outcome.sometimes)
        if outcome.violations:
            batch.failed.append(outcome)
    return batch


def _run(world: World, faults: Faults | None) -> tuple[Outcome, World]:
    try:
        violations = check(simulate(world, faults=faults))
    except AssertionError as error:
        violations = [Violation(invariant=ASSERTION, subject="-", detail=str(error))]
    return Outcome(seed=world.seed, violations=violations, sometimes=world.sometimes), world


def explain(seed: int, *, whole: bool = False) -> str:
    """The seed again, with its violations and its schedule (or the end of it)."""
    outcome, world = _run(World(seed, order=Order(), tracing=True), None)
    lines = [f"seed {seed}: python -m tests.simulation.run --seed {seed} --trace"]
    lines += [f"  {each.invariant} {each.subject}: {each.detail}" for each in outcome.violations]
    lines += world.schedule if whole else ["  ...", *world.schedule_tail]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Exit status 1 where an invariant does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.run", description=__doc__)
    parser.add_argument("--seed", type=int, help="this one seed")
    parser.add_argument("--trace", action="store_true", help="print its whole schedule")
    parser.add_argument("--seeds", type=int, default=1_000, help="how many, without --seed")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    given = parser.parse_args(arguments)
    if given.seed is not None:
        outcome = run_seed(given.seed)
        print(explain(given.seed, whole=given.trace))
        print("violated" if outcome.violations else "every invariant holds")
        return 1 if outcome.violations else 0
    batch = run_batch(range(given.first, given.first + given.seeds))
    for name, count in sorted(batch.sometimes.items()):
        print(f"{count:>9} {name}")
    for failed in batch.failed:
        print(f"seed {failed.seed}: {', '.join(sorted(failed.invariants))}")
    print(f"{batch.seeds} seeds, {len(batch.failed)} violated")
    return 1 if batch.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
