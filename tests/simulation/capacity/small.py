"""Simulations of a few seconds: the same code and the same laws as at full size."""

from __future__ import annotations

from collections.abc import Callable

from infra.capacity.faults import FAULTS
from infra.capacity.laws import Law, judge
from infra.capacity.scenario import PATTERNS, Scenario, scenario_policy
from infra.capacity.simulation import Outcome, Simulation

WORKERS = 8
PROMPTS_PER_S = 240
SECONDS = 6


def small(
    pattern: str = "steady",
    *,
    seed: int = 1,
    faults: tuple[str, ...] = (),
    prompts_per_s: float = PROMPTS_PER_S,
    seconds: int = SECONDS,
) -> Scenario:
    return Scenario(
        seed=seed,
        pattern=PATTERNS[pattern],
        prompts_per_s=prompts_per_s,
        workers=WORKERS,
        seconds=seconds,
        faults=faults,
        policy=scenario_policy(WORKERS),
    )


def simulated(
    scenario: Scenario, breaking: Callable[[Simulation], None] = lambda simulation: None
) -> Outcome:
    """Run it, with something broken in it first."""
    simulation = Simulation(scenario)
    breaking(simulation)
    return simulation.run()


def broken(outcome: Outcome) -> list[Law]:
    return [law for law in judge(outcome) if law.held is False]


EVERY_FAULT = tuple(FAULTS)
