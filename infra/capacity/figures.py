"""What is measured while a simulation runs: numbers by second, and every run's wait against what it was told."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from edge.decisions.refusals import FLOOD
from infra.capacity.clock import Timeline
from infra.capacity.node import Node, lane_of
from infra.capacity.runs import TAIL_MS, Run
from infra.capacity.scenario import Scenario
from processors.decisions.account_state import AccountOutput
from processors.decisions.recorder import Seen
from schemas.events.accounts import PromptSubmitted
from schemas.events.tokens import RunEnded, RunQueued
from schemas.vocabulary import Lane, RefusalReason, Tier

BACKLOG_MIN: Final = 2
"""Whoever has so many requests waiting could take more than he gets."""

Group = tuple[str, Lane]
"""A model and one of its lanes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """A run that started: when it was queued, what it was told, how long it waited (ms)."""

    tier: Tier
    group: Group
    queued_ms: float
    told_ms: int
    waited_ms: float


@dataclass(slots=True, kw_only=True)
class Second:
    """How things stood at the end of a second, or what happened in it."""

    prompts: int = 0
    admitted: int = 0
    refused: Counter[tuple[Tier, str]] = field(default_factory=Counter)
    grants: Counter[str] = field(default_factory=Counter)
    level: float = 0.0
    level_most: int = 0
    busy: float = 0.0
    tokens_per_s: float = 0.0
    queued: dict[Group, int] = field(default_factory=dict)
    """The most that waited at any moment of it."""
    floor_tokens: int = 0
    contested_tokens: int = 0
    started_tokens: Counter[Group] = field(default_factory=Counter)
    """What the runs that were started in it used in the end; `contested_tokens` while the free lane waited at their worker."""


class Figures:
    """Told of everything by the simulation; decides nothing."""

    def __init__(self, scenario: Scenario, timeline: Timeline) -> None:
        self._scenario = scenario
        self._timeline = timeline
        self.seconds: defaultdict[int, Second] = defaultdict(Second)
        self.waits: list[Waited] = []
        self.decision_ms: list[float] = []
        self.queued: Counter[Group] = Counter()
        self.most_queued: Counter[Group] = Counter()
        self.always_waiting: dict[Group, set[str]] = {}
        self.account_tokens: defaultdict[Group, Counter[str]] = defaultdict(Counter)
        self.account_requests: defaultdict[Group, Counter[str]] = defaultdict(Counter)
        self.account_squares: defaultdict[Group, Counter[str]] = defaultdict(Counter)
        """The squares of its requests' tokens."""
        self.queued_tokens: Counter[Group] = Counter()
        self.most_queued_tokens: Counter[Group] = Counter()
        self.sometimes: Counter[str] = Counter()
        self.background_started = 0
        self.background_before_others = 0
        """Of those, how many while somebody of another lane waited at the same worker."""
        self._waiting: defaultdict[Group, Counter[str]] = defaultdict(Counter)
        self._in_queue: set[str] = set()
        self._started: set[str] = set()
        self._made = 0.0

    def second(self, now_ms: float) -> Second:
        """The one that `now_ms` lies in."""
        return self.seconds[int(now_ms // 1000)]

    def measured(self, at_ms: float | None) -> bool:
        """After the warm-up, and while prompts come."""
        return at_ms is not None and self._scenario.warm_up_ms <= at_ms < self._scenario.end_ms

    def judged(
        self, prompt: PromptSubmitted, outputs: Sequence[AccountOutput], level: int, now_ms: float
    ) -> None:
        """Admission decided a new prompt."""
        second = self.second(now_ms)
        self.sometimes[f"ladder level {level}"] += 1
        for output in outputs:
            match output:
                case RunQueued():
                    second.admitted += 1
                    self._granted(prompt, output, second)
                case RunEnded(refusal=refusal) if refusal is not None:
                    self._refused(prompt.tier, refusal.reason, refusal.limit, now_ms)
                case _:
                    self.sometimes[type(output).__name__] += 1

    def refused_at_once(self, tier: Tier, now_ms: float) -> None:
        """An edge refused a prompt before the log: no decision is waited for, so it is none of `decision_ms`."""
        self._refused(tier, RefusalReason.RATE_LIMITED, FLOOD, now_ms)

    def _refused(self, tier: Tier, reason: RefusalReason, limit: str, now_ms: float) -> None:
        name = f"{reason.value} ({limit})" if limit else reason.value
        self.second(now_ms).refused[tier, name] += 1
        self.sometimes[f"refused: {name}"] += 1

    def _granted(self, prompt: PromptSubmitted, queued: RunQueued, second: Second) -> None:
        full = min(
            prompt.max_output_tokens or 10**9,
            self._scenario.policy.tiers[prompt.tier].output_tokens_max,
        )
        if queued.quota_limited:
            kind = "shortened by the quota"
        elif queued.granted_output_tokens < full:
            kind = "shortened by the ladder"
        else:
            kind = "as asked"
        second.grants[kind] += 1
        self.sometimes[f"grant {kind}"] += 1
        if queued.downgraded_from is not None:
            second.grants["smaller model"] += 1
            self.sometimes["grant smaller model"] += 1

    def watch(self, run: Run, seen: Seen, counts: bool) -> None:
        """Told every record of the token log as it is appended."""
        if not counts:
            self.sometimes[f"ignored {type(seen.event).__name__}"] += 1
            return
        state = run.state
        if isinstance(seen.event, RunQueued) or (state.ended and run.queued_ms is None):
            self.decision_ms.append(self._timeline.now + TAIL_MS - run.submitted_ms)
        if (
            isinstance(seen.event, RunQueued)
            and not state.ended
            and seen.event.after_run_id is None
        ):
            self._enter(run)
        if state.ended and state.queued is not None:
            self._leave(run)
            if state.finish_reason is not None:
                self.sometimes[f"ended: {state.finish_reason.value}"] += 1
            if run.started_ms is not None:
                self._used(run)

    def _enter(self, run: Run) -> None:
        group = (run.model, lane_of(run))
        self.queued[group] += 1
        self.queued_tokens[group] += run.input_tokens + run.grant
        tokens = self.queued_tokens[group]
        self.most_queued_tokens[group] = max(self.most_queued_tokens[group], tokens)
        self._in_queue.add(run.run_id)
        self._waiting[group][run.ask.account_id] += 1
        now = self.queued[group]
        self.most_queued[group] = max(self.most_queued[group], now)
        second = self.second(run.queued_ms or 0.0)
        second.queued[group] = max(now, second.queued.get(group, 0))

    def _leave(self, run: Run) -> None:
        if run.run_id not in self._in_queue:
            return
        self._in_queue.discard(run.run_id)
        group = (run.model, lane_of(run))
        self.queued[group] -= 1
        self.queued_tokens[group] -= run.input_tokens + run.grant
        waiting = self._waiting[group]
        waiting[run.ask.account_id] -= 1
        if not waiting[run.ask.account_id]:
            del waiting[run.ask.account_id]

    def released(self, run: Run, now_ms: float) -> None:
        """The run before it in its chat has ended."""
        queued = run.state.queued
        if queued is not None and queued.after_run_id is not None:
            run.released_ms = now_ms
            self.sometimes["started behind another run"] += 1
            self._enter(run)

    def starts(self, node: Node, run: Run, now_ms: float) -> None:
        """A worker is about to start it."""
        if run.state.attempt:
            self.sometimes["takeover"] += 1
            if run.state.n:
                self.sometimes["takeover in mid-answer"] += 1
            return
        if lane_of(run) is Lane.BACKGROUND:
            self.background_started += 1
            waiting = node.in_lane.total() - node.in_lane[Lane.BACKGROUND]
            self.background_before_others += waiting > 0
        self._leave(run)
        run.started_ms = now_ms
        run.contested = node.in_lane[Lane.FREE] > 0
        queued = run.state.queued
        assert queued is not None, "a queued run starts"
        assert run.queued_ms is not None, "a queued run starts"
        if queued.after_run_id is None:
            self.waits.append(
                Waited(
                    tier=run.ask.tier,
                    group=(run.model, queued.lane),
                    queued_ms=run.queued_ms,
                    told_ms=queued.wait_ms,
                    waited_ms=now_ms - run.queued_ms,
                )
            )

    def _used(self, run: Run) -> None:
        """It has ended: its tokens count where it was started."""
        started = run.started_ms
        assert started is not None, "only what was started is used"
        used = run.input_tokens + run.state.n
        second = self.second(started)
        group = (run.model, lane_of(run))
        second.started_tokens[group] += used
        if run.contested:
            second.contested_tokens += used
            second.floor_tokens += used if lane_of(run) is Lane.FREE else 0
        if self.measured(started):
            self.account_tokens[group][run.ask.account_id] += used
            self.account_requests[group][run.ask.account_id] += 1
            self.account_squares[group][run.ask.account_id] += used * used

    def look(self, now_ms: float, nodes: Sequence[Node], levels: Sequence[int]) -> None:
        """At the end of each second."""
        second = self.second(now_ms - 1)
        second.level = sum(levels) / len(levels)
        second.level_most = max(levels)
        alive = [node for node in nodes if node.alive]
        second.busy = sum(node.busy for node in alive) / max(1, sum(node.slots for node in nodes))
        made = sum(node.made for node in nodes)
        second.tokens_per_s, self._made = made - self._made, made
        for group in self._waiting:
            second.queued.setdefault(group, self.queued[group])
        if self.measured(now_ms):
            for group, waiting in self._waiting.items():
                now = {account for account, count in waiting.items() if count >= BACKLOG_MIN}
                always = self.always_waiting.get(group)
                self.always_waiting[group] = now if always is None else always & now
