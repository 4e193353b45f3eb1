"""Which of the requests that wait for this worker starts next.

What is shared is tokens, not turns: a request claims its prompt and what its answer may still have, is charged for that when it starts,
and gets back what it did not use. Two levels: lanes share the worker, and the accounts of a lane share the lane.

Laws (cited by assertions and tests; *waits* means: within its lane's look-ahead):
  K1  Work-conserving: while anybody waits, a free slot takes somebody. The one exception: who is next and does not fit into the
      engine's memory is waited for, since small ones that slip by would keep a large one waiting for ever.
  K2  Who was started before (a lost attempt, a takeover from another worker) goes first of all, in order of arrival, and is not
      charged twice here: it keeps its place instead of claiming the worker anew. K3 to K5 speak of the others.
  K3  Floor: a lane with a floor that always waits gets at least that share of the tokens, less FLOOR_SLACK_CLAIMS of the largest
      claims. A floor that is not claimed is used by the others, and nobody saves it up.
  K4  What floors leave is shared by weight, also with the lanes that have one: of two lanes that always wait, what they get so
      differs, by weight, by at most one largest claim of each. The background lane, and a lane of weight 0, goes only where
      no other waits, apart from its floor.
  K5  Of two accounts that always wait since both were new to the lane, the tokens differ by at most one largest claim of each,
      whatever the number and size of their requests. Within an account, who came first goes first.
  K6  Nobody starves: who comes later begins at the lane's *virtual time*, which rises with every token used in the lane, shared
      among the accounts that wait. So an account that had much waits until the others had as much, and not longer, though
      new accounts come for ever.
  K7  Look-ahead: of a lane only the first `look_ahead_requests` that came are looked at; the rest keep their order behind them. So one
      account's flood can hide what came behind it, up to the open runs that admission lets it have.
  K8  A lane where nobody waits and nothing runs forgets who used what.

Tokens in flight count as claimed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from schemas.events.accounts import LaneLimits
from schemas.lane_shares import DEFAULT_SHARES, LANES_IN_ORDER, floors_of, weight_of
from schemas.vocabulary import Lane

FLOOR_SLACK_CLAIMS: Final = len(LANES_IN_ORDER)
ACCOUNTS_REMEMBERED_MAX: Final = 10_000
ACCOUNT_LINES_MAX: Final = 64
"""Twice as many as have a backlog at a worker of the full fleet: who is left out is told the wait of a newcomer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A request that could start. `tokens` (>= 1): its prompt and what its answer may still have. `resumed`: see K2."""

    run_id: str
    account_id: str
    lane: Lane
    tokens: int
    resumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneQueue:
    """What waits in a lane. `ahead_requests` and `ahead_tokens` would start before a first request of an account that is new to it."""

    requests: int
    tokens: int
    accounts: int
    ahead_requests: int
    ahead_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountLine:
    """About what starts in the lane before the next request of an account, if as many accounts go on to wait there."""

    account_id: str
    ahead_tokens: int


class _By(StrEnum):
    """By which right a claim was started: its lane's floor or weight, or K2."""

    FLOOR = "floor"
    WEIGHT = "weight"
    PLACE = "place"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """A claim with its place. `by` is None until it was started here."""

    claim: Claim
    arrival: int
    by: _By | None = None


@dataclass(slots=True, kw_only=True)
class _LaneState:
    tag: float = 0.0
    """Tokens by weight; the smallest goes next (K4)."""
    owed: float = 0.0
    """Tokens by which its floor is behind (K3)."""
    virtual: float = 0.0
    """Tokens that an account had which always waited (K6)."""
    accounts: dict[str, dict[str, _Placed]] = field(default_factory=dict)
    account_tags: dict[str, float] = field(default_factory=dict)
    """Tokens that an account had, from the virtual time on at which it came (K5, K6)."""
    beyond: dict[str, _Placed] = field(default_factory=dict)
    looked_at: int = 0
    held: dict[str, int] = field(default_factory=dict)
    """Started and not finished requests of each account."""


class FairLanes:
    """All requests of one worker that could start or have a slot. Holds no clock and does no I/O."""

    def __init__(self, shares: Mapping[Lane, LaneLimits] = DEFAULT_SHARES) -> None:
        self._shares = dict(shares)
        self._floors = floors_of(shares)
        self._lanes = {lane: _LaneState() for lane in LANES_IN_ORDER}
        self._resumed: dict[str, _Placed] = {}
        self._held: dict[str, _Placed] = {}
        self._waiting: dict[str, _Placed] = {}
        self._arrivals = 0
        self._virtual = 0.0

    def copy(self) -> FairLanes:
        """Another one that stands where this one stands."""
        other = FairLanes(self._shares)
        for lane, state in self._lanes.items():
            other._lanes[lane] = replace(
                state,
                accounts={account_id: dict(queue) for account_id, queue in state.accounts.items()},
                account_tags=dict(state.account_tags),
                beyond=dict(state.beyond),
                held=dict(state.held),
            )
        other._resumed = dict(self._resumed)
        other._held = dict(self._held)
        other._waiting = dict(self._waiting)
        other._arrivals = self._arrivals
        other._virtual = self._virtual
        return other

    def change_shares(self, shares: Mapping[Lane, LaneLimits]) -> None:
        """Other weights, floors and look-aheads from now on."""
        self._shares = dict(shares)
        self._floors = floors_of(shares)
        for lane in LANES_IN_ORDER:
            self._look_ahead(lane)

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def __contains__(self, run_id: str) -> bool:
        """Whether it waits."""
        return run_id in self._waiting

    def __iter__(self) -> Iterator[Claim]:
        """Those that wait."""
        return (placed.claim for placed in self._waiting.values())

    def held(self, run_id: str) -> Claim:
        """The claim of one that has a slot."""
        return self._held[run_id].claim

    def wait(self, claim: Claim) -> None:
        """It could start from now on."""
        assert claim.tokens >= 1, "a claim has a token"
        assert claim.run_id not in self._waiting, "a run waits once"
        assert claim.run_id not in self._held, "what has a slot does not wait"
        self._arrivals += 1
        self._place(_Placed(claim=claim, arrival=self._arrivals), resumed=claim.resumed)

    def put_back(self, run_id: str) -> None:
        """It lost its slot and could start again: K2."""
        placed = self._held.pop(run_id)
        self._let_go(placed)
        self._place(placed, resumed=True)

    def withdraw(self, run_id: str) -> None:
        """It waits no more: it ended, or is another worker's now."""
        placed = self._waiting.pop(run_id, None)
        if placed is None:
            return
        if self._resumed.pop(run_id, None) is None:
            self._remove(placed)
        self._forget_if_idle(placed.claim.lane)

    def take(self, *, room_tokens: int) -> str | None:
        """The run that starts now; it has a slot until `finish` or `put_back`. None: nobody waits, or the next does not fit (K1)."""
        if self._resumed:
            placed = min(self._resumed.values(), key=lambda placed: placed.arrival)
            if placed.claim.tokens > room_tokens:
                return None
            self._start(placed, _By.PLACE)  # K2
            return placed.claim.run_id
        behind = [lane for lane in self._floors if self._owed(lane) > 0]
        if behind:
            lane, by = max(behind, key=self._owed), _By.FLOOR  # K3
        else:
            found = self._next_by_weight()
            if found is None:
                return None
            lane, by = found, _By.WEIGHT
        placed = self._next_in(lane)
        if placed.claim.tokens > room_tokens:
            return None
        self._count_for_floors(placed.claim, by)
        self._start(placed, by)
        return placed.claim.run_id

    def finish(self, run_id: str, *, used_tokens: int) -> None:
        """Its slot is free for good, and it used so much of its claim."""
        placed = self._held.pop(run_id)
        claim = placed.claim
        state = self._lanes[claim.lane]
        self._give_back(placed, max(0, claim.tokens - used_tokens))
        state.virtual += max(0, used_tokens) / max(1, len(state.accounts))  # K6
        self._let_go(placed)
        self._forget_if_idle(claim.lane)

    def lines(self, lane: Lane, *, used_share: float) -> list[AccountLine]:
        """Accounts that have to wait for more than a newcomer, those with most first; ACCOUNT_LINES_MAX at most.

        Claims count as `used_share` of them. Takes time in proportion to what waits.
        """
        state = self._lanes[lane]
        tags = dict(state.account_tags)
        for placed in self._held.values():
            claim = placed.claim
            if claim.lane is lane and claim.account_id in tags:
                tags[claim.account_id] -= (1 - used_share) * claim.tokens
        for placed in self._waiting.values():
            claim = placed.claim
            if claim.lane is lane:
                tag = tags.get(claim.account_id, state.virtual)
                tags[claim.account_id] = max(tag, state.virtual) + used_share * claim.tokens
        count = len(state.accounts)
        found = [
            AccountLine(
                account_id=account_id,
                ahead_tokens=round(
                    (tag - state.virtual) * (count + (account_id not in state.accounts))
                ),
            )
            for account_id, tag in tags.items()
            if tag > state.virtual
        ]
        found.sort(key=lambda line: -line.ahead_tokens)
        return found[:ACCOUNT_LINES_MAX]

    def queue(self, lane: Lane) -> LaneQueue:
        """What waits there. Takes time in proportion to it."""
        state = self._lanes[lane]
        waiting = [p.claim for p in self._waiting.values() if p.claim.lane is lane]
        first = [p.claim.tokens for p in self._resumed.values() if p.claim.lane is lane]
        for account_id, placed in state.accounts.items():
            tag = state.account_tags[account_id]
            for one in placed.values():
                if tag > state.virtual:
                    break
                first.append(one.claim.tokens)
                tag += one.claim.tokens
        first += [placed.claim.tokens for placed in state.beyond.values()]
        return LaneQueue(
            requests=len(waiting),
            tokens=sum(claim.tokens for claim in waiting),
            accounts=len({claim.account_id for claim in waiting}),
            ahead_requests=len(first),
            ahead_tokens=sum(first),
        )

    def _next_by_weight(self) -> Lane | None:
        """K4."""
        waiting = [lane for lane in LANES_IN_ORDER if self._lanes[lane].accounts]
        weighted = [lane for lane in waiting if self._weight(lane)]
        if weighted:
            return min(weighted, key=lambda lane: self._lanes[lane].tag)
        return waiting[0] if waiting else None

    def _next_in(self, lane: Lane) -> _Placed:
        """K5: the first request of the account that had least."""
        state = self._lanes[lane]
        tags = state.account_tags

        def had(account_id: str) -> tuple[float, int]:
            first = next(iter(state.accounts[account_id].values()))
            return tags[account_id], first.arrival

        return next(iter(state.accounts[min(state.accounts, key=had)].values()))

    def _start(self, placed: _Placed, by: _By) -> None:
        claim = placed.claim
        state = self._lanes[claim.lane]
        del self._waiting[claim.run_id]
        if self._resumed.pop(claim.run_id, None) is None:
            self._remove(placed)
        if placed.by is None:
            placed = replace(placed, by=by)
            tags = state.account_tags
            tags[claim.account_id] = tags.get(claim.account_id, state.virtual) + claim.tokens
            if by is _By.WEIGHT and self._weight(claim.lane):
                self._virtual = state.tag
                state.tag += claim.tokens / self._weight(claim.lane)
        self._held[claim.run_id] = placed
        state.held[claim.account_id] = state.held.get(claim.account_id, 0) + 1

    def _give_back(self, placed: _Placed, unused: int) -> None:
        claim = placed.claim
        state = self._lanes[claim.lane]
        if claim.account_id in state.account_tags:
            state.account_tags[claim.account_id] -= unused
        if placed.by is _By.WEIGHT and self._weight(claim.lane):
            state.tag -= unused / self._weight(claim.lane)
        if placed.by is _By.PLACE:
            return
        for lane, floor in self._floors.items():
            other = self._lanes[lane]
            mine = unused if lane is claim.lane and placed.by is _By.FLOOR else 0
            # What was started before the lane waited was never owed to it, so there is a limit to what it loses.
            other.owed = max(other.owed + mine - floor * unused, min(other.owed, -claim.tokens))

    def _count_for_floors(self, claim: Claim, by: _By) -> None:
        """K3: each floor's share of what starts is owed to its lane while somebody waits there."""
        for lane, floor in self._floors.items():
            state = self._lanes[lane]
            if state.accounts:
                state.owed += floor * claim.tokens
            if lane is claim.lane and by is _By.FLOOR:
                state.owed -= claim.tokens

    def _owed(self, lane: Lane) -> float:
        state = self._lanes[lane]
        return state.owed if state.accounts else 0.0

    def _weight(self, lane: Lane) -> int:
        return weight_of(lane, self._shares)

    def _place(self, placed: _Placed, *, resumed: bool) -> None:
        run_id = placed.claim.run_id
        self._waiting[run_id] = placed
        if resumed:
            self._resumed[run_id] = placed
            return
        lane = placed.claim.lane
        state = self._lanes[lane]
        if not state.accounts:
            state.tag = max(state.tag, self._virtual)
            state.owed = min(
                state.owed, 0.0
            )  # What was not claimed is gone; what was had too early is not.
        state.beyond[run_id] = placed
        self._look_ahead(lane)

    def _look_ahead(self, lane: Lane) -> None:
        """K7: look at as many as we may, in order of arrival."""
        state, share = self._lanes[lane], self._shares.get(lane, LaneLimits())
        while state.beyond and state.looked_at < max(1, share.look_ahead_requests):
            run_id = next(iter(state.beyond))
            self._look_at(lane, state.beyond.pop(run_id))

    def _look_at(self, lane: Lane, placed: _Placed) -> None:
        state, claim = self._lanes[lane], placed.claim
        if claim.account_id not in state.accounts:
            had = state.account_tags.get(claim.account_id, 0.0)
            state.account_tags[claim.account_id] = max(had, state.virtual)  # K6
            state.accounts[claim.account_id] = {}
        state.accounts[claim.account_id][claim.run_id] = placed
        state.looked_at += 1

    def _remove(self, placed: _Placed) -> None:
        claim = placed.claim
        state = self._lanes[claim.lane]
        if state.beyond.pop(claim.run_id, None) is not None:
            return
        queue = state.accounts[claim.account_id]
        del queue[claim.run_id]
        if not queue:
            del state.accounts[claim.account_id]
        state.looked_at -= 1
        self._look_ahead(claim.lane)

    def _let_go(self, placed: _Placed) -> None:
        claim = placed.claim
        held = self._lanes[claim.lane].held
        held[claim.account_id] -= 1
        if not held[claim.account_id]:
            del held[claim.account_id]

    def _forget_if_idle(self, lane: Lane) -> None:
        state = self._lanes[lane]
        idle = not state.accounts and not state.held and not state.beyond
        if idle and not any(placed.claim.lane is lane for placed in self._resumed.values()):
            state.account_tags.clear()  # K8
            state.virtual = 0.0
        if len(state.account_tags) > ACCOUNTS_REMEMBERED_MAX:
            quiet = [a for a in state.account_tags if a not in state.accounts | state.held]
            least = sorted(quiet, key=state.account_tags.__getitem__)
            for account_id in least[: len(least) // 2 + 1]:
                del state.account_tags[account_id]
