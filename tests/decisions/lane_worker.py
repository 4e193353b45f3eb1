"""A worker in virtual time: the real scheduling, and an engine whose slots each make tokens at a constant pace."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from inference_workers.decisions.lanes import Claim, FairLanes
from inference_workers.engine import EngineLoad
from inference_workers.load_report import LaneUse, Rates, lane_load, load_report
from schemas.events.accounts import LaneLimits
from schemas.events.workers import WorkerLoadReported
from schemas.lane_shares import DEFAULT_SHARES
from schemas.vocabulary import Lane


@dataclass(slots=True, kw_only=True)
class Job:
    """A request: what it claims, what it will use, when it came and started (ms)."""

    claim: Claim
    used: int
    came_ms: float
    started_ms: float | None = None
    estimate_ms: int = 0


@dataclass(slots=True, kw_only=True)
class LaneWorker:
    """`tokens_per_s` in all when every slot is busy."""

    slots: int
    tokens_per_s: float
    shares: Mapping[Lane, LaneLimits] = field(default_factory=lambda: dict(DEFAULT_SHARES))
    now_ms: float = 0.0
    lanes: FairLanes = field(init=False)
    jobs: dict[str, Job] = field(default_factory=dict)
    running: list[tuple[float, str]] = field(default_factory=list)
    rates: Rates = field(default_factory=Rates)
    use: LaneUse = field(default_factory=LaneUse)
    done_tokens: int = 0
    full_since_report: bool = False

    def __post_init__(self) -> None:
        self.lanes = FairLanes(self.shares)

    def come(self, job: Job) -> None:
        self.jobs[job.claim.run_id] = job
        self.use.came(job.claim.lane, claimed=job.claim.tokens)
        self.lanes.wait(job.claim)
        self._fill()

    def until(self, now_ms: float) -> None:
        """Work until then."""
        while self.running and self.running[0][0] <= now_ms:
            self.now_ms, run_id = heapq.heappop(self.running)
            job = self.jobs[run_id]
            self.lanes.finish(run_id, used_tokens=job.used)
            self.use.ended(job.claim.lane, claimed=job.claim.tokens, used=job.used)
            self.done_tokens += job.used
            self._fill()
        self.now_ms = now_ms

    def _fill(self) -> None:
        while len(self.running) < self.slots:
            run_id = self.lanes.take(room_tokens=10**9)
            if run_id is None:
                self.full_since_report = False
                return
            job = self.jobs[run_id]
            job.started_ms = self.now_ms
            takes_ms = 1000 * job.used * self.slots / self.tokens_per_s
            heapq.heappush(self.running, (self.now_ms + takes_ms, run_id))

    def report(self) -> WorkerLoadReported:
        """The report of a second."""
        self.rates.measure(
            EngineLoad(
                slots=self.slots,
                busy=len(self.running),
                releasing=0,
                generated_tokens_total=self.done_tokens,
                prompt_tokens_total=0,
                progress_age_ms=0,
                kv_tokens=0,
            ),
            full=self.full_since_report,
            elapsed_s=1,
        )
        self.use.second(elapsed_s=1)
        self.full_since_report = len(self.running) == self.slots
        return load_report(
            worker_id="w",
            model="m",
            epoch=1,
            slots=self.slots,
            busy=len(self.running),
            lanes=tuple(
                lane_load(lane, self.lanes.queue(lane), others=[], use=self.use) for lane in Lane
            ),
            rates=self.rates,
            kv_tokens=0,
            kv_tokens_max=1,
            partitions=(0,),
            draining=False,
        )
