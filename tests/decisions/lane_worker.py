"""A worker in virtual time: the real scheduling, and an engine whose slots each make tokens at a constant pace."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from random import Random

from inference_workers.decisions.lanes import Claim, FairLanes
from inference_workers.decisions.turns import Held
from inference_workers.engine import EngineLoad
from inference_workers.load_report import LaneUse, Rates, load_report
from inference_workers.outlook import SlotTimes, free_ms, lane_loads
from schemas.events.accounts import LaneLimits
from schemas.events.workers import WorkerLoadReported
from schemas.lane_shares import DEFAULT_SHARES
from schemas.vocabulary import Lane


@dataclass(slots=True, kw_only=True)
class Job:
    """A request: what it claims, what it will use (its prompt, and what it says), when it came and started (ms)."""

    claim: Claim
    used: int
    prompt: int = 0
    came_ms: float
    started_ms: float | None = None
    estimate_ms: int = 0


@dataclass(slots=True, kw_only=True)
class LaneWorker:
    """`tokens_per_s` are said in all when every slot is busy, `prompt_tokens_per_s` read by one slot before."""

    slots: int
    tokens_per_s: float
    prompt_tokens_per_s: float = inf
    name: str = "w"
    partitions: tuple[int, ...] = (0,)
    shares: Mapping[Lane, LaneLimits] = field(default_factory=lambda: dict(DEFAULT_SHARES))
    now_ms: float = 0.0
    lanes: FairLanes = field(init=False)
    jobs: dict[str, Job] = field(default_factory=dict)
    running: list[tuple[float, str]] = field(default_factory=list)
    started: list[Job] = field(default_factory=list)
    rates: Rates = field(default_factory=Rates)
    times: SlotTimes = field(default_factory=SlotTimes)
    use: LaneUse = field(default_factory=LaneUse)
    done_tokens: int = 0
    read_tokens: int = 0
    full_since_report: bool = False
    rng: Random = field(default_factory=lambda: Random(1))

    def __post_init__(self) -> None:
        self.lanes = FairLanes(self.shares)

    def come(self, job: Job) -> None:
        self.jobs[job.claim.run_id] = job
        self.use.came(job.claim)
        self.lanes.wait(job.claim)
        self._fill()

    def until(self, now_ms: float) -> list[str]:
        """Work until then. The runs that ended."""
        ended: list[str] = []
        while self.running and self.running[0][0] <= now_ms:
            self.now_ms, run_id = heapq.heappop(self.running)
            ended.append(run_id)
            job = self.jobs.pop(run_id)
            self.lanes.finish(run_id, used_tokens=job.used)
            self.use.ended(job.claim.lane, claimed=job.claim.tokens, used=job.used)
            assert job.started_ms is not None
            self.times.freed(round(self.now_ms - job.started_ms), used_tokens=job.used)
            self.done_tokens += job.used - job.prompt
            self._fill()
        self.now_ms = now_ms
        return ended

    @property
    def next_end_ms(self) -> float:
        """When the next answer ends."""
        return self.running[0][0] if self.running else inf

    def take_started(self) -> list[Job]:
        """Those that started since this was asked last."""
        started, self.started = self.started, []
        return started

    def takes_ms(self, job: Job) -> float:
        """How long a job holds its slot."""
        read_ms = 1000 * job.prompt / self.prompt_tokens_per_s
        return read_ms + self.say_ms(job.used - job.prompt)

    def say_ms(self, tokens: float) -> float:
        """How long a slot needs to say so many."""
        return 1000 * tokens * self.slots / self.tokens_per_s

    def said(self, job: Job) -> float:
        """Tokens that a running one has said until now."""
        assert job.started_ms is not None
        said_ms = self.now_ms - job.started_ms - 1000 * job.prompt / self.prompt_tokens_per_s
        return min(max(0.0, said_ms / self.say_ms(1)), job.used - job.prompt)

    def _fill(self) -> None:
        while len(self.running) < self.slots:
            run_id = self.lanes.take(room_tokens=10**9)
            if run_id is None:
                self.full_since_report = False
                return
            job = self.jobs[run_id]
            job.started_ms = self.now_ms
            self.read_tokens += job.prompt
            self.started.append(job)
            heapq.heappush(self.running, (self.now_ms + self.takes_ms(job), run_id))

    def report(self) -> WorkerLoadReported:
        """The report of a second."""
        said = sum(self.said(self.jobs[run_id]) for _, run_id in self.running)
        self.rates.measure(
            EngineLoad(
                slots=self.slots,
                busy=len(self.running),
                releasing=0,
                generated_tokens_total=round(self.done_tokens + said),
                prompt_tokens_total=self.read_tokens,
                progress_age_ms=0,
                kv_tokens=0,
            ),
            full=self.full_since_report,
            elapsed_s=1,
        )
        self.use.second(elapsed_s=1)
        self.full_since_report = len(self.running) == self.slots
        running = [
            Held(claim=job.claim, age_ms=round(self.now_ms - (job.started_ms or 0.0)))
            for job in (self.jobs[run_id] for _, run_id in self.running)
        ]
        held_ms = self.times.held_ms(slots=self.slots, full_tokens_per_s=self.rates.full)
        return load_report(
            worker_id=self.name,
            model="m",
            epoch=1,
            slots=self.slots,
            busy=len(self.running),
            lanes=lane_loads(
                self.lanes,
                running=running,
                slots=self.slots,
                outside=(),
                use=self.use,
                held_ms=held_ms,
                draw=self.rng.random,
            ),
            rates=self.rates,
            kv_tokens=0,
            kv_tokens_max=1,
            partitions=self.partitions,
            draining=False,
            free_ms=free_ms([held.age_ms for held in running], slots=self.slots, held_ms=held_ms),
        )
