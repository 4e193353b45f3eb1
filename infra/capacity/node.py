"""One worker: the scheduling and the load reports of production, around an engine that is a few formulas.

Answers under way share the engine step by step, so each has made as many tokens since some moment as any other: one number, `served`, says
how far all of them are, and an answer ends when it reaches its mark. While prompts are read, nobody gets on.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

from inference_workers.decisions.lanes import Claim, FairLanes
from inference_workers.decisions.turns import Held
from inference_workers.engine import EngineLoad
from inference_workers.load_report import LaneUse, Rates, load_report
from inference_workers.outlook import SlotTimes, free_ms, lane_loads
from infra.capacity.calibration import Calibration
from infra.capacity.clock import Timeline
from infra.capacity.runs import Run, TokenLog
from infra.capacity.warm_up import warm_up
from schemas.events.accounts import LaneLimits
from schemas.events.tokens import AttemptStarted, RunEnded, TokensGenerated
from schemas.events.workers import WorkerLoadReported
from schemas.vocabulary import EndCause, EndWriter, Lane

DELTA_MS: Final = 25.0
"""What a worker made and has not sent yet when it dies, in time."""


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """A run in a slot. It began with `said` tokens of its answer, when `served` was `mark`."""

    run: Run
    nonce: str
    claim: Claim
    mark: float
    said: int
    started: float
    flushed: int = 0


def lane_of(run: Run) -> Lane:
    """The lane of a queued run."""
    queued = run.state.queued
    assert queued is not None, "a request is of a queued run"
    return queued.lane


class Node:
    """See the module. `on_start` is told each claim that is about to start, before it is taken from the lanes."""

    def __init__(
        self,
        *,
        name: str,
        model: str,
        calibration: Calibration,
        timeline: Timeline,
        tokens: TokenLog,
        shares: dict[Lane, LaneLimits],
        cold: bool = False,
    ) -> None:
        self.name = name
        self.model = model
        self.partitions: set[int] = set()
        self.alive = True
        self.cut_off = False
        """It goes on, and does not notice that the others have taken over."""
        self._shares = shares
        self.lanes = FairLanes(shares)
        self.waiting: dict[str, Run] = {}
        self.in_lane: Counter[Lane] = Counter()
        """How many wait, by lane."""
        self.on_start: Callable[[Node, Run], None] = lambda node, run: None
        self._calibration = calibration
        self._timeline = timeline
        self._tokens = tokens
        self._attempts: dict[str, _Attempt] = {}
        self._ends: list[tuple[float, str, str]] = []
        self._served = 0.0
        self._at = 0.0
        self._reads_until = 0.0
        self._booking = 0
        self._held_tokens = 0
        self._generated = 0.0
        self._made = 0.0
        self._prompted = 0
        self._started = 0
        self._rates = Rates()
        self._use = LaneUse()
        self._times = SlotTimes()
        self._draw = Random(name).random
        self._full = False
        self._epoch = 1
        if not cold:
            self._generated, self._prompted = warm_up(
                calibration, use=self._use, times=self._times, rates=self._rates
            )

    @property
    def busy(self) -> int:
        return len(self._attempts)

    @property
    def slots(self) -> int:
        return self._calibration.slots

    @property
    def made(self) -> float:
        """Tokens of answers since the simulation began, in all its lives."""
        return self._made

    def running(self) -> Iterator[Run]:
        return (attempt.run for attempt in self._attempts.values())

    # Requests

    def come(self, run: Run) -> None:
        """A request was read; its run is queued."""
        claim = self._claim(run)
        if run.run_id in self.waiting or run.run_id in self._attempts:
            return  # Q1: served once.
        self._use.came(claim)
        self.waiting[run.run_id] = run
        self.in_lane[claim.lane] += 1
        self.lanes.wait(claim)
        self._fill()

    def _claim(self, run: Run) -> Claim:
        return Claim(
            run_id=run.run_id,
            account_id=run.ask.account_id,
            lane=lane_of(run),
            tokens=max(1, run.input_tokens + run.grant - run.state.n),
            resumed=run.state.attempt > 0,
        )

    def ended(self, run: Run) -> None:
        """Its tail shows that the run has ended, or was started by somebody else: nothing is made for it any more."""
        if run.run_id in self.waiting:
            self._withdraw(run)
        attempt = self._attempts.get(run.run_id)
        if attempt is not None:
            self._advance()
            self._free(attempt, counts=True)
            self._fill()

    def lose(self, partition: int) -> None:
        """The partition has another owner: what waits or runs of it is dropped."""
        for run in [run for run in self.waiting.values() if run.partition == partition]:
            self._withdraw(run)
        self._advance()
        for attempt in [a for a in self._attempts.values() if a.run.partition == partition]:
            self.flush(attempt.run)
            self._free(attempt, counts=False)
        self.partitions.discard(partition)
        self._fill()

    def _withdraw(self, run: Run) -> None:
        del self.waiting[run.run_id]
        self.in_lane[lane_of(run)] -= 1
        self.lanes.withdraw(run.run_id)

    def die(self) -> None:
        """Gone, with what it had not sent."""
        self._advance()
        for attempt in self._attempts.values():
            self._flush(attempt, late_ms=DELTA_MS)
        self.alive = False
        self._attempts.clear()
        self._ends.clear()
        self.waiting.clear()
        self.in_lane.clear()
        self._held_tokens = 0

    def begin_again(self) -> None:
        """A new process under the old name."""
        self.alive, self.cut_off = True, False
        self._epoch += 1
        self._at = self._reads_until = self._timeline.now
        self._rates, self._use, self._times = Rates(), LaneUse(), SlotTimes()
        self._generated, self._prompted = 0.0, 0
        self.lanes = FairLanes(self._shares)

    # The engine

    def _advance(self) -> None:
        now = self._timeline.now
        worked = now - max(self._at, min(now, self._reads_until))
        self._at = now
        if worked > 0 and self._attempts:
            made = worked / self._calibration.token_ms(len(self._attempts))
            self._served += made
            self._generated += made * len(self._attempts)
            self._made += made * len(self._attempts)

    def _fill(self) -> None:
        if not self.alive:
            return
        self._advance()
        while not self.cut_off and len(self._attempts) < self._calibration.slots:
            run_id = self.lanes.take(room_tokens=self._calibration.kv_tokens - self._held_tokens)
            if run_id is None:
                self._full = False
                break
            self._start(self.waiting.pop(run_id))
        self._book()

    def _start(self, run: Run) -> None:
        self._started += 1
        claim = self._claim(run)
        self.on_start(self, run)
        self.in_lane[claim.lane] -= 1
        nonce = f"{self.name}/{self._epoch}/{self._started}"
        self._reads_until = max(self._reads_until, self._timeline.now)
        self._reads_until += self._calibration.prefill_ms(run.input_tokens + run.state.n)
        self._prompted += run.input_tokens + run.state.n
        self._held_tokens += run.input_tokens + run.grant
        attempt = _Attempt(
            run=run,
            nonce=nonce,
            claim=claim,
            mark=self._served,
            said=run.state.n,
            started=self._timeline.now,
        )
        self._attempts[run.run_id] = attempt
        heapq.heappush(
            self._ends, (attempt.mark + max(1, run.length - attempt.said), run.run_id, nonce)
        )
        self._tokens.append(
            run,
            AttemptStarted(
                run_id=run.run_id,
                attempt=run.state.attempt + 1,
                nonce=nonce,
                worker_id=self.name,
                input_tokens=run.input_tokens,
            ),
        )

    def _book(self) -> None:
        """When the next answer ends, if nothing changes."""
        self._booking += 1
        while self._ends:
            mark, run_id, nonce = self._ends[0]
            held = self._attempts.get(run_id)
            if held is not None and held.nonce == nonce:
                token_ms = self._calibration.token_ms(len(self._attempts))
                starts = max(self._timeline.now, self._reads_until)
                due = starts + max(0.0, mark - self._served) * token_ms
                self._timeline.at(due, self._due, self._booking)
                return
            heapq.heappop(self._ends)

    def _due(self, booking: int) -> None:
        if booking != self._booking or not self.alive:
            return
        self._advance()
        while self._ends and self._ends[0][0] <= self._served + 1e-6:
            _, run_id, nonce = heapq.heappop(self._ends)
            attempt = self._attempts.get(run_id)
            if attempt is None or attempt.nonce != nonce:
                continue
            self._flush(attempt)
            run = attempt.run
            cause = EndCause.STOP
            if run.ask.output > run.grant:
                queued = run.state.queued
                limited = queued is not None and queued.quota_limited
                cause = EndCause.QUOTA_REACHED if limited else EndCause.LENGTH
            self._tokens.append(
                run,
                RunEnded(
                    run_id=run_id,
                    cause=cause,
                    writer=EndWriter.WORKER,
                    nonce=nonce,
                    end=attempt.flushed + attempt.said,
                ),
            )
            self._free(attempt, counts=True)
        self._fill()

    def flush(self, run: Run) -> None:
        """Say what was made of it by now."""
        attempt = self._attempts.get(run.run_id)
        if attempt is not None:
            self._advance()
            self._flush(attempt)

    def _flush(self, attempt: _Attempt, late_ms: float = 0.0) -> None:
        late = late_ms / self._calibration.token_ms(max(1, len(self._attempts)))
        made = int(self._served - late - attempt.mark + 1e-6)
        made = min(made, attempt.run.length - attempt.said)
        if made > attempt.flushed:
            self._tokens.append(
                attempt.run,
                TokensGenerated(
                    run_id=attempt.run.run_id,
                    nonce=attempt.nonce,
                    index=attempt.said + attempt.flushed,
                    count=made - attempt.flushed,
                    text="",
                ),
            )
            attempt.flushed = made

    def _free(self, attempt: _Attempt, *, counts: bool) -> None:
        """The slot is free. `counts`: what was used says something of what others will."""
        run = attempt.run
        del self._attempts[run.run_id]
        self._held_tokens -= run.input_tokens + run.grant
        used = run.input_tokens + attempt.flushed
        self.lanes.finish(run.run_id, used_tokens=used)
        if counts:
            claimed = run.input_tokens + run.grant
            self._use.ended(attempt.claim.lane, claimed=claimed, used=used)
            self._times.freed(round(self._timeline.now - attempt.started), used_tokens=used)

    # What it says of itself

    def report(self) -> WorkerLoadReported:
        """The report of a second."""
        self._advance()
        self._use.second(elapsed_s=1)
        full, self._full = self._full, self.busy >= self.slots
        self._rates.measure(
            EngineLoad(
                slots=self.slots,
                busy=self.busy,
                releasing=0,
                generated_tokens_total=int(self._generated),
                prompt_tokens_total=self._prompted,
                progress_age_ms=0,
                kv_tokens=self._held_tokens,
            ),
            full=full and self._full,
            elapsed_s=1,
        )
        now = self._timeline.now
        running = [
            Held(claim=attempt.claim, age_ms=round(now - attempt.started))
            for attempt in self._attempts.values()
        ]
        held_ms = self._times.held_ms(slots=self.slots, full_tokens_per_s=self._rates.full)
        return load_report(
            worker_id=self.name,
            model=self.model,
            epoch=self._epoch,
            slots=self.slots,
            busy=self.busy,
            lanes=lane_loads(
                self.lanes,
                running=running,
                slots=self.slots,
                outside=(),
                use=self._use,
                held_ms=held_ms,
                draw=self._draw,
            ),
            rates=self._rates,
            kv_tokens=self._held_tokens,
            kv_tokens_max=self._calibration.kv_tokens,
            partitions=self.partitions,
            draining=False,
            free_ms=free_ms([held.age_ms for held in running], slots=self.slots, held_ms=held_ms),
        )
