"""One simulation: people, edges, admission, workers and the recorder on one timeline."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from infra.capacity.admission import Admission
from infra.capacity.clock import Timeline
from infra.capacity.edges import Edges, edge_of
from infra.capacity.faults import Faults
from infra.capacity.figures import Figures
from infra.capacity.ledger import Breaches, Ledger
from infra.capacity.node import Node
from infra.capacity.people import Ask, People
from infra.capacity.recorder import Recorder
from infra.capacity.runs import Run, TokenLog
from infra.capacity.scenario import Scenario
from infra.capacity.workers import Fleet
from processors.decisions.account_state import AccountOutput, AccountState
from processors.decisions.recorder import Seen
from schemas.events.accounts import PromptSubmitted
from schemas.events.tokens import RunCancelled, RunQueued
from schemas.ids import derived_event_id
from schemas.vocabulary import CancelReason

DRAIN_MS_MAX: Final = 3_600_000.0
"""After the last prompt everything ends within the longest deadline."""
RETRY_MS: Final = 150.0
"""A client that had no answer sends again, with its key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a simulation leaves behind."""

    scenario: Scenario
    figures: Figures
    breaches: Breaches
    prompts: int
    runs: int
    settlements: int
    drained_ms: float
    wall_s: float


class Simulation:
    """Build it from a scenario, change what is to be broken, and `run` it once."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.timeline = Timeline()
        self.tokens = TokenLog(self.timeline, scenario.partitions)
        self.breaches = Breaches()
        self.figures = Figures(scenario, self.timeline)
        self.ledger = Ledger(scenario, self.breaches)
        self.people = People(scenario)
        self.tokens.watch(self._note)
        self.tokens.watch(self.ledger.watch)
        self.tokens.watch(self.figures.watch)
        self.edges = Edges(scenario, self.timeline, self.tokens)
        self.fleet = Fleet(scenario, self.timeline, self.tokens, self.edges.reported)
        self.admission = Admission(
            scenario,
            self.timeline,
            self.tokens,
            self.ledger,
            self.fleet.admitted,
            poor=self.people.poor(),
        )
        self.admission.on_judged = self._judged
        self.recorder = Recorder(scenario, self.timeline, self.tokens, self.admission.send)
        self.tokens.before_end = self.fleet.flush
        self.fleet.on_ready = lambda run: self.figures.released(run, self.timeline.now)
        for node in self.fleet.all_nodes:
            node.on_start = self._starts
        self.faults = Faults(self)
        self.prompts = 0

    def run(
        self, progress: Callable[[int, Figures], None] = lambda second, figures: None
    ) -> Outcome:
        """To the end: prompts come for as long as the scenario says, then everything that is open ends."""
        began = time.perf_counter()
        collects = gc.isenabled()
        gc.disable()  # Nothing here is circular, and there are millions of objects to look through.
        try:
            self.timeline.at(self.people.next_ms(0.0), self._arrive)
            for second in range(1, self.scenario.seconds + 1):
                self._until(1000.0 * second)
                progress(second, self.figures)
            second = self.scenario.seconds
            while self.ledger.open_runs and self.timeline.now < self.scenario.end_ms + DRAIN_MS_MAX:
                second += 1
                self._until(1000.0 * second)
            self._until(self.timeline.now + 2 * self.recorder.late_ms + 2_000)
        finally:
            if collects:
                gc.enable()
        self.ledger.at_rest()
        return Outcome(
            scenario=self.scenario,
            figures=self.figures,
            breaches=self.breaches,
            prompts=self.prompts,
            runs=self.ledger.queued_runs,
            settlements=self.ledger.settlements,
            drained_ms=self.timeline.now - self.scenario.end_ms,
            wall_s=time.perf_counter() - began,
        )

    def _until(self, at_ms: float) -> None:
        self.timeline.run_until(at_ms)
        self.figures.look(at_ms, self.fleet.all_nodes, self.admission.levels)

    def _arrive(self) -> None:
        ask = self.people.ask()
        self._submit(ask)
        if ask.key is not None:
            self.timeline.after(RETRY_MS, self._again, ask)
        following = self.people.next_ms(self.timeline.now)
        if following < self.scenario.end_ms:
            self.timeline.at(following, self._arrive)

    def _again(self, ask: Ask) -> None:
        self._submit(self.people.again(ask))

    def _submit(self, ask: Ask) -> None:
        self.prompts += 1
        self.figures.second(self.timeline.now).prompts += 1
        edge = edge_of(ask.account_id, ask.tier, ask.number, self.scenario.edges)
        if not self.edges.passes(ask, edge=edge):
            self.figures.refused_at_once(ask.tier, self.timeline.now)
            return
        run, prompt = self.edges.submit(ask, edge=edge)
        event_id = derived_event_id(run.run_id, "PromptSubmitted")
        self.admission.send(prompt, prompt.account_id, event_id)

    def _note(self, run: Run, seen: Seen, counts: bool) -> None:
        """What everybody else reads in the run from here on."""
        event = seen.event
        if not counts or not isinstance(event, RunQueued):
            return
        run.model = event.model
        run.queued_ms = self.timeline.now
        run.grant = event.granted_output_tokens
        run.input_tokens = min(event.input_budget_tokens, max(run.ask.needed, run.ask.context))
        if run.ask.cancel_after_ms is not None:
            self.timeline.after(run.ask.cancel_after_ms, self._cancel, run)

    def _cancel(self, run: Run) -> None:
        """Its reader pressed stop."""
        if run.state.ended:
            return
        self.tokens.append(run, RunCancelled(run_id=run.run_id, reason=CancelReason.USER))

    def _judged(
        self,
        prompt: PromptSubmitted,
        outputs: Sequence[AccountOutput],
        account: AccountState,
        level: int,
    ) -> None:
        self.ledger.judged(prompt, outputs, account)
        self.figures.judged(prompt, outputs, level, self.timeline.now)

    def _starts(self, node: Node, run: Run) -> None:
        self.figures.starts(node, run, self.timeline.now)
