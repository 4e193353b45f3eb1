"""The laws of rationing over every pattern and every fault, at a size that takes seconds; and the report of it."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from infra.capacity.figures import Figures
from infra.capacity.laws import judge
from infra.capacity.report import page
from infra.capacity.runs import Run
from infra.capacity.scenario import PATTERNS, Scenario, scenario_policy
from infra.capacity.simulation import Simulation
from schemas.vocabulary import Tier
from tests.simulation.capacity.small import EVERY_FAULT, broken, simulated, small

BOOKS = ("(I1)", "(I5)", "(I6)", "(I7)", "cap", "Queues", "goes last")


@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_the_laws_hold_while_everything_breaks_that_can(pattern: str) -> None:
    outcome = simulated(small(PATTERNS[pattern], faults=EVERY_FAULT))
    bad = [law for law in broken(outcome) if any(word in law.name for word in BOOKS)]
    assert not bad, f"seed {outcome.scenario.seed}: {bad}"
    assert outcome.runs == outcome.settlements > 0


def test_equal_seeds_give_equal_results() -> None:
    first, again, other = (judge(simulated(small(seed=seed, seconds=3))) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_fleet_that_starts_cold_takes_as_much_work_as_one_that_has_worked_before() -> None:
    """Five times what it can do, from the first second on, with nobody that was ever full or saw a request end."""
    cold = Scenario(prompts_per_s=240, workers=8, seconds=8, policy=scenario_policy(8), cold=True)
    starts, warm = simulated(cold).figures, simulated(replace(cold, cold=False)).figures
    admitted, usual = (
        sum(second.admitted for second in figures.seconds.values()) for figures in (starts, warm)
    )
    assert admitted > 0.8 * usual
    assert starts.seconds[7].busy > 0.95 * warm.seconds[7].busy
    paid_shed = sum(
        count
        for second in starts.seconds.values()
        for (tier, name), count in second.refused.items()
        if tier is not Tier.FREE and name == "overloaded (ladder)"
    )
    assert not paid_shed


def test_a_worker_that_lost_its_group_goes_on_with_all_that_it_holds() -> None:
    simulation = Simulation(small(seconds=7))
    node = simulation.fleet.all_nodes[0]
    held: list[Run] = []

    def told(second: int, figures: Figures) -> None:
        if second == 2:
            node.cut_off = True
            held.extend(run for run in node.running() if run.length <= 1_000)
        elif second == simulation.scenario.seconds:
            assert len(held) > 1
            assert all(run.state.ended and run.state.attempt == 1 for run in held)
            simulation.fleet.spread(node)

    simulation.run(told)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [value or "" for name, value in attrs if name in {"src", "href"}]
        if tag not in {"meta", "path", "circle", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in {"path", "circle"}:
            assert self.open.pop() == tag, "tags nest"


def test_the_report_is_one_file_with_a_plot_of_everything_that_is_measured() -> None:
    outcome = simulated(small(seconds=3))
    laws = judge(outcome)
    text = page(outcome, laws, command="turnlog simulate <here>")
    tags = _Tags()
    tags.feed(text)
    assert not tags.open
    assert tags.seen.count("svg") == 10
    assert not tags.links
    assert "script" not in tags.seen
    assert "NaN" not in text
    assert "turnlog simulate &lt;here&gt;" in text
    for law in laws:
        assert law.figure in text
