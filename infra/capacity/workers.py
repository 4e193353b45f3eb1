"""All workers: who owns which partition of each model, the requests that lie there, takeovers, and the reports of a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from infra.capacity.clock import Timeline
from infra.capacity.node import Node
from infra.capacity.runs import Run, TokenLog
from infra.capacity.scenario import LARGE, SMALL, Scenario
from processors.decisions.recorder import Seen
from schemas.events.admissions import PromptAdmitted
from schemas.events.tokens import AttemptStarted, RunQueued, TokensGenerated
from schemas.events.workers import WorkerLoadReported

CONTEXT_MS: Final = 25.0
"""From an admitted prompt to its request: context assembles and renders it."""
INTAKE_MS: Final = 5.0
SESSION_MS: Final = 6_000.0
"""So long a silent worker keeps its partitions."""
REPORT_MS: Final = 1_000.0


class Fleet:
    """Workers by model. The number of a partition is the same for all models: it is the run's."""

    def __init__(
        self,
        scenario: Scenario,
        timeline: Timeline,
        tokens: TokenLog,
        reported: Callable[[WorkerLoadReported, int], None],
    ) -> None:
        self._timeline = timeline
        self._tokens = tokens
        self._reported = reported
        self._end_ms = scenario.end_ms
        self._requests: dict[tuple[str, int], dict[str, Run]] = {}
        self.nodes: dict[str, list[Node]] = {SMALL: [], LARGE: []}
        self.owners: dict[str, list[Node]] = {}
        self._answers: dict[str, Run] = {}
        """Open runs by the ids of their answers."""
        self._behind: dict[str, list[tuple[Run, Sequence[str]]]] = {}
        self.on_ready: Callable[[Run], None] = lambda run: None
        """Told when a run waits for nothing but a slot."""
        for model, nodes in self.nodes.items():
            count = (
                scenario.workers // 2
                if model == SMALL
                else scenario.workers - scenario.workers // 2
            )
            nodes.extend(
                Node(
                    name=f"{model}-{number}",
                    model=model,
                    calibration=scenario.worker,
                    timeline=timeline,
                    tokens=tokens,
                    shares=dict(scenario.policy.lanes),
                    cold=scenario.cold,
                )
                for number in range(count)
            )
            self.owners[model] = [nodes[p % count] for p in range(scenario.partitions)]
            for partition, owner in enumerate(self.owners[model]):
                owner.partitions.add(partition)
            for number, node in enumerate(nodes):
                timeline.after(REPORT_MS * number / count, self._report, node)
        tokens.watch(self._note)
        tokens.read(self.seen)
        timeline.at(0.0, self._first_reports)

    def _first_reports(self) -> None:
        """They were there before anybody sends."""
        for node in self.all_nodes:
            self._reported(node.report(), self._timeline.broker_ms)

    @property
    def all_nodes(self) -> list[Node]:
        return [node for nodes in self.nodes.values() for node in nodes]

    def admitted(self, prompt: PromptAdmitted) -> None:
        """Context's part: the request comes when its prompt is assembled, and the runs that its admission names have ended (M5)."""
        run = self._tokens.runs.get(prompt.run_id)
        if run is None or run.state.ended:
            return
        self._assemble(run, prompt.behind_message_ids)

    def _assemble(self, run: Run, behind: Sequence[str]) -> None:
        before = next((self._answers[each] for each in behind if each in self._answers), None)
        if before is not None:
            self._behind.setdefault(before.run_id, []).append((run, behind))
            return
        self._timeline.after(CONTEXT_MS + INTAKE_MS, self._request, run)

    def _note(self, run: Run, seen: Seen, counts: bool) -> None:
        queued = run.state.queued
        if not counts or queued is None:
            return
        if run.state.ended:
            self._answers.pop(queued.assistant_message_id, None)
        elif isinstance(seen.event, RunQueued):
            self._answers[queued.assistant_message_id] = run

    def _request(self, run: Run) -> None:
        state = run.state
        if state.queued is None or state.ended:
            return
        requests = self._requests.setdefault((run.model, run.partition), {})
        if run.run_id in requests:
            return  # The request of a prompt that was admitted twice.
        requests[run.run_id] = run
        self.on_ready(run)
        owner = self.owners[run.model][run.partition]
        if owner.alive and not owner.cut_off:
            owner.come(run)

    def seen(self, run: Run, seen: Seen, counts: bool) -> None:
        """Workers' tails, and context's."""
        event = seen.event
        if not counts or isinstance(event, TokensGenerated):
            return
        if isinstance(event, AttemptStarted):
            return
        if run.state.ended and run.model:
            requests = self._requests.get((run.model, run.partition))
            if requests is not None and requests.pop(run.run_id, None) is not None:
                owner = self.owners[run.model][run.partition]
                if owner.alive and not owner.cut_off:
                    owner.ended(run)
            for waiting, behind in self._behind.pop(run.run_id, []):
                self._assemble(waiting, behind)

    def flush(self, run: Run) -> None:
        """What the run's worker made by now lies on the log."""
        if run.model:
            self.owners[run.model][run.partition].flush(run)

    def move(self, model: str, partition: int, to: Node) -> None:
        """Another owner reads what is open there from the log, and goes on where it stands."""
        owner = self.owners[model][partition]
        if owner is to:
            return
        if owner.alive and not owner.cut_off:
            owner.lose(partition)
        self.owners[model][partition] = to
        to.partitions.add(partition)
        for run in list(self._requests.get((model, partition), {}).values()):
            if run.state.ended:
                continue
            if to.alive and not to.cut_off:
                to.come(run)

    def spread(self, node: Node) -> None:
        """The group gave up on it: its partitions go to the others in turn."""
        others = [each for each in self.nodes[node.model] if each.alive and not each.cut_off]
        others = [each for each in others if each is not node]
        if not others:
            return
        others.sort(key=lambda each: (len(each.partitions), each.name))
        for number, partition in enumerate(sorted(node.partitions)):
            self.move(node.model, partition, others[number % len(others)])
        node.partitions.clear()

    def come_back(self, node: Node) -> None:
        """A new process joins: it takes its part of the partitions from those that have most."""
        node.begin_again()
        peers = self.nodes[node.model]
        part = len(self.owners[node.model]) // sum(each.alive for each in peers)
        for _ in range(part):
            most = max(peers, key=lambda each: (len(each.partitions), each.name))
            self.move(node.model, min(most.partitions), node)

    def _report(self, node: Node) -> None:
        if self._timeline.now > self._end_ms:
            return  # Nobody sends any more, so nobody asks.
        self._timeline.after(REPORT_MS, self._report, node)
        if node.alive and not node.cut_off:
            report = node.report()
            stamp = self._timeline.broker_ms
            self._timeline.after(10, self._reported, report, stamp)
