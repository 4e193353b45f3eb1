"""`turnlog simulate`: the laws of rationing at a size that no single machine can run."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from infra.capacity.calibration import worker_of
from infra.capacity.faults import UnknownFault, faults_of
from infra.capacity.figures import Figures
from infra.capacity.laws import Law, failed, judge
from infra.capacity.report import page
from infra.capacity.scenario import PATTERNS, Scenario, scenario_policy
from infra.capacity.simulation import Outcome, Simulation
from infra.command.terminal import output
from infra.policy_checks import PolicyError


class PatternName(StrEnum):
    """Who sends how much when; see `infra/capacity/scenario.py`."""

    STEADY = "steady"
    BURST = "burst"
    ABUSER = "abuser"
    TEAM = "team"
    DAILY = "daily"


def simulate(
    seed: Annotated[int, typer.Option(help="Equal seeds give equal results.")] = 1,
    pattern: Annotated[
        PatternName, typer.Option(help="Who sends how much when.")
    ] = PatternName.STEADY,
    prompts_per_s: Annotated[
        float, typer.Option(min=10, max=100_000, help="At the peak.")
    ] = 20_000,
    workers: Annotated[
        int, typer.Option(min=4, max=2_000, help="Half of them for each model.")
    ] = 470,
    slots: Annotated[int, typer.Option(min=1, max=4_096, help="Answers at once on a worker.")] = 64,
    tokens_per_s: Annotated[
        float,
        typer.Option(
            min=1,
            max=1_000_000,
            help="Output of a worker with all slots busy, prompts read beside it.",
        ),
    ] = 3_000,
    seconds: Annotated[int, typer.Option(min=3, max=3_600, help="How long prompts come.")] = 30,
    faults: Annotated[
        str, typer.Option(help="none, all, or a list: dead-workers,late-reports,…")
    ] = "none",
    cold: Annotated[bool, typer.Option("--cold", help="No worker has worked before.")] = False,
    policy: Annotated[
        Path, typer.Option(help="A policy file instead of the packaged one.")
    ] = Path(),
    report: Annotated[
        Path | None, typer.Option(help="Write the report, with plots, to this HTML file.")
    ] = None,
) -> None:
    """Run the decisions of edges, admission and workers over an in-memory log in virtual time, and check the laws of rationing.

    Exits with 1 where a law does not hold.
    """
    try:
        scenario = Scenario(
            seed=seed,
            pattern=PATTERNS[pattern.value],
            prompts_per_s=prompts_per_s,
            workers=workers,
            seconds=seconds,
            faults=faults_of(faults),
            cold=cold,
            worker=worker_of(slots=slots, tokens_per_s=tokens_per_s),
            policy=scenario_policy(workers, policy),
        )
        if report is not None:
            report.touch()
    except (UnknownFault, PolicyError, OSError) as error:
        typer.echo(f"turnlog: {error}", err=True)
        raise SystemExit(2) from None
    console = output()
    outcome = _run(scenario)
    laws = judge(outcome)
    show(console, outcome, laws)
    if report is not None:
        command = " ".join(["turnlog", *sys.argv[1:]])
        report.write_text(page(outcome, laws, command=command))
        console.print(f"The report is in {report}.")
    if failed(laws):
        raise SystemExit(1)


def _run(scenario: Scenario) -> Outcome:
    columns = (
        TextColumn("second {task.completed} of {task.total}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=scenario.seconds)

        def told(second: int, figures: Figures) -> None:
            last = figures.seconds[second - 1]
            says = f"{last.prompts:,} prompts, {last.admitted:,} admitted, slots {last.busy:.0%} busy, level {last.level:.1f}"
            bar.update(task, completed=second, description=says)

        return Simulation(scenario).run(told)


def show(console: Console, outcome: Outcome, laws: list[Law]) -> None:
    """The figures in the terminal."""
    scenario = outcome.scenario
    console.print(
        f"{outcome.prompts:,} prompts in {scenario.seconds} s, {outcome.runs:,} admitted, {scenario.workers} workers, "
        f"pattern {scenario.pattern.name}, faults {','.join(scenario.faults) or 'none'}, seed {scenario.seed}; "
        f"simulated in {outcome.wall_s:.0f} s"
    )
    words = {True: "held  ", False: "BROKEN", None: "not judged"}
    for law in laws:
        more = f"  [{law.says}]" if law.says else ""
        console.print(
            f"{words[law.held]}  {law.name}: {law.figure}  {law.bound}{more}", markup=False
        )
