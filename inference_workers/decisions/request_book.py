"""The requests that a worker holds, and what it may commit of the queues it reads.

A queue is one partition of one lane's topic. Requests are read in order of their offsets and end in any order.

Rules:
  Q1  A run is served once: of several requests for it the one with the lowest offset counts.
  Q2  A request is done only when its run has an accepted terminal on the tail; all requests of that run are then done.
  Q3  Committed is the lowest offset that is not done, counting those read but not started; when none is open, the offset
      after the last one read.
  Q4  After a rebalance a queue that was kept is read again from what was committed; what was read before is known and ignored.
  Q5  A queue that is gone takes its requests along: whoever owns it now reads them from what was committed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from schemas.events.generations import GenerationRequested
from schemas.ids import run_address
from schemas.vocabulary import Lane

# Beyond this many open requests of a lane its queues are not read on; a full prompt of 4,096 ids takes some 150 KB. Each lane has a
# bound of its own, so that the flood of one does not hide another. Admission keeps waits far shorter than what so many would mean.
LANE_REQUESTS_HELD_MAX: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """One partition of one lane's topic."""

    lane: Lane
    partition: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request as it lies in its queue."""

    queue: Queue
    offset: int
    event_id: str
    trace: str
    event: GenerationRequested

    @property
    def run_id(self) -> str:
        return self.event.run_id

    @property
    def mint_offset(self) -> int:
        """From this offset of the token partition on lies everything about the run."""
        return run_address(self.event.run_id).mint_offset


class RequestBook:
    """All open requests, by run and by queue, each in order of arrival."""

    def __init__(self) -> None:
        self._of_run: dict[str, list[Request]] = {}
        self._open: dict[Queue, dict[int, str]] = {}
        self._next: dict[Queue, int] = {}
        self._committed: dict[Queue, int] = {}

    def __len__(self) -> int:
        return len(self._of_run)

    @property
    def full_lanes(self) -> frozenset[Lane]:
        """Of these read no more for now."""
        held = Counter[Lane]()
        for queue, found in self._open.items():
            held[queue.lane] += len(found)
        return frozenset(lane for lane, count in held.items() if count >= LANE_REQUESTS_HELD_MAX)

    @property
    def queues(self) -> frozenset[Queue]:
        return frozenset(self._open)

    def own(self, queues: Iterable[Queue]) -> list[Request]:
        """These queues are ours now and no others. Gives the requests that went with those that are gone (Q5)."""
        wanted = set(queues)
        gone: list[Request] = []
        for queue in self.queues - wanted:
            for run_id in self._open.pop(queue).values():
                gone += self._of_run.pop(run_id, [])
            self._next.pop(queue, None)
            self._committed.pop(queue, None)
        for queue in wanted - self.queues:
            self._open[queue] = {}
        return gone

    def add(self, request: Request) -> bool:
        """A request was read. True when its run is new here; False for one read before (Q4) or a further one of its run (Q1)."""
        queue = request.queue
        assert queue in self._open, "only owned queues are read"
        if request.offset < self._next.get(queue, 0):
            return False  # Q4
        self._next[queue] = request.offset + 1
        self._open[queue][request.offset] = request.run_id
        known = self._of_run.setdefault(request.run_id, [])
        known.append(request)
        return len(known) == 1

    def skip(self, queue: Queue, offset: int) -> None:
        """The record at this offset is no request and was set aside."""
        if queue in self._open:
            self._next[queue] = max(self._next.get(queue, 0), offset + 1)

    def done(self, run_id: str) -> bool:
        """The run has an accepted terminal (Q2). False when no request of it is held."""
        requests = self._of_run.pop(run_id, [])
        for request in requests:
            del self._open[request.queue][request.offset]
        return bool(requests)

    def of_run(self, run_id: str) -> Request | None:
        """The request that counts (Q1)."""
        requests = self._of_run.get(run_id)
        return requests[0] if requests else None

    def __iter__(self) -> Iterator[Request]:
        """The requests that count, first come first."""
        return (requests[0] for requests in self._of_run.values())

    def to_commit(self) -> dict[Queue, int]:
        """Q3, for the queues where it differs from what was committed by us."""
        found: dict[Queue, int] = {}
        for queue, open_requests in self._open.items():
            lowest = next(iter(open_requests), self._next.get(queue))
            if lowest is not None and lowest != self._committed.get(queue):
                found[queue] = lowest
        return found

    def lowest_open(self) -> dict[Queue, int]:
        """Q3 for the queues with an open request, whether or not it was committed before."""
        return {queue: next(iter(found)) for queue, found in self._open.items() if found}

    def was_committed(self, offsets: dict[Queue, int]) -> None:
        """The broker took these."""
        for queue, offset in offsets.items():
            if queue in self._open:
                self._committed[queue] = offset
