"""How wrong the waits are that clients are told, in a slice of the full fleet, seed by seed.

`python -m tests.simulation.capacity.wait_errors SEED …` prints a line for each. 8 workers get their part of the prompts, and each as many
teams with as many requests as in the full fleet. A small fleet of `turnlog simulate` does not have them: there a few teams meet at each
worker, here 28.
"""

from __future__ import annotations

import sys
from statistics import median

import msgspec

from edge.decisions.load_view import wait_error
from infra.capacity.figures import Waited
from infra.capacity.laws import audited
from infra.capacity.scenario import REFERENCE_WORKERS, Scenario, scenario_policy
from infra.capacity.simulation import Simulation
from schemas.vocabulary import Tier

WORKERS = 8
SECONDS = 24


class Slice(Scenario):
    """The teams of the full fleet."""

    __slots__ = ()

    @property
    def heavy_teams(self) -> int:
        return Scenario().heavy_teams


def slice_of(seed: int) -> Scenario:
    """A team has its part of the runs that it may have open."""
    full, policy = Scenario(), scenario_policy(WORKERS)
    team = policy.tiers[Tier.TEAM]
    open_runs = full.policy.tiers[Tier.TEAM].open_runs_max * WORKERS // REFERENCE_WORKERS
    tiers = {**policy.tiers, Tier.TEAM: msgspec.structs.replace(team, open_runs_max=open_runs)}
    return Slice(
        seed=seed,
        prompts_per_s=full.prompts_per_s * WORKERS / REFERENCE_WORKERS,
        workers=WORKERS,
        seconds=SECONDS,
        policy=msgspec.structs.replace(policy, tiers=tiers),
    )


def told(waits: list[Waited]) -> str:
    errors = [wait_error(estimated_ms=w.told_ms, waited_ms=round(w.waited_ms)) for w in waits]
    return f"{median(errors):6.1%} of {len(waits):4}" if waits else "none"


def main(seeds: list[int]) -> None:
    """Print the median error of each seed, of all waits and by model and lane."""
    for seed in seeds:
        waits = audited(Simulation(slice_of(seed)).run())
        groups = sorted({wait.group for wait in waits})
        parts = [
            f"{model} {lane.value} {told([w for w in waits if w.group == (model, lane)])}"
            for model, lane in groups
        ]
        print(f"seed {seed}: all {told(waits)} | " + " | ".join(parts), flush=True)


if __name__ == "__main__":
    main([int(seed) for seed in sys.argv[1:]] or [1])
