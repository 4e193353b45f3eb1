"""How wrong the estimated waits are, by pattern of load: edges and workers in virtual time, with the real decisions of both.

`python -m tests.decisions.wait_errors [--floor] [--lanes] [PATTERN …]` prints a table. With --floor also the error of one who knows the
worker's whole queue, what it has said so far and how requests are distributed, but neither how long answers get nor who comes next:
nobody can do much better.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from statistics import median, quantiles

from edge.decisions.load_view import wait_error
from edge.soft_views import BrokerClock, Workers
from inference_workers.decisions.lanes import Claim
from schemas.lane_shares import DEFAULT_SHARES
from schemas.vocabulary import Lane
from tests.decisions.lane_worker import Job, LaneWorker

LANES = (Lane.TEAM, Lane.PLUS, Lane.FREE)
GRANT = 1_024
REQUEST_LAG_MS = 15
"""From a run's admission to its request at the worker."""
SEEN_LAG_MS = 10
"""From a record's append until an edge has folded it."""
LOOK_MS = 20
WARM_MS = 60_000
FUTURES = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """`load` is work that comes by work that can be done. Clients are refused above `wait_ms_max`."""

    load: float
    seconds: int
    slots: int = 8
    workers: int = 1
    edges: int = 1
    lengths: str = "middling"
    prompts: int = 150
    pace: float = 40.0
    lane_weights: tuple[int, int, int] = (3, 3, 4)
    accounts: int = 200
    heavy: float = 0.0
    """The part of a lane's requests that comes from one account in it."""
    burst_s: int = 0
    """Every so many seconds half of what comes in them comes at once."""
    report_lag_ms: int = 20
    wait_ms_max: int = 60_000
    seed: int = 1


PATTERNS = {
    "light": Pattern(load=0.5, seconds=600),
    "busy": Pattern(load=0.8, seconds=900),
    "just full": Pattern(load=1.0, seconds=900),
    "a little over": Pattern(load=1.1, seconds=900),
    "twice": Pattern(load=2.0, seconds=600),
    "bursts": Pattern(load=0.8, seconds=900, burst_s=20),
    "mostly free": Pattern(load=1.2, seconds=900, lane_weights=(1, 1, 8)),
    "mostly team": Pattern(load=1.2, seconds=900, lane_weights=(8, 1, 1)),
    "even lengths": Pattern(load=1.1, seconds=900, lengths="even"),
    "long tails": Pattern(load=1.1, seconds=900, lengths="long"),
    "one slot": Pattern(load=1.1, seconds=3_000, slots=1),
    "two slots": Pattern(load=1.1, seconds=2_000, slots=2),
    "32 slots": Pattern(load=1.1, seconds=400, slots=32),
    "32 slots, busy": Pattern(load=0.95, seconds=400, slots=32),
    "32 slots, twice": Pattern(load=2.0, seconds=200, slots=32),
    "heavy accounts": Pattern(load=1.2, seconds=900, heavy=0.5),
    "few accounts": Pattern(load=1.2, seconds=900, accounts=4),
    "five edges, late": Pattern(load=1.1, seconds=900, edges=5, report_lag_ms=800),
    "two workers": Pattern(load=1.1, seconds=600, workers=2, edges=2),
    "six workers": Pattern(load=1.1, seconds=300, workers=6, edges=3),
    "six workers, busy": Pattern(load=0.9, seconds=300, workers=6, edges=3),
    "big prompts": Pattern(load=1.1, seconds=900, prompts=1_500),
}


def length(rng: Random, kind: str) -> int:
    """Tokens that an answer says."""
    match kind:
        case "even":
            said = 200.0
        case "middling":
            said = rng.gauss(200, 80)
        case _:
            said = rng.lognormvariate(4.7, 1.0)
    return max(1, min(GRANT, int(said)))


def prompt_length(rng: Random, mean: int) -> int:
    return max(10, min(3_000, int(mean * rng.lognormvariate(-0.18, 0.6))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One run's wait: told, true, and as the one who knows all would have told it (None: not asked)."""

    lane: Lane
    estimated_ms: int
    waited_ms: int
    floor_ms: int | None = None


@dataclass(slots=True, kw_only=True)
class Scene:
    """One pattern under way."""

    pattern: Pattern
    floor_every: int = 0
    rng: Random = field(init=False)
    now_ms: float = 0.0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    number: int = 0
    workers: list[LaneWorker] = field(init=False)
    edges: list[Workers] = field(init=False)
    told: list[Told] = field(default_factory=list)
    waiting: dict[str, tuple[Job, int | None]] = field(default_factory=dict)
    refused: int = 0

    def __post_init__(self) -> None:
        pattern = self.pattern
        self.rng = Random(pattern.seed)
        self.workers = [
            LaneWorker(
                slots=pattern.slots,
                tokens_per_s=pattern.slots * pattern.pace,
                prompt_tokens_per_s=3_000,
                name=f"w{index}",
                partitions=(2 * index, 2 * index + 1),
            )
            for index in range(pattern.workers)
        ]
        self.edges = [
            Workers(
                BrokerClock(monotonic=lambda: self.now_ms / 1000, wall=lambda: self.now_ms / 1000)
            )
            for _ in range(pattern.edges)
        ]

    def at(self, ms: float, call: Callable[[], None]) -> None:
        self.number += 1
        heapq.heappush(self.events, (ms, self.number, call))

    def run(self) -> list[Told]:
        for index, worker in enumerate(self.workers):
            first = 1_000 * (index + 1) / len(self.workers)
            self.at(first, partial(self._report, worker))
            self.at(LOOK_MS, partial(self._look, worker))
        for ms in self.arrivals():
            self.at(ms, self._arrive)
        while self.events and self.now_ms < self.pattern.seconds * 1_000:
            self.now_ms, _, call = heapq.heappop(self.events)
            call()
        return self.told

    @property
    def gap_ms(self) -> float:
        """Between two requests on average, all workers together."""
        pattern, rng = self.pattern, Random(0)
        means = [
            1000 * prompt_length(rng, pattern.prompts) / 3_000
            + 1000 * length(rng, pattern.lengths) / pattern.pace
            for _ in range(2_000)
        ]
        slot_ms = sum(means) / len(means)
        return slot_ms / (pattern.load * pattern.slots * pattern.workers)

    def arrivals(self) -> Iterator[float]:
        pattern, gap_ms, at_ms = self.pattern, self.gap_ms, 0.0
        if not pattern.burst_s:
            while at_ms < pattern.seconds * 1_000:
                at_ms += self.rng.expovariate(1 / gap_ms)
                yield at_ms
            return
        for start_s in range(0, pattern.seconds, pattern.burst_s):
            many = int(1000 * pattern.burst_s / gap_ms)
            for index in range(many):
                within_ms = 500 if index % 2 else 1000 * pattern.burst_s
                yield 1000 * start_s + self.rng.uniform(0, within_ms)

    def request(self, rng: Random, came_ms: float, run_id: str) -> Job:
        pattern = self.pattern
        lane = rng.choices(LANES, pattern.lane_weights)[0]
        prompt, said = prompt_length(rng, pattern.prompts), length(rng, pattern.lengths)
        heavy = rng.random() < pattern.heavy
        return Job(
            claim=Claim(
                run_id=run_id,
                account_id=f"{lane}-{'heavy' if heavy else rng.randrange(pattern.accounts)}",
                lane=lane,
                tokens=prompt + GRANT,
            ),
            prompt=prompt,
            used=prompt + said,
            came_ms=came_ms,
        )

    def _arrive(self) -> None:
        run_id = f"run-{self.number}-{self.now_ms:.3f}"
        job = self.request(self.rng, self.now_ms, run_id)
        edge = self.rng.choice(self.edges)
        lane = job.claim.lane
        partition = edge.place(
            f"chat-{self.rng.randrange(100_000)}",
            partitions=2 * len(self.workers),
            models=["m"],
            lane=lane,
            shares=DEFAULT_SHARES,
            draws=(self.rng.randrange(1 << 20), self.rng.randrange(1 << 20)),
        )
        view = edge.load(["m"], partition, DEFAULT_SHARES, account_id=job.claim.account_id)
        job.estimate_ms = next(wait.wait_ms for wait in view.waits if wait.lane == lane.value)
        if job.estimate_ms > self.pattern.wait_ms_max:
            self.refused += 1
            return
        edge.sent(run_id, partition=partition, lane=lane, models=["m"])
        worker = self.workers[partition // 2]
        queued_ms = self.now_ms

        def seen() -> None:
            for each in self.edges:
                each.queued(run_id, partition=partition, lane=lane, model="m", at_ms=int(queued_ms))

        self.at(queued_ms + SEEN_LAG_MS, seen)
        self.at(queued_ms + REQUEST_LAG_MS, lambda: self._come(worker, job))

    def _come(self, worker: LaneWorker, job: Job) -> None:
        self._work(worker)
        floor_ms = None
        if self.floor_every and job.came_ms > WARM_MS and not self.number % self.floor_every:
            floor_ms = self._floor(worker, job)
        self.waiting[job.claim.run_id] = (job, floor_ms)
        worker.come(job)
        self._note_started(worker)

    def _look(self, worker: LaneWorker) -> None:
        self._work(worker)
        self.at(self.now_ms + LOOK_MS, lambda: self._look(worker))

    def _work(self, worker: LaneWorker) -> None:
        ended = worker.until(self.now_ms)
        self._note_started(worker)
        for run_id in ended:
            self.at(self.now_ms + SEEN_LAG_MS, partial(self._seen_end, run_id))

    def _seen_end(self, run_id: str) -> None:
        for edge in self.edges:
            edge.not_queued(run_id)

    def _report(self, worker: LaneWorker) -> None:
        self._work(worker)
        report, at_ms = worker.report(), self.now_ms

        def seen() -> None:
            for edge in self.edges:
                edge.note(report, int(at_ms))

        self.at(at_ms + self.pattern.report_lag_ms, seen)
        self.at(at_ms + 1_000, lambda: self._report(worker))

    def _note_started(self, worker: LaneWorker) -> None:
        for job in worker.take_started():
            _, floor_ms = self.waiting.pop(job.claim.run_id)
            assert job.started_ms is not None
            if job.came_ms > WARM_MS:
                self.told.append(
                    Told(
                        lane=job.claim.lane,
                        estimated_ms=job.estimate_ms,
                        waited_ms=int(job.started_ms - job.came_ms),
                        floor_ms=floor_ms,
                    )
                )

    def _floor(self, worker: LaneWorker, job: Job) -> int:
        """The median of many futures, each as likely as the other."""
        waits = sorted(self._future(deepcopy(worker), job, Random(seed)) for seed in range(FUTURES))
        return round(median(waits))

    def _future(self, worker: LaneWorker, job: Job, rng: Random) -> float:
        for waiting in worker.lanes:
            other = worker.jobs[waiting.run_id]
            other.used = other.prompt + length(rng, self.pattern.lengths)
        running = []
        for _, run_id in worker.running:
            other = worker.jobs[run_id]
            assert other.started_ms is not None
            said = worker.said(other)
            # One that says more than it has said already.
            whole = next(
                (more for _ in range(200) if (more := length(rng, self.pattern.lengths)) > said),
                int(said) + 1,
            )
            other.used = other.prompt + whole
            running.append((other.started_ms + worker.takes_ms(other), run_id))
        heapq.heapify(running)
        worker.running = running
        mine = replace(job, used=job.prompt + length(rng, self.pattern.lengths))
        worker.come(mine)
        at_ms, number = self.now_ms, 0
        gap_ms = self.gap_ms * len(self.workers)
        while mine.started_ms is None:
            at_ms += rng.expovariate(1 / gap_ms)
            worker.until(at_ms)
            number += 1
            if mine.started_ms is None:
                worker.come(self.request(rng, at_ms, f"future-{number}"))
        return mine.started_ms - job.came_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Of some estimates. `bias` is the sum of all by the sum of all waits, less 1."""

    runs: int
    median: float
    p90: float
    bias: float

    def __str__(self) -> str:
        return f"{self.runs:6}{self.median:8.0%}{self.p90:6.0%}{self.bias:+6.0%}"


def errors(waits: list[tuple[int, int]]) -> Errors | None:
    """Of estimates and waits, in ms. None: too few."""
    if len(waits) < 2:
        return None
    found = [wait_error(estimated_ms=told, waited_ms=waited) for told, waited in waits]
    return Errors(
        runs=len(waits),
        median=median(found),
        p90=quantiles(found, n=10)[-1],
        bias=sum(told for told, _ in waits) / max(1, sum(waited for _, waited in waits)) - 1,
    )


def main(arguments: list[str]) -> None:
    """Print the table."""
    names = [name for name in arguments if not name.startswith("--")] or list(PATTERNS)
    print(
        f"{'pattern':18} lane  wait p50    runs   error   p90  bias   floor: runs, error, p90, bias"
    )
    for name in names:
        scene = Scene(pattern=PATTERNS[name], floor_every=40 if "--floor" in arguments else 0)
        told = scene.run()
        for lane in (*((*LANES,) if "--lanes" in arguments else ()), None):
            of = [one for one in told if lane is None or one.lane is lane]
            best = [(one.floor_ms, one.waited_ms) for one in of if one.floor_ms is not None]
            waited_s = median(one.waited_ms for one in of) / 1000 if of else 0.0
            found = errors([(one.estimated_ms, one.waited_ms) for one in of])
            print(
                f"{name:18} {lane or 'all':5}{waited_s:7.2f} s  {found}   {errors(best) or ''}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
