"""Which of a worker's requests may have a slot of its engine: from being read to being done.

Rules:
  W1  A request goes to its lane, to wait for a slot, only once its run is known to be queued and open where the tail stands.
  W2  A run whose attempt was lost rests before that, until: a time is over, that doubles from loss to loss; the last acknowledged
      record of the lost attempt has come by on the tail, which says who is right; and the group has taken something that was sent after
      the loss, which proves that the queue is still ours.
  W3  What rested goes back to its old place.
  W4  While an attempt of before still holds its slot its run waits for no other.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from inference_workers.decisions.lanes import Claim, FairLanes
from inference_workers.decisions.request_book import Request, RequestBook
from inference_workers.decisions.run_book import NEW, Absence, FollowedRun, RunBook

RETRY_AFTER_MS_MIN: Final = 50
RETRY_AFTER_MS_MAX: Final = 2_000


class FollowedPartition(Protocol):
    """What is asked of the tail of a partition."""

    @property
    def book(self) -> RunBook: ...

    @property
    def position(self) -> int: ...

    def find(self, run_id: str) -> FollowedRun | Absence: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rest:
    """W2."""

    lost_ms: int
    until_ms: int
    past_offset: int
    used_tokens: int


class WaitingRoom:
    """The requests of `requests` that have no slot. `claim_tokens_max` is the model's window: no request takes more of the engine."""

    def __init__(self, requests: RequestBook, *, claim_tokens_max: int) -> None:
        self.lanes = FairLanes()
        self._requests = requests
        self._claim_tokens_max = claim_tokens_max
        # When each was read whose run is not known yet to be queued and open.
        self._unknown: dict[str, int] = {}
        self._resting: dict[str, _Rest] = {}
        self._losses: dict[str, int] = {}
        self._engine_failures: dict[str, int] = {}
        self._member_ms = -1

    def __len__(self) -> int:
        return len(self._unknown) + len(self.lanes) + len(self._resting)

    @property
    def any_rests(self) -> bool:
        """Time alone may let one go on."""
        return bool(self._resting)

    @property
    def membership_in_doubt(self) -> bool:
        """An attempt was lost since the group last took something of ours."""
        return any(rest.lost_ms >= self._member_ms for rest in self._resting.values())

    def member_at(self, sent_ms: int) -> None:
        """The group counted us as a member when it answered what we sent at that time."""
        self._member_ms = max(self._member_ms, sent_ms)

    def came(self, request: Request, *, now_ms: int) -> Claim:
        """A request was read for a run that was not held. Gives what it may take."""
        self._unknown[request.run_id] = now_ms
        return self._claim_of(request)

    def outside(self) -> list[Claim]:
        """What those may take that are in no lane yet, or rest."""
        return [
            self._claim_of(self._request(run_id)) for run_id in (*self._unknown, *self._resting)
        ]

    def unknown_since(self, before_ms: int) -> list[Request]:
        """Requests read before then whose run is not known yet to be queued and open."""
        return [self._request(run_id) for run_id, at in self._unknown.items() if at < before_ms]

    def place(
        self, tails: Mapping[int, FollowedPartition], *, busy: Container[str], now_ms: int
    ) -> list[str]:
        """Let those go to their lanes that may (W1 to W4). Gives the runs among them that have ended: they are done."""
        ended: list[str] = []
        for run_id in [*self._unknown, *self._resting]:
            if run_id in busy:
                continue  # W4
            request = self._request(run_id)
            tail = tails.get(request.queue.partition)
            found = tail.find(run_id) if tail is not None else Absence.BEING_READ
            if tail is None or isinstance(found, Absence):
                if found is Absence.ENDED:
                    ended.append(run_id)
                continue
            rest = self._resting.get(run_id)
            if not found.state.open or (rest and not self._rested(rest, tail, now_ms)):
                continue
            tail.book.pin(run_id)
            if rest is not None:
                del self._resting[run_id]
                self.lanes.put_back(run_id)  # W3
            else:
                del self._unknown[run_id]
                self.lanes.wait(self._claim_of(request, found))
        return ended

    def lost(
        self,
        run_id: str,
        *,
        now_ms: int,
        past_offset: int,
        used_tokens: int,
        engine_failed: bool,
    ) -> None:
        """Its attempt was lost and its slot is free: W2. `used_tokens` is all that the run has used here."""
        losses = self._losses[run_id] = self._losses.get(run_id, 0) + 1
        if engine_failed:
            self._engine_failures[run_id] = self._engine_failures.get(run_id, 0) + 1
        wait_ms = min(RETRY_AFTER_MS_MIN * 2 ** (losses - 1), RETRY_AFTER_MS_MAX)
        self._resting[run_id] = _Rest(
            lost_ms=now_ms,
            until_ms=now_ms + wait_ms,
            past_offset=past_offset,
            used_tokens=used_tokens,
        )

    def engine_failures(self, run_id: str) -> int:
        """How many of its attempts here were lost by the engine."""
        return self._engine_failures.get(run_id, 0)

    def forget(self, run_id: str) -> bool:
        """Its request is done or gone. Tells whether it rested, and so needs no slot here any more."""
        self._unknown.pop(run_id, None)
        self.lanes.withdraw(run_id)
        self._losses.pop(run_id, None)
        self._engine_failures.pop(run_id, None)
        rest = self._resting.pop(run_id, None)
        if rest is not None:
            self.lanes.finish(run_id, used_tokens=rest.used_tokens)
        return rest is not None

    def _rested(self, rest: _Rest, tail: FollowedPartition, now_ms: int) -> bool:
        return (
            now_ms >= rest.until_ms
            and self._member_ms > rest.lost_ms
            and tail.position > rest.past_offset
        )

    def _request(self, run_id: str) -> Request:
        request = self._requests.of_run(run_id)
        assert request is not None, "what waits is held"
        return request

    def _claim_of(self, request: Request, run: FollowedRun = NEW) -> Claim:
        event = request.event
        tokens = len(event.prompt_ids) + event.granted_output_tokens - run.state.n
        return Claim(
            run_id=request.run_id,
            account_id=event.account_id,
            lane=request.queue.lane,
            tokens=max(1, min(tokens, self._claim_tokens_max)),
            resumed=run.state.attempt > 0,
        )
