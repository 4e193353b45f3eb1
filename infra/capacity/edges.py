"""Edges: each with its own soft view of the load, and its own bound on what an account sends; both are those of production.

They place runs and send prompts.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from edge.decisions.account_bounds import AccountBounds
from edge.runs import RECENT_ACCOUNTS_MAX, RECENT_ENDS_MAX
from edge.soft_views import BrokerClock, Workers
from infra.capacity.clock import START_MS, Timeline
from infra.capacity.people import Ask, prompt_tokens
from infra.capacity.runs import Run, TokenLog
from infra.capacity.scenario import Scenario
from processors.decisions.recorder import Seen
from schemas.events.accounts import PromptSubmitted
from schemas.events.tokens import AttemptStarted, RunQueued, TokensGenerated
from schemas.events.workers import WorkerLoadReported
from schemas.ids import RunAddress, mint_run_id
from schemas.vocabulary import Tier, lane_of

ID_KEY: Final = b"the simulator's ids"


class Edges:
    """All of them. Every edge tails the whole token log, so what one sees of runs, all see at the same moment."""

    def __init__(self, scenario: Scenario, timeline: Timeline, tokens: TokenLog) -> None:
        self._scenario = scenario
        self._tokens = tokens
        clock = BrokerClock(monotonic=lambda: timeline.now / 1000, wall=lambda: START_MS / 1000)
        self._timeline = timeline
        self.views = [Workers(clock) for _ in range(scenario.edges)]
        self.bounds = [AccountBounds() for _ in range(scenario.edges)]
        self.late_ms = [0.0] * scenario.edges
        """How much later an edge reads reports than it should."""
        self._ended: OrderedDict[str, deque[str]] = OrderedDict()
        self._shares = scenario.policy.lanes
        tokens.read(self.seen)

    def passes(self, ask: Ask, *, edge: int) -> bool:
        """Whether its account's bound lets it through to the log."""
        limits, now_ms = self._scenario.policy.tiers[ask.tier], int(self._timeline.now)
        return not self.bounds[edge].prompt(ask.account_id, ask.tier, limits, now_ms=now_ms)

    def submit(self, ask: Ask, *, edge: int) -> tuple[Run, PromptSubmitted]:
        """Place the run, mint its id, and say what is sent."""
        view = self.views[edge]
        counts = prompt_tokens(ask)
        candidates = [ask.model] if ask.model else list(counts)[:1]
        lane = lane_of(ask.tier, ask.service_tier)
        partition = view.place(
            ask.chat_id,
            partitions=self._scenario.partitions,
            models=candidates,
            lane=lane,
            shares=self._shares,
            draws=ask.draws[:2],
        )
        run_id = mint_run_id(
            key=ID_KEY,
            account_id=ask.account_id,
            address=RunAddress(
                epoch=1, partition=partition, mint_offset=self._tokens.ends[partition]
            ),
            random=ask.draws[2],
        )
        run = Run(
            run_id=run_id,
            ask=ask,
            partition=partition,
            edge=edge,
            submitted_ms=self._timeline.now,
        )
        self._tokens.runs[run_id] = run
        prompt = PromptSubmitted(
            run_id=run_id,
            account_id=ask.account_id,
            tier=ask.tier,
            seat_id=ask.seat_id,
            chat_id=ask.chat_id,
            user_message_id=f"{ask.number}u",
            assistant_message_id=f"{ask.number}a",
            parent_id=None,
            content="",
            model=ask.model,
            max_output_tokens=ask.asked,
            on_busy=ask.on_busy,
            service_tier=ask.service_tier,
            idempotency_key=ask.key,
            fingerprint=ask.key or "",
            prompt_tokens=counts,
            load=view.load(
                list(counts), partition, self._shares, account_id=ask.account_id, lanes=[lane]
            ),
            ended_runs=tuple(self._ended.get(ask.account_id, ())),
        )
        view.sent(run_id, partition=partition, lane=lane, models=candidates)
        return run, prompt

    def reported(self, report: WorkerLoadReported, appended_ms: int) -> None:
        """A report lies on its topic."""
        for edge, view in enumerate(self.views):
            if self.late_ms[edge]:
                self._timeline.after(self.late_ms[edge], view.note, report, appended_ms)
            else:
                view.note(report, appended_ms)

    def seen(self, run: Run, seen: Seen, counts: bool) -> None:
        """A record came by on the tails."""
        if not counts or isinstance(seen.event, TokensGenerated):
            return
        state = run.state
        match seen.event:
            case AttemptStarted():
                pass  # It goes on to count: it has a slot that the report may call free.
            case RunQueued() as queued if not state.ended:
                self.bounds[run.edge].admitted(run.ask.account_id, run.ask.tier)
                if queued.after_run_id is None:
                    for view in self.views:
                        view.queued(
                            run.run_id,
                            partition=run.partition,
                            lane=queued.lane,
                            model=queued.model,
                            at_ms=seen.appended_ms,
                        )
            case _:
                if state.queued is None:
                    self.views[run.edge].not_queued(run.run_id)
                else:
                    for view in self.views:
                        view.not_queued(run.run_id)
                if state.ended:
                    self._note_end(run)

    def _note_end(self, run: Run) -> None:
        if run.state.queued is None:
            return
        account = run.ask.account_id
        ends = self._ended.get(account)
        if ends is None:
            ends = self._ended[account] = deque(maxlen=RECENT_ENDS_MAX)
            if len(self._ended) > RECENT_ACCOUNTS_MAX:
                self._ended.popitem(last=False)
        else:
            self._ended.move_to_end(account)
        ends.append(run.run_id)


def edge_of(account_id: str, tier: Tier, number: int, edges: int) -> int:
    """People of one team are everywhere, one person's requests mostly at one edge."""
    return number % edges if tier is Tier.TEAM else sum(account_id.encode()) % edges
