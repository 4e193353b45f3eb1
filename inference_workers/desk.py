"""The worker's desk: the requests it holds, the attempts under way, and what the tails say about both.

Nothing here waits. Queues, tails, engine and producer call in, and the desk decides at once: what starts in which slot, what is done,
what is lost and when it may be tried again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from inference_workers.attempt import Attempt
from inference_workers.decisions.generation import Loss, Phase
from inference_workers.decisions.lanes import Claim, FairLanes
from inference_workers.decisions.request_book import Queue, Request, RequestBook
from inference_workers.decisions.run_book import NEW, Absence, Followed, FollowedRun
from inference_workers.engine import Engine
from inference_workers.load_report import FreedDelays, LaneUse, lane_load
from inference_workers.partition_tail import PartitionTail
from producers.log_writer import LogWriter
from schemas.events.accounts import LaneLimits
from schemas.events.workers import LaneLoad
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
    used_tokens: int


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
        # No slot was free since `second` was asked last, apart from the instant between two requests.
        self._full = False
        # Set when an attempt was lost: its run goes on only when a commit has shown that we are still a member.
        self.doubt = asyncio.Event()
        self._engine = engine
        self._log = log
        self._worker_id = worker_id
        self._tasks = tasks
        self._now_ms = now_ms
        self._on_defect = on_defect
        # When each request was read whose run is not known yet to be queued and open.
        self._unknown: dict[str, int] = {}
        self._lanes = FairLanes()
        self._use = LaneUse()
        self._active: dict[str, Attempt] = {}
        # Tokens that were said before this worker's first attempt: not its own use.
        self._said_before: dict[str, int] = {}
        self._resting: dict[str, Rest] = {}
        self._losses: dict[str, int] = {}
        self._engine_failures: dict[str, int] = {}
        self._member_ms = 0

    @property
    def busy(self) -> int:
        """Slots held, those included that the engine has not confirmed free."""
        return len(self._active)

    def share(self, shares: Mapping[Lane, LaneLimits]) -> None:
        """The policy has other weights, floors and look-aheads."""
        self._lanes.change_shares(shares)

    def lane_loads(self) -> tuple[LaneLoad, ...]:
        """What waits for a slot."""
        unknown = [self._claim_of(run_id) for run_id in self._unknown]
        resting = [self._claim_of(run_id) for run_id in self._resting]
        return tuple(
            lane_load(
                lane,
                self._lanes.queue(lane),
                others=[c.tokens for c in (*unknown, *resting) if c.lane is lane],
                use=self._use,
            )
            for lane in Lane
        )

    def second(self, *, elapsed_s: float) -> bool:
        """About a second has passed since this was asked last. Whether no slot was free in between."""
        self._use.second(elapsed_s=elapsed_s)
        full, self._full = self._full, self.busy >= self._engine.caps.slots
        return full and self._full

    @property
    def waiting(self) -> int:
        """How many requests wait for a slot."""
        return len(self._unknown) + len(self._lanes) + len(self._resting)

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
        self._unknown[request.run_id] = self._now_ms()
        claim = self._claim_of(request.run_id)
        self._use.came(claim.lane, claimed=claim.tokens)
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
        for run_id, read_ms in list(self._unknown.items()):
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
        caps = self._engine.caps
        if self._stopped or not self._starting:
            return
        self._place()
        while len(self._active) < caps.slots:
            run_id = self._lanes.take(room_tokens=caps.kv_tokens_max - self._held_tokens())
            if run_id is None:
                self._full = False
                return
            self._start(run_id)

    def _held_tokens(self) -> int:
        """What the attempts under way may come to hold of the engine's memory."""
        window = self._engine.caps.context_window
        return sum(
            min(window, len(attempt.request.event.prompt_ids) + attempt.generation.grant)
            for attempt in self._active.values()
        )

    def _place(self) -> None:
        """Let those wait for a slot that could use one: their run is known, queued and open, and what it rested for is over."""
        for run_id in [*self._unknown, *self._resting]:
            if run_id in self._active:
                continue  # It went and came back while the attempt of before still ends.
            request = self.requests.of_run(run_id)
            assert request is not None, "what waits is held"
            tail = self.tails.get(request.queue.partition)
            found = tail.find(run_id) if tail is not None else Absence.BEING_READ
            if tail is None or isinstance(found, Absence):
                if found is Absence.ENDED:
                    self._done(run_id)
                continue
            rest = self._resting.get(run_id)
            if not found.state.open or (rest is not None and not self._rested(rest, tail)):
                continue
            tail.book.pin(run_id)
            if rest is not None:
                del self._resting[run_id]
                self._lanes.put_back(run_id)
            else:
                del self._unknown[run_id]
                self._lanes.wait(self._claim_of(run_id, found))

    def _rested(self, rest: Rest, tail: PartitionTail) -> bool:
        return (
            self._now_ms() >= rest.until_ms
            and self._member_ms > rest.lost_ms
            and tail.position > rest.past_offset
        )

    def _claim_of(self, run_id: str, run: FollowedRun = NEW) -> Claim:
        request = self.requests.of_run(run_id)
        assert request is not None, "what waits is held"
        event = request.event
        tokens = len(event.prompt_ids) + event.granted_output_tokens - run.state.n
        return Claim(
            run_id=run_id,
            account_id=event.account_id,
            lane=request.queue.lane,
            tokens=max(1, min(tokens, self._engine.caps.context_window)),
            resumed=run.state.attempt > 0,
        )

    def _start(self, run_id: str) -> None:
        request = self.requests.of_run(run_id)
        assert request is not None, "what waits is held"
        run = self.tails[request.queue.partition].find(run_id)
        assert isinstance(run, FollowedRun), "a pinned run is not forgotten"
        self._said_before.setdefault(run_id, run.state.n)
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
        else:
            used_tokens = self._used_tokens(attempt)
            self._finish(run_id, used_tokens)
            if not lost:
                claimed = len(attempt.request.event.prompt_ids) + attempt.generation.grant
                self._use.ended(attempt.request.queue.lane, claimed=claimed, used=used_tokens)
        self.schedule()

    def _used_tokens(self, attempt: Attempt) -> int:
        said = attempt.generation.said - self._said_before[attempt.request.run_id]
        return len(attempt.request.event.prompt_ids) + max(0, said)

    def _finish(self, run_id: str, used_tokens: int) -> None:
        """The run needs no slot here any more, and used so much while it had one."""
        del self._said_before[run_id]
        self._lanes.finish(run_id, used_tokens=used_tokens)

    def _rest(self, attempt: Attempt, now: int) -> None:
        run_id = attempt.request.run_id
        losses = self._losses[run_id] = self._losses.get(run_id, 0) + 1
        if attempt.engine_failed:
            self._engine_failures[run_id] = self._engine_failures.get(run_id, 0) + 1
        wait_ms = min(RETRY_AFTER_MS_MIN * 2 ** (losses - 1), RETRY_AFTER_MS_MAX)
        self._resting[run_id] = Rest(
            lost_ms=now,
            until_ms=now + wait_ms,
            past_offset=attempt.acked_offset,
            used_tokens=self._used_tokens(attempt),
        )
        self.doubt.set()

    def _done(self, run_id: str) -> None:
        request = self.requests.of_run(run_id)
        if request is None:
            return
        self.requests.done(run_id)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        run_id = request.run_id
        self._unknown.pop(run_id, None)
        self._lanes.withdraw(run_id)
        rest = self._resting.pop(run_id, None)
        if rest is not None:
            self._finish(run_id, rest.used_tokens)
        elif run_id not in self._active:
            self._said_before.pop(run_id, None)
        self._losses.pop(run_id, None)
        self._engine_failures.pop(run_id, None)
        tail = self.tails.get(request.queue.partition)
        if tail is not None and tail.caught_up:
            tail.book.unpin(run_id)
