"""The worker's desk: the requests it holds, the attempts under way, and what the tails say about both.

Nothing here waits. Queues, tails, engine and producer call in, and the desk decides at once: what starts in which slot, what is done,
what is lost and when it may be tried again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from inference_workers.attempt import Attempt
from inference_workers.decisions.generation import Loss, Phase
from inference_workers.decisions.request_book import Queue, Request, RequestBook
from inference_workers.decisions.run_book import Absence, Followed, FollowedRun
from inference_workers.decisions.turns import Held
from inference_workers.decisions.waiting_room import WaitingRoom
from inference_workers.engine import Engine
from inference_workers.load_report import FreedDelays, LaneUse
from inference_workers.outlook import SlotTimes, free_ms, lane_loads
from inference_workers.partition_tail import PartitionTail
from producers.log_writer import LogWriter
from schemas.events.accounts import LaneLimits
from schemas.events.workers import LaneLoad
from schemas.vocabulary import Lane

logger = logging.getLogger(__name__)

NONCE_BYTES: Final = 8
# A request whose run is never queued would hold its queue's commit back for ever.
UNQUEUED_WAIT_MS_MAX: Final = 600_000


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
        self._waiting = WaitingRoom(self.requests, claim_tokens_max=engine.caps.context_window)
        self._use = LaneUse()
        self._times = SlotTimes()
        self._draw = secrets.SystemRandom().random
        self._active: dict[str, Attempt] = {}
        self._started_ms: dict[str, int] = {}
        # Tokens that were said before this worker's first attempt: not its own use.
        self._said_before: dict[str, int] = {}

    @property
    def busy(self) -> int:
        """Slots held, those included that the engine has not confirmed free."""
        return len(self._active)

    @property
    def unacknowledged(self) -> bool:
        """Whether an attempt that the engine had a part in has a record on its way to the log."""
        return any(attempt.unacknowledged for attempt in self._active.values())

    def share(self, shares: Mapping[Lane, LaneLimits]) -> None:
        """The policy has other weights, floors and look-aheads."""
        self._waiting.lanes.change_shares(shares)

    def outlook(self, *, full_tokens_per_s: float) -> tuple[tuple[LaneLoad, ...], tuple[int, ...]]:
        """What waits for a slot and what starts before whom, and when slots are free, in ms. May take some milliseconds."""
        lanes, slots = self._waiting.lanes, self._engine.caps.slots
        now_ms = self._now_ms()
        running = [
            Held(claim=lanes.held(run_id), age_ms=now_ms - at_ms)
            for run_id, at_ms in self._started_ms.items()
        ]
        held_ms = self._times.held_ms(slots=slots, full_tokens_per_s=full_tokens_per_s)
        loads = lane_loads(
            lanes,
            running=running,
            slots=slots,
            outside=self._waiting.outside(),
            use=self._use,
            held_ms=held_ms,
            draw=self._draw,
        )
        ages_ms = [held.age_ms for held in running]
        return loads, free_ms(ages_ms, slots=slots, held_ms=held_ms)

    def second(self, *, elapsed_s: float) -> bool:
        """About a second has passed since this was asked last. Whether no slot was free in between."""
        self._use.second(elapsed_s=elapsed_s)
        full, self._full = self._full, self.busy >= self._engine.caps.slots
        return full and self._full

    @property
    def waiting(self) -> int:
        """How many requests wait for a slot."""
        return len(self._waiting)

    @property
    def membership_in_doubt(self) -> bool:
        """An attempt was lost since the group last took a commit of ours: commit something to see."""
        return self._waiting.membership_in_doubt

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
        self._waiting.member_at(sent_ms)

    def take(self, request: Request) -> None:
        """A request was read. The caller calls `schedule` after the batch."""
        if not self.requests.add(request):
            return
        claim = self._waiting.came(request, now_ms=self._now_ms())
        self._use.came(claim)
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
        if self._waiting.any_rests:
            self.schedule()

    def set_aside_unqueued(self) -> None:
        """Give up requests whose run is not queued UNQUEUED_WAIT_MS_MAX after they were read."""
        for request in self._waiting.unknown_since(self._now_ms() - UNQUEUED_WAIT_MS_MAX):
            run_id = request.run_id
            tail = self.tails.get(request.queue.partition)
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
        for ended in self._waiting.place(self.tails, busy=self._active, now_ms=self._now_ms()):
            self._done(ended)
        while len(self._active) < caps.slots:
            run_id = self._waiting.lanes.take(room_tokens=caps.kv_tokens_max - self._held_tokens())
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
            engine_failures=self._waiting.engine_failures(run_id),
            on_defect=self._on_defect,
        )
        self._active[run_id] = attempt
        self._started_ms[run_id] = self._now_ms()
        self._tasks.create_task(self._make(attempt), name=f"attempt-{run_id}")

    async def _make(self, attempt: Attempt) -> None:
        await attempt.run()
        await attempt.slot_freed()
        now = self._now_ms()
        if attempt.cancelled_ms is not None:
            self.freed_delays.add(now - attempt.cancelled_ms)
        run_id = attempt.request.run_id
        del self._active[run_id]
        held_ms = now - self._started_ms.pop(run_id)
        lost = attempt.generation.phase is Phase.LOST
        if lost and self.requests.of_run(run_id) is attempt.request:
            self._waiting.lost(
                run_id,
                now_ms=now,
                past_offset=attempt.acked_offset,
                used_tokens=self._used_tokens(attempt),
                engine_failed=attempt.engine_failed,
            )
            self.doubt.set()
        else:
            used_tokens = self._used_tokens(attempt)
            del self._said_before[run_id]
            self._waiting.lanes.finish(run_id, used_tokens=used_tokens)
            if not lost:
                claimed = len(attempt.request.event.prompt_ids) + attempt.generation.grant
                self._times.freed(held_ms, used_tokens=used_tokens)
                self._use.ended(attempt.request.queue.lane, claimed=claimed, used=used_tokens)
        self.schedule()

    def _used_tokens(self, attempt: Attempt) -> int:
        said = attempt.generation.said - self._said_before[attempt.request.run_id]
        return len(attempt.request.event.prompt_ids) + max(0, said)

    def _done(self, run_id: str) -> None:
        request = self.requests.of_run(run_id)
        if request is None:
            return
        self.requests.done(run_id)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        run_id = request.run_id
        if self._waiting.forget(run_id) or run_id not in self._active:
            self._said_before.pop(run_id, None)
        tail = self.tails.get(request.queue.partition)
        if tail is not None and tail.caught_up:
            tail.book.unpin(run_id)
