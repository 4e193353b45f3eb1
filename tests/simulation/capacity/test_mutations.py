"""Each check can fail: break one rule, and see the law break that it keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest
from msgspec.structs import replace as with_fields

from edge.soft_views import Workers
from inference_workers.decisions.lanes import Claim
from infra.capacity import admission as admission_process
from infra.capacity import runs
from infra.capacity.laws import judge
from infra.capacity.node import Node
from infra.capacity.runs import Run
from infra.capacity.scenario import PATTERNS, Scenario
from infra.capacity.simulation import Simulation
from processors.decisions import admission, lane_room
from schemas.events.accounts import LaneLimits, LoadView
from schemas.events.tokens import RunEnded, RunEvent
from schemas.run_fold import RunState, fold
from schemas.vocabulary import Lane
from tests.simulation.capacity.small import broken, crowded, shedding, simulated, small

Patch = pytest.MonkeyPatch


def no_floor(simulation: Simulation, patch: Patch) -> None:
    last = LaneLimits(weight=0)
    for node in simulation.fleet.all_nodes:
        node.lanes.change_shares({**simulation.scenario.policy.lanes, Lane.FREE: last})


def the_ladder_leaves_no_floor(simulation: Simulation, patch: Patch) -> None:
    patch.setattr(lane_room, "keeps_floor", lambda limits, lane, wait_ms: False)


def turns_instead_of_tokens(simulation: Simulation, patch: Patch) -> None:
    claim_of = Node._claim

    def one_each(node: Node, run: Run) -> Claim:
        return replace(claim_of(node, run), tokens=1)

    patch.setattr(Node, "_claim", one_each)


def no_bounds(simulation: Simulation, patch: Patch) -> None:
    patch.setattr(admission, "no_room", lambda prompt, ahead, limits, step: None)


def no_wait_is_told(simulation: Simulation, patch: Patch) -> None:
    load = Workers.load

    def zero(*args: object, **more: object) -> LoadView:
        view: LoadView = load(*args, **more)  # type: ignore[arg-type]
        return with_fields(view, waits=tuple(with_fields(w, wait_ms=0) for w in view.waits))

    patch.setattr(Workers, "load", zero)


def background_has_a_floor(simulation: Simulation, patch: Patch) -> None:
    floor = LaneLimits(weight=0, floor_percent=50)
    for node in simulation.fleet.all_nodes:
        node.lanes.change_shares({**simulation.scenario.policy.lanes, Lane.BACKGROUND: floor})


def slow_decisions(simulation: Simulation, patch: Patch) -> None:
    patch.setattr(admission_process, "DECIDE_MS", 40.0)


def no_quota(simulation: Simulation, patch: Patch) -> None:
    patch.setattr(admission, "headroom", lambda windows, window, limit: limit)


def no_cap(simulation: Simulation, patch: Patch) -> None:
    patch.setattr(admission, "may_generate", lambda live: 0)


def other_ids_each_time(simulation: Simulation, patch: Patch) -> None:
    numbers = count()
    patch.setattr(admission_process, "output_id", lambda source, output: f"{next(numbers)}")


def use_is_lost(simulation: Simulation, patch: Patch) -> None:
    send = simulation.recorder.send
    patch.setattr(
        simulation.recorder,
        "send",
        lambda usage, account, event_id: usage.output_tokens % 7 and send(usage, account, event_id),
    )


def use_is_guessed(simulation: Simulation, patch: Patch) -> None:
    send = simulation.recorder.send
    patch.setattr(
        simulation.recorder,
        "send",
        lambda usage, account, event_id: send(
            with_fields(usage, output_tokens=usage.output_tokens // 2), account, event_id
        ),
    )


def an_end_may_come_twice(simulation: Simulation, patch: Patch) -> None:
    def twice(state: RunState, event: RunEvent) -> tuple[RunState, bool]:
        return (state, True) if state.ended and isinstance(event, RunEnded) else fold(state, event)

    append = simulation.tokens.append

    def again(run: Run, event: RunEvent, *, event_id: str = "") -> bool:
        if isinstance(event, RunEnded):
            append(run, event, event_id=event_id)
        return append(run, event, event_id=event_id)

    patch.setattr(runs, "fold", twice)
    patch.setattr(simulation.tokens, "append", again)


MUTATIONS: dict[Callable[[Simulation, Patch], None], str] = {
    no_bounds: "Queues",
    no_wait_is_told: "Honest waits",
    slow_decisions: "Quick answers",
    no_quota: "(I7)",
    no_cap: "cap",
    use_is_guessed: "(I5)",
    use_is_lost: "(I6)",
    an_end_may_come_twice: "(I1)",
}
IN_A_CROWD: dict[Callable[[Simulation, Patch], None], str] = {
    no_floor: "Free floor, at the workers",
    turns_instead_of_tokens: "Fairness",
}


@pytest.mark.parametrize("seed", [1, 4])
def test_in_a_crowd_the_floor_and_fairness_are_judged_and_hold(seed: int) -> None:
    """In both a very long answer is most of what some account got."""
    held = [law.name for law in judge(simulated(replace(crowded(), seed=seed))) if law.held]
    for law in IN_A_CROWD.values():
        assert any(law in name for name in held), held


@pytest.mark.parametrize("mutation", IN_A_CROWD, ids=lambda mutation: mutation.__name__)
def test_in_a_crowd_a_rule_that_is_broken_breaks_its_law(
    mutation: Callable[[Simulation, Patch], None], monkeypatch: Patch
) -> None:
    names = broken_by(mutation, crowded(), monkeypatch)
    assert any(IN_A_CROWD[mutation] in name for name in names), names


def test_where_the_free_tier_is_shed_its_floor_is_judged_in_the_whole(monkeypatch: Patch) -> None:
    name = "Free floor, in the whole"
    laws = {law.name: law.held for law in judge(simulated(shedding()))}
    assert [held for law, held in laws.items() if name in law] == [True], laws
    names = broken_by(the_ladder_leaves_no_floor, shedding(), monkeypatch)
    assert any(name in law for law in names), names


def test_background_work_goes_last_and_with_a_floor_it_would_not(monkeypatch: Patch) -> None:
    name = "Background work goes last"
    laws = {law.name: law.held for law in judge(simulated(small(PATTERNS["burst"])))}
    assert [held for law, held in laws.items() if name in law] == [True], laws
    names = broken_by(background_has_a_floor, small(PATTERNS["burst"]), monkeypatch)
    assert any(name in law for law in names), names


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_rule_that_is_broken_breaks_its_law(
    mutation: Callable[[Simulation, Patch], None], monkeypatch: Patch
) -> None:
    names = broken_by(mutation, small(), monkeypatch)
    assert any(MUTATIONS[mutation] in name for name in names), names


def test_deciding_again_under_other_ids_is_seen(monkeypatch: Patch) -> None:
    names = broken_by(other_ids_each_time, small(faults=("redelivery",)), monkeypatch)
    assert any("(I6)" in name for name in names), names


def broken_by(
    mutation: Callable[[Simulation, Patch], None], scenario: Scenario, patch: Patch
) -> list[str]:
    outcome = simulated(scenario, lambda simulation: mutation(simulation, patch))
    return [law.name for law in broken(outcome)]
