"""When whose turn comes: a worker's schedule played ahead, with those who wait, those who run, and those who are likely to come.

Rules:
  T1  The order is the schedule's own (`lanes.py`), on a copy. Nothing real is touched.
  T2  Requests use what those of their lane use of their claims. They hold a slot as long as one that ended lately, drawn by chance; who
      runs already as long as one that was not faster.
  T3  Those who come are those who came lately, drawn by chance, at the pace at which they come.
  T4  A newcomer of each lane, and a next request of the accounts asked for, wait from now on and use nothing. What starts before each
      is the answer: the middle one of FUTURES plays, for the mean of a few is as crooked as the futures are. Who has not started
      after STARTS_MAX others has no answer.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf, log
from operator import itemgetter
from statistics import median_low
from typing import Final, TypeVar

from inference_workers.decisions.lanes import Claim, FairLanes
from schemas.vocabulary import Lane

FUTURES: Final = 3
STARTS_MAX: Final = 128
COMERS_MAX: Final = 256
"""Of a play. Together with STARTS_MAX it bounds the time that a report takes."""
ROOM_TOKENS: Final = 10**9
"""Whether it fits into the engine's memory is not looked at."""

Some = TypeVar("Some")
Draw = Callable[[], float]
"""Chance: from 0 on, below 1."""
Asked = tuple[Lane, str | None]
"""An account's next request, or (None) a newcomer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A request that has had its slot for so long."""

    claim: Claim
    age_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Those who come to a lane: accounts and what they claim, one each `gap_ms`."""

    recent: Sequence[tuple[str, int]]
    gap_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What was seen lately. `held_ms` is sorted: for how long requests held a slot. `used_shares` are of what requests claim."""

    held_ms: Sequence[int]
    used_shares: Mapping[Lane, float]
    flows: Mapping[Lane, Flow]


def turns(
    lanes: FairLanes,
    running: Sequence[Held],
    *,
    habits: Habits,
    asked: Sequence[Asked],
    draw: Draw,
) -> dict[Asked, int]:
    """The tokens of all lanes that start before each. Every slot is taken now. May take some milliseconds."""
    plays = [_play(lanes, running, habits, asked, draw) for _ in range(FUTURES)]
    middle = {one: median_low([play.get(one, inf) for play in plays]) for one in asked}
    return {one: int(tokens) for one, tokens in middle.items() if tokens < inf}


def _play(
    lanes: FairLanes,
    running: Sequence[Held],
    habits: Habits,
    asked: Sequence[Asked],
    draw: Draw,
) -> dict[Asked, int]:
    ahead = lanes.copy()
    probes: dict[str, Asked] = {}
    for number, one in enumerate(asked):
        lane, account_id = one
        name = f"asked {number}"
        probes[name] = one
        ahead.wait(Claim(run_id=name, account_id=account_id or name, lane=lane, tokens=1))
    uses = {claim.run_id: _used(claim, habits) for claim in ahead}
    uses.update((held.claim.run_id, _used(held.claim, habits)) for held in running)
    ends = [(_rest_ms(held.age_ms, habits, draw), held.claim.run_id) for held in running]
    heapq.heapify(ends)
    coming = _coming(habits, draw)
    come_ms, comes = next(coming)
    found: dict[Asked, int] = {}
    before = 0
    for _ in range(STARTS_MAX):
        now_ms, run_id = heapq.heappop(ends)
        while come_ms <= now_ms and comes is not None:
            uses[comes.run_id] = _used(comes, habits)
            ahead.wait(comes)
            come_ms, comes = next(coming)
        ahead.finish(run_id, used_tokens=uses[run_id])
        while (started := ahead.take(room_tokens=ROOM_TOKENS)) in probes:
            found[probes.pop(started)] = before
            ahead.finish(started, used_tokens=0)
        if started is None or not probes:
            break
        before += uses[started]
        heapq.heappush(ends, (now_ms + _drawn(habits.held_ms, draw), started))
    return found


def _used(claim: Claim, habits: Habits) -> int:
    return max(1, round(habits.used_shares[claim.lane] * claim.tokens))


def _rest_ms(age_ms: int, habits: Habits, draw: Draw) -> float:
    longer = habits.held_ms[bisect_right(habits.held_ms, age_ms) :]
    return _drawn(longer, draw) - age_ms if longer else age_ms / 2


def _drawn(some: Sequence[Some], draw: Draw) -> Some:
    return some[int(draw() * len(some))]


def _coming(habits: Habits, draw: Draw) -> Iterator[tuple[float, Claim | None]]:
    """T3; then nobody in an infinite time."""
    flows = (_arrivals(lane, flow, draw) for lane, flow in habits.flows.items())
    yield from islice(heapq.merge(*flows, key=itemgetter(0)), COMERS_MAX)
    yield inf, None


def _arrivals(lane: Lane, flow: Flow, draw: Draw) -> Iterator[tuple[float, Claim]]:
    at_ms, number = 0.0, 0
    while True:
        at_ms -= flow.gap_ms * log(1 - draw())
        number += 1
        account_id, tokens = _drawn(flow.recent, draw)
        yield (
            at_ms,
            Claim(run_id=f"comes {lane} {number}", account_id=account_id, lane=lane, tokens=tokens),
        )
