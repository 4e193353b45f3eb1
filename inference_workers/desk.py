"""The worker's desk: the requests it holds, the attempts under way, and what the tails say about both.

Nothing here waits. Queues, tails, engine and producer call in, and the desk decides at once: what starts in which slot, what is done,
what is lost and when it may be tried again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from inference_workers.attempt import Attempt
from inference_workers.decisions.batch_slots import choose
from inference_workers.decisions.generation import Loss, Phase
from inference_workers.decisions.request_book import Queue, Request, RequestBook
from inference_workers.decisions.run_book import Absence, Followed, FollowedRun
from inference_workers.engine import Engine
from inference_workers.load_report import FreedDelays
from inference_workers.partition_tail import PartitionTail
from producers.log_writer import LogWriter
from schemas.vocabulary import Lane

logger = logging.getLogger(__name__)

NONCE_BYTES: Final = 8
RETRY_AFTER_MS_MIN: Final = 50
RETRY_AFTER_MS_MAX: Final = 2_000
# A request whose run is never queued would hold its queue's commit back for ever.
UNQUEUED_WAIT_MS_MAX: Final = 600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """A run whose attempt was lost waits: for a time, for our last acknowledged record to come by on the tail (it says who is right),
    and for proof, later than the loss, that we are still a member and so own its queue."""

    lost_ms: int
    until_ms: int
    past_offset: int


class Desk:
    """See the module. `tails` are those of the partitions whose requests are owned; the owner of the desk starts and ends them."""

    def __init__(
        self,
        *,
        engine: Engine,
        log: LogWriter,
        worker_id: str,
        tasks: asyncio.TaskGroup,
        now_ms: Callable[[], int],
        on_defect: Callable[[BaseException], None],
    ) -> None:
        self.requests = RequestBook()
        self.tails: dict[int, PartitionTail] = {}
        self.freed_delays = FreedDelays()
        self._starting = False
        self._stopped = False
        # Set when an attempt was lost: its run goes on only when a commit has shown that we are still a member.
        self.doubt = asyncio.Event()
        self._engine = engine
        self._log = log
        self._worker_id = worker_id
        self._tasks = tasks
        self._now_ms = now_ms
        self._on_defect = on_defect
        # By lane, first come first: when each request was read.
        self._waiting: dict[Lane, dict[str, int]] = {lane: {} for lane in Lane}
        self._active: dict[str, Attempt] = {}
        self._resting: dict[str, Rest] = {}
        self._losses: dict[str, int] = {}
        self._engine_failures: dict[str, int] = {}
        self._member_ms = 0

    @property
    def busy(self) -> int:
        """Slots held, those included that the engine has not confirmed free."""
        return len(self._active)

    @property
    def queued(self) -> list[Request]:
        """The requests that wait for a slot."""
        runs = (run_id for lane in self._waiting.values() for run_id in lane)
        found = (self.requests.of_run(run_id) for run_id in runs)
        return [request for request in found if request is not None]

    @property
    def membership_in_doubt(self) -> bool:
        """An attempt was lost since the group last took a commit of ours: commit something to see."""
        return any(rest.lost_ms >= self._member_ms for rest in self._resting.values())

    def pause(self) -> None:
        """A rebalance has begun: what runs goes on, nothing new starts."""
        self._starting = False

    def stop(self) -> None:
        """The process stops: nothing new starts any more."""
        self._stopped = True

    def own(self, queues: Iterable[Queue]) -> None:
        """The new assignment. What did not come back is dropped; what came back was never let go."""
        for request in self.requests.own(queues):
            attempt = self._active.get(request.run_id)
            if attempt is not None:
                attempt.lose(Loss.PARTITION_GONE)
            self._forget(request)
        self.member_at(self._now_ms())
        self._starting = True
        self.schedule()

    def member_at(self, sent_ms: int) -> None:
        """The group counted us as a member when it answered what we sent at that time."""
        self._member_ms = max(self._member_ms, sent_ms)

    def take(self, request: Request) -> None:
        """A request was read. The caller calls `schedule` after the batch."""
        if not self.requests.add(request):
            return
        self._waiting[request.queue.lane][request.run_id] = self._now_ms()
        tail = self.tails.get(request.queue.partition)
        if tail is not None and tail.caught_up:
            tail.book.pin(request.run_id)

    def lowest_mint(self, partition: int) -> int | None:
        """Where a tail of this partition has to begin."""
        return min(
            (r.mint_offset for r in self.requests if r.queue.partition == partition), default=None
        )

    def followed(self, followed: Followed) -> None:
        """A tail folded a record of a run."""
        run_id = followed.event.run_id
        attempt = self._active.get(run_id)
        if attempt is not None:
            attempt.seen(followed)
        if followed.run.state.ended:
            self._done(run_id)

    def read_back(self, run_ids: list[str], gone: bool) -> None:
        """Runs that were unknown are known now; or (gone) nobody can know them, for retention removed their beginning."""
        if gone:
            for run_id in run_ids:
                logger.warning("request_without_records run=%s", run_id)
                self._done(run_id)
        self.schedule()

    def tick(self) -> None:
        """Time passed. Raises ProducerUnusable."""
        for attempt in list(self._active.values()):
            attempt.tick()
        if self._resting:
            self.schedule()

    def set_aside_unqueued(self) -> None:
        """Give up requests whose run is not queued UNQUEUED_WAIT_MS_MAX after they were read."""
        before = self._now_ms() - UNQUEUED_WAIT_MS_MAX
        waiting = [(run_id, at) for lane in self._waiting.values() for run_id, at in lane.items()]
        for run_id, read_ms in waiting:
            if read_ms >= before:
                continue
            request = self.requests.of_run(run_id)
            tail = self.tails.get(request.queue.partition) if request is not None else None
            found = tail.find(run_id) if tail is not None else Absence.BEING_READ
            unqueued = isinstance(found, FollowedRun) and found.state.queued is None
            if found is Absence.NO_RECORD or unqueued:
                logger.error("request_never_queued run=%s", run_id)
                self._done(run_id)

    def schedule(self) -> None:
        """Fill the free slots."""
        slots = self._engine.caps.slots
        free = slots - len(self._active)
        if self._stopped or not self._starting or free <= 0:
            return
        startable = {
            lane: self._first_startable(list(waiting), free)
            for lane, waiting in self._waiting.items()
            if waiting
        }
        if not any(startable.values()):
            return
        busy: dict[Lane, int] = {}
        for attempt in self._active.values():
            lane_held = attempt.request.queue.lane
            busy[lane_held] = busy.get(lane_held, 0) + 1
        for run_id in choose(startable, busy, slots=slots):
            self._start(run_id)

    def _first_startable(self, run_ids: list[str], count: int) -> list[str]:
        found: list[str] = []
        for run_id in run_ids:
            request = self.requests.of_run(run_id)
            assert request is not None, "what waits is held"
            if self._startable(request):
                found.append(run_id)
                if len(found) == count:
                    break
        return found

    def _startable(self, request: Request) -> bool:
        run_id = request.run_id
        tail = self.tails.get(request.queue.partition)
        if tail is None or run_id in self._active:
            return False
        found = tail.find(run_id)
        if found is Absence.ENDED:
            self._done(run_id)
            return False
        if not isinstance(found, FollowedRun) or not found.state.open:
            return False
        rest = self._resting.get(run_id)
        return rest is None or (
            self._now_ms() >= rest.until_ms
            and self._member_ms > rest.lost_ms
            and tail.position > rest.past_offset
        )

    def _start(self, run_id: str) -> None:
        request = self.requests.of_run(run_id)
        assert request is not None, "what waits is held"
        tail = self.tails[request.queue.partition]
        run = tail.find(run_id)
        assert isinstance(run, FollowedRun), "only what is known starts"
        tail.book.pin(run_id)
        del self._waiting[request.queue.lane][run_id]
        self._resting.pop(run_id, None)
        attempt = Attempt(
            request=request,
            run=run,
            nonce=secrets.token_hex(NONCE_BYTES),
            worker_id=self._worker_id,
            engine=self._engine,
            log=self._log,
            now_ms=self._now_ms,
            engine_failures=self._engine_failures.get(run_id, 0),
            on_defect=self._on_defect,
        )
        self._active[run_id] = attempt
        self._tasks.create_task(self._make(attempt), name=f"attempt-{run_id}")

    async def _make(self, attempt: Attempt) -> None:
        await attempt.run()
        await attempt.slot_freed()
        now = self._now_ms()
        if attempt.cancelled_ms is not None:
            self.freed_delays.add(now - attempt.cancelled_ms)
        run_id = attempt.request.run_id
        del self._active[run_id]
        lost = attempt.generation.phase is Phase.LOST
        if lost and self.requests.of_run(run_id) is attempt.request:
            self._rest(attempt, now)
        self.schedule()

    def _rest(self, attempt: Attempt, now: int) -> None:
        run_id = attempt.request.run_id
        losses = self._losses[run_id] = self._losses.get(run_id, 0) + 1
        if attempt.engine_failed:
            self._engine_failures[run_id] = self._engine_failures.get(run_id, 0) + 1
        wait_ms = min(RETRY_AFTER_MS_MIN * 2 ** (losses - 1), RETRY_AFTER_MS_MAX)
        self._resting[run_id] = Rest(
            lost_ms=now, until_ms=now + wait_ms, past_offset=attempt.acked_offset
        )
        self.doubt.set()
        # It keeps its place: it was the first to come once already.
        lane = attempt.request.queue.lane
        self._waiting[lane] = {run_id: now, **self._waiting[lane]}

    def _done(self, run_id: str) -> None:
        request = self.requests.of_run(run_id)
        if request is None:
            return
        self.requests.done(run_id)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        run_id = request.run_id
        self._waiting[request.queue.lane].pop(run_id, None)
        self._resting.pop(run_id, None)
        self._losses.pop(run_id, None)
        self._engine_failures.pop(run_id, None)
        tail = self.tails.get(request.queue.partition)
        if tail is not None and tail.caught_up:
            tail.book.unpin(run_id)
