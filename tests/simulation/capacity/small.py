"""Simulations of a few seconds: the same code and the same laws as at full size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from msgspec.structs import replace as with_fields

from infra.capacity.calibration import Calibration
from infra.capacity.faults import FAULTS
from infra.capacity.laws import Law, judge
from infra.capacity.scenario import PATTERNS, Pattern, Scenario, scenario_policy
from infra.capacity.simulation import Outcome, Simulation

WORKERS = 8
PROMPTS_PER_S = 200
SECONDS = 4
QUICK = Calibration(
    slots=16, step_ms=2.0, step_ms_an_answer=0.1, prefill_tokens_per_s=60_000, kv_tokens=200_000
)
"""Answers end in two seconds, so a short simulation sees many."""


CROWDED = Pattern(
    name="crowded",
    says="teams that want more than they get, and the free tier",
    free_share=0.4,
    plus_share=0.0,
)


def small(
    pattern: Pattern = PATTERNS["steady"],
    *,
    seed: int = 1,
    faults: tuple[str, ...] = (),
    prompts_per_s: float = PROMPTS_PER_S,
    seconds: int = SECONDS,
    workers: int = WORKERS,
) -> Scenario:
    return Scenario(
        seed=seed,
        pattern=pattern,
        prompts_per_s=prompts_per_s,
        workers=workers,
        seconds=seconds,
        faults=faults,
        worker=QUICK,
        policy=scenario_policy(workers),
    )


def crowded() -> Scenario:
    """Two workers for each model, and long enough that each team's part is many requests."""
    return small(CROWDED, workers=4, prompts_per_s=130, seconds=40)


def shedding() -> Scenario:
    """The same crowd, and a ladder whose levels come so early that the free tier is shed nearly all the time."""
    scenario = crowded()
    ladder = scenario.policy.ladder
    levels = tuple(
        with_fields(level, enter_ms=level.enter_ms // 6, leave_ms=level.leave_ms // 6)
        for level in ladder.levels
    )
    policy = with_fields(scenario.policy, ladder=with_fields(ladder, levels=levels))
    return replace(scenario, policy=policy, seconds=15)


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
