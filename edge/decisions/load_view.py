"""How long a request sent now would wait, and how saturated the workers are: what admission is told, since it looks at nothing that
is not in its log.

Rules:
  V1  A wait is that of the worker that would get the request: the owner of the run's partition for the model.
  V2  A worker with a free slot that nobody waits for starts at once. Else a request has a place, in tokens that start before it, and
      starts when as many slots are free: when the worker says, and from then on at its pace. The place is the one that the worker
      has played ahead (`turn_tokens`), for a newcomer or for the request's own account. Where it has none, what stands before it in
      its lane starts at the lane's share of the pace (`schemas/lane_shares.py`), which grows as other lanes run empty.
      A lane without a backlog takes what comes in it lately, and no more.
  V3  Requests count as the tokens that they are expected to use, not as those they may: the worker reports what its requests use.
  V4  What was queued after a report's view counts on top of it: runs queued lately, by any edge as far as it is seen, and those
      that this edge has sent and nobody decided yet. What was refused does not count. They move a place as they move the drain of
      the lanes; of other lanes only what is more, or less, than was expected to come. Time since the report is taken off.
      The background lane waits for all others: its wait is until they have run empty, then its own.
  V5  Where no worker of the model is alive, the wait is what another needs to take over, then as long as it has been so already.
  V6  Saturation is the time that all workers of a model together need for what waits, the largest of the models'; what waits in the
      background lane does not count, since it holds nobody up. It is measured, so it clears by itself; a model without any live
      worker says nothing as long as another has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Final

from schemas.events.accounts import LaneLimits, LaneWait, LoadView
from schemas.events.workers import LaneLoad, WorkerLoadReported
from schemas.lane_shares import LANES_IN_ORDER, paces, weight_of
from schemas.vocabulary import Lane

REPORT_AGE_MS_MAX: Final = 5_000
"""A worker that has said nothing for so long counts as gone."""
QUEUED_LAG_MS: Final = 40
"""About what a queued run needs until its worker has read its request and counts it."""
UNDECIDED_AGE_MS_MAX: Final = 10_000
NO_WORKER_WAIT_MS: Final = 3_000
"""About what it takes until a dead worker's partitions have another owner."""
TOKENS_A_REQUEST: Final = 300
USED_SHARE: Final = 0.5
"""Guesses until a worker has seen requests end."""
USED_SHARE_MIN: Final = 0.01
TOKENS_PER_S: Final = 100.0
TOKENS_PER_S_A_SLOT: Final = 25.0
"""Guess until a worker was seen full: each of its slots at the pace at which people read. What it made while little was asked of it says
too little, and would refuse people."""
TOKENS_PER_S_MIN: Final = 10.0
LAST_TOKENS_MIN: Final = 1.0
"""What a lane that goes last has in front of it at least: by it the others' backlog is waited for."""
TOKENS_NOTHING: Final = 1e-6
WAIT_MS_MAX: Final = 3_600_000
ERROR_WAIT_MS_MIN: Final = 1_000
"""A wait that was shorter counts as so long when an estimate's error is taken relative to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneFigures:
    """What a report says of a lane, in tokens as they are expected to be used (V3); `claimed_tokens` are what one request claims."""

    load: LaneLoad
    used_share: float
    used_tokens: float
    claimed_tokens: int
    queued: float
    coming: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSeen:
    """A worker's last report, and when the broker took it. The rest follows from the report, once for all prompts that ask."""

    report: WorkerLoadReported
    appended_ms: int
    rate: float = field(init=False)
    lanes: Mapping[Lane, LaneFigures] = field(init=False)
    work: float = field(init=False)
    """Tokens that hold up who comes next (V6)."""

    def __post_init__(self) -> None:
        report, lanes = self.report, {}
        for load in _lane_loads(report):
            share = used_share(report, load.lane)
            lanes[load.lane] = LaneFigures(
                load=load,
                used_share=share,
                used_tokens=used_tokens(report, load.lane),
                claimed_tokens=claimed_tokens(report, load.lane),
                queued=load.queued_tokens * share,
                coming=load.coming_tokens_per_s * share,
            )
        work = sum(figures.queued for lane, figures in lanes.items() if lane is not Lane.BACKGROUND)
        work -= max(0, report.slots - report.busy) * used_tokens(report)
        object.__setattr__(self, "rate", pace(report))
        object.__setattr__(self, "lanes", lanes)
        object.__setattr__(self, "work", work)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A run that no report may count yet: `queued` at `at_ms` (broker's clock), or sent by this edge then and not decided."""

    partition: int
    lane: Lane
    models: tuple[str, ...]
    at_ms: int
    queued: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    """The live workers of one model. `owned` are the partitions that have an owner, in order; `extra` counts by worker and lane what V4
    adds.
    """

    owners: Mapping[int, WorkerSeen]
    owned: Sequence[int]
    extra: Mapping[str, Mapping[Lane, int]]
    queued_requests: Mapping[Lane, int]
    queued_tokens: Mapping[Lane, int]
    saturation_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All live workers as of `at_ms`."""

    at_ms: int
    models: Mapping[str, ModelLoad] = field(default_factory=dict)


def live_workers(workers: Iterable[WorkerSeen], *, now_ms: int) -> tuple[WorkerSeen, ...]:
    """Those that report and take work. `now_ms` is the broker's clock."""
    return tuple(
        worker
        for worker in workers
        if now_ms - worker.appended_ms <= REPORT_AGE_MS_MAX and not worker.report.draining
    )


def still_counts(sent: Sent, *, now_ms: int) -> bool:
    """Whether some report may still lack it."""
    return now_ms - sent.at_ms <= (REPORT_AGE_MS_MAX if sent.queued else UNDECIDED_AGE_MS_MAX)


def is_counted(fleet: Fleet, sent: Sent) -> bool:
    """Whether a queued run stands in the report of its worker."""
    loads = (fleet.models.get(model) for model in sent.models)
    owners = [load.owners.get(sent.partition) if load is not None else None for load in loads]
    return all(owner is not None and _counted(sent, owner) for owner in owners)


def _counted(sent: Sent, owner: WorkerSeen) -> bool:
    return sent.queued and sent.at_ms <= owner.appended_ms - QUEUED_LAG_MS


def fleet_of(workers: Sequence[WorkerSeen], sent: Iterable[Sent], *, now_ms: int) -> Fleet:
    """What the live ones among the workers say together, with what was sent since."""
    by_model: dict[str, list[WorkerSeen]] = {}
    for worker in live_workers(workers, now_ms=now_ms):
        by_model.setdefault(worker.report.model, []).append(worker)
    recent = [one for one in sent if still_counts(one, now_ms=now_ms)]
    return Fleet(
        at_ms=now_ms,
        models={model: _model_load(model, found, recent) for model, found in by_model.items()},
    )


def _model_load(model: str, workers: list[WorkerSeen], sent: list[Sent]) -> ModelLoad:
    owners: dict[int, WorkerSeen] = {}
    for worker in workers:
        for partition in worker.report.partitions:
            other = owners.get(partition)
            if other is None or other.appended_ms < worker.appended_ms:
                owners[partition] = worker
    extra: dict[str, dict[Lane, int]] = {worker.report.worker_id: {} for worker in workers}
    for one in sent:
        owner = owners.get(one.partition) if model in one.models else None
        if owner is None or _counted(one, owner):
            continue
        added = extra[owner.report.worker_id]
        added[one.lane] = added.get(one.lane, 0) + 1
    requests, tokens = dict.fromkeys(Lane, 0), dict.fromkeys(Lane, 0)
    work = rate = 0.0
    for worker in workers:
        rate += worker.rate
        work += worker.work
        added = extra[worker.report.worker_id]
        for lane, figures in worker.lanes.items():
            more = added.get(lane, 0)
            requests[lane] += figures.load.queued_requests + more
            tokens[lane] += figures.load.queued_tokens + more * figures.claimed_tokens
            if more and lane is not Lane.BACKGROUND:
                work += more * figures.used_tokens
    return ModelLoad(
        owners=owners,
        owned=sorted(owners),
        extra=extra,
        queued_requests=requests,
        queued_tokens=tokens,
        saturation_ms=min(WAIT_MS_MAX, max(0, int(1000 * work / rate))),
    )


def with_sent(fleet: Fleet, *sent: Sent) -> Fleet:
    """The fleet with more runs on the way, so that of many that come at once each sees those before it."""
    models = dict(fleet.models)
    by_model: dict[str, list[tuple[WorkerSeen, Lane]]] = {}
    for one in sent:
        for model in one.models:
            load = models.get(model)
            owner = load.owners.get(one.partition) if load is not None else None
            if owner is not None and not _counted(one, owner):
                by_model.setdefault(model, []).append((owner, one.lane))
    for model, added in by_model.items():
        load = models[model]
        extra = dict(load.extra)
        requests, tokens = dict(load.queued_requests), dict(load.queued_tokens)
        for owner, lane in added:
            name = owner.report.worker_id
            extra[name] = {**extra[name], lane: extra[name].get(lane, 0) + 1}
            requests[lane] = requests.get(lane, 0) + 1
            tokens[lane] = tokens.get(lane, 0) + owner.lanes[lane].claimed_tokens
        models[model] = replace(load, extra=extra, queued_requests=requests, queued_tokens=tokens)
    return replace(fleet, models=models)


def pace(report: WorkerLoadReported) -> float:
    """Tokens of prompt and output per second that the worker makes when it is full, as far as it is known."""
    if report.full_tokens_per_s:
        return max(report.full_tokens_per_s, TOKENS_PER_S_MIN)
    return max(report.decode_tokens_per_s, TOKENS_PER_S, TOKENS_PER_S_A_SLOT * report.slots)


def used_share(report: WorkerLoadReported, lane: Lane) -> float:
    """What requests of the lane use of what they claim (V3)."""
    known = {load.lane: load.used_percent / 100 for load in report.lanes if load.used_percent}
    if lane in known:
        return known[lane]
    return sum(known.values()) / len(known) if known else USED_SHARE


def used_tokens(report: WorkerLoadReported, lane: Lane | None = None) -> float:
    """What one request of the lane (None: any) is expected to use."""
    known = {load.lane: load.used_tokens_mean for load in report.lanes if load.used_tokens_mean}
    if lane in known:
        return known[lane]
    return sum(known.values()) / len(known) if known else TOKENS_A_REQUEST


def claimed_tokens(report: WorkerLoadReported, lane: Lane) -> int:
    """What one request of the lane is expected to claim: a lane's bound counts what may be used."""
    return round(used_tokens(report, lane) / max(used_share(report, lane), USED_SHARE_MIN))


def _lane_loads(report: WorkerLoadReported) -> Sequence[LaneLoad]:
    """By lane; a worker that does not say has it all in the first."""
    if report.lanes:
        return report.lanes
    whole = LaneLoad(
        lane=LANES_IN_ORDER[0],
        queued_requests=report.queued_requests,
        queued_tokens=report.queued_tokens,
        ahead_requests=report.queued_requests,
        ahead_tokens=report.queued_tokens,
    )
    return (whole, *(LaneLoad(lane=lane) for lane in LANES_IN_ORDER[1:]))


def wait_at(
    worker: WorkerSeen,
    lane: Lane,
    *,
    extra: Mapping[Lane, int],
    shares: Mapping[Lane, LaneLimits],
    now_ms: int,
    account_id: str | None = None,
) -> int:
    """V2 to V4: until a request of this account (None: of a new one), sent to this worker now, would start, in ms."""
    report = worker.report
    free = max(0, report.slots - report.busy)
    if report.queued_requests + sum(extra.values()) < free:
        return 0
    age_ms = max(0, now_ms - worker.appended_ms)
    rate = worker.rate
    mine, turn = _turn_of(worker, lane, account_id)
    waiting = {one: figures.queued for one, figures in worker.lanes.items()}
    coming = {one: figures.coming for one, figures in worker.lanes.items()}
    came = {one: extra.get(one, 0) * figures.used_tokens for one, figures in worker.lanes.items()}

    def before(ahead: float, queued: Mapping[Lane, float]) -> float:
        if not weight_of(lane, shares):
            ahead = max(ahead, LAST_TOKENS_MIN)
        return rate * drain_s_of(ahead, lane, queued, coming=coming, shares=shares, rate=rate)

    # Those that were expected to come by now to the other lanes are counted in what is coming.
    queued = {
        one: max(0.0, tokens + came[one] - (coming[one] * age_ms / 1000 if one is not lane else 0))
        for one, tokens in waiting.items()
    }
    ahead = mine + (came[lane] if report.lanes else sum(came.values()))
    tokens = before(max(0.0, ahead - free * used_tokens(report)), queued)
    if turn is not None:
        tokens = max(0.0, turn + tokens - before(mine, waiting))
    return min(WAIT_MS_MAX, max(0, int(free_after_ms(report, tokens) - age_ms)))


def _turn_of(worker: WorkerSeen, lane: Lane, account_id: str | None) -> tuple[float, int | None]:
    """Tokens of its lane that start before the account's next request, and of all lanes if the worker says so."""
    if not worker.report.lanes:
        return worker.report.queued_tokens * used_share(worker.report, lane), None
    figures = worker.lanes.get(lane)
    if figures is None:
        return 0.0, None
    ahead = figures.load.ahead_tokens * figures.used_share
    for account in figures.load.accounts:
        if account.account_id == account_id:
            return max(ahead, account.ahead_tokens), account.turn_tokens
    return ahead, figures.load.turn_tokens


def free_after_ms(report: WorkerLoadReported, tokens: float) -> float:
    """When a slot is free for who comes after so many tokens of others, in ms from the report on."""
    one = used_tokens(report)
    one_ms = 1000 * one / pace(report)
    place = 1 + tokens / one
    if not report.free_ms:
        return place * one_ms
    place += max(0, report.slots - report.busy)
    known = [(2.0**power, float(ms)) for power, ms in enumerate(report.free_ms)]
    for (before, before_ms), (after, after_ms) in pairwise(known):
        if place <= after:
            return before_ms + (place - before) / (after - before) * (after_ms - before_ms)
    last, last_ms = known[-1]
    return last_ms + (place - last) * one_ms


def drain_s_of(
    ahead: float,
    lane: Lane,
    queued: Mapping[Lane, float],
    *,
    coming: Mapping[Lane, float],
    shares: Mapping[Lane, LaneLimits],
    rate: float,
) -> float:
    """Seconds until so many tokens of the lane have started, while others have `queued` tokens to start too, and more are `coming`."""
    left = {one: tokens for one, tokens in queued.items() if one is not lane and tokens > 0}
    passed_s = 0.0
    while ahead > 0:
        wanted = {**coming, **dict.fromkeys((lane, *left), inf)}
        given = paces(wanted, rate=rate, shares=shares)
        step_s = ahead / given[lane] if given[lane] > 0 else WAIT_MS_MAX / 1000
        # Or until the first of the others has caught up.
        net = {one: given[one] - coming.get(one, 0.0) for one in left}
        step_s = min([step_s, *(left[one] / net[one] for one in left if net[one] > 0)])
        passed_s += step_s
        ahead -= given[lane] * step_s
        left = {one: tokens - net[one] * step_s for one, tokens in left.items()}
        left = {one: tokens for one, tokens in left.items() if tokens > TOKENS_NOTHING}
        if ahead <= TOKENS_NOTHING or passed_s >= WAIT_MS_MAX / 1000:
            break
    return passed_s


def load_view(
    fleet: Fleet,
    models: Sequence[str],
    partition: int,
    *,
    shares: Mapping[Lane, LaneLimits],
    absent_ms: Mapping[str, int],
    pressure: int,
    account_id: str | None = None,
    lanes: Sequence[Lane] = tuple(Lane),
) -> LoadView:
    """What admission is told of a run of these lanes on this partition. `absent_ms`: for how long a model has had no live worker (V5)."""
    waits: list[LaneWait] = []
    for model in models:
        load = fleet.models.get(model)
        owner = load.owners.get(partition) if load is not None else None
        for lane in lanes:
            if load is None or owner is None:
                wait_ms = max(NO_WORKER_WAIT_MS, absent_ms.get(model, 0))
            else:
                extra = load.extra[owner.report.worker_id]
                wait_ms = wait_at(
                    owner,
                    lane,
                    extra=extra,
                    shares=shares,
                    now_ms=fleet.at_ms,
                    account_id=account_id,
                )
            waits.append(
                LaneWait(
                    model=model,
                    lane=lane.value,
                    wait_ms=min(wait_ms, WAIT_MS_MAX),
                    queued_requests=load.queued_requests.get(lane, 0) if load is not None else 0,
                    queued_tokens=load.queued_tokens.get(lane, 0) if load is not None else 0,
                )
            )
    saturation = saturation_ms(fleet)
    if saturation is None:
        saturation = min((wait.wait_ms for wait in waits), default=0)
    return LoadView(pressure=pressure, waits=tuple(waits), saturation_ms=saturation)


def saturation_ms(fleet: Fleet) -> int | None:
    """V6. None: no worker is alive."""
    return max((load.saturation_ms for load in fleet.models.values()), default=None)


def wait_error(*, estimated_ms: int, waited_ms: int) -> float:
    """How wrong an estimate was, relative to the wait: 0.25 is a quarter too long or too short."""
    return abs(estimated_ms - waited_ms) / max(waited_ms, ERROR_WAIT_MS_MIN)
