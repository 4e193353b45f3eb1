"""A worker's shell in the simulator: `intake.py` and `desk.py` of the real one, one step at a time.

Its group's sources are queues (lane and partition); beside that it tails the token partitions of the queues it owns.
"""

from __future__ import annotations

from typing import Final, cast

from inference_workers.decisions.generation import Loss, Phase
from inference_workers.decisions.request_book import Queue, Request, RequestBook
from inference_workers.decisions.run_book import Followed, FollowedRun
from inference_workers.decisions.waiting_room import WaitingRoom
from schemas.events.generations import GenerationRequested
from schemas.topics import generations
from tests.simulation.attempts import SimulatedAttempt
from tests.simulation.log import Group
from tests.simulation.process import Member
from tests.simulation.tails import SimulatedTail
from tests.simulation.world import LANES, MODEL, World

SLOTS: Final = 2
READ_RECORDS_MAX: Final = 4
ROOM_TOKENS: Final = 1_000_000
TOPICS: Final = {lane: generations(MODEL, lane) for lane in LANES}


class Worker(Member[Queue]):
    """One process of the model's group."""

    def __init__(self, world: World, group: Group[Queue]) -> None:
        super().__init__(world, "worker", group, may_lose=True)
        self.requests = RequestBook()
        self.tails: dict[int, SimulatedTail] = {}
        self._positions: dict[Queue, int] = {}
        # Where the queues of partitions without a tail ended when they were assigned.
        self._collecting: dict[Queue, int] = {}
        self._waiting = WaitingRoom(self.requests, claim_tokens_max=ROOM_TOKENS)
        self._active: dict[str, SimulatedAttempt] = {}
        self.actions += [
            self.read,
            self.follow,
            self.make,
            self.producer.step,
            self.follow,
            self.make,
            self.producer.step,
            self.read_back,
            self.tick,
            self.commit,
        ]

    # Intake

    def assigned(self, before: list[Queue]) -> None:
        for request in self.requests.own(self.owned):
            attempt = self._active.get(request.run_id)
            if attempt is not None:
                attempt.lose(Loss.PARTITION_GONE)
            self._forget(request)
        self._positions = {queue: self.start_of(queue) for queue in self.owned}
        partitions = {queue.partition for queue in self.owned}
        self.tails = {at: tail for at, tail in self.tails.items() if at in partitions}
        self._collecting = {
            queue: self.world.log.end(TOPICS[queue.lane], queue.partition)
            for queue in self.owned
            if queue.partition not in self.tails
        }
        self._waiting.member_at(self.world.now_ms)
        self._begin_tails()
        self.schedule()

    def read(self) -> bool:
        """Read the next requests of each queue."""
        did = False
        for queue, position in self._positions.items():
            records = self.world.log.partition(TOPICS[queue.lane], queue.partition).records
            batch = records[position : position + READ_RECORDS_MAX]
            for record in batch:
                event = cast("GenerationRequested", record.event)
                self._take(
                    Request(
                        queue=queue,
                        offset=record.offset,
                        event_id=record.event_id,
                        trace="",
                        event=event,
                    )
                )
            self._positions[queue] = position + len(batch)
            did = did or bool(batch)
        if did:
            self._begin_tails()
            self.schedule()
        return did

    def _take(self, request: Request) -> None:
        if not self.requests.add(request):
            return
        self._waiting.came(request, now_ms=self.world.now_ms)
        tail = self.tails.get(request.queue.partition)
        if tail is not None and tail.caught_up:
            tail.book.pin(request.run_id)

    def _begin_tails(self) -> None:
        """Follow the partitions whose queues were read to their end."""
        if not self._collecting or any(
            self._positions[queue] < end for queue, end in self._collecting.items()
        ):
            return
        for partition in sorted({queue.partition for queue in self._collecting}):
            lowest = min(
                (r.mint_offset for r in self.requests if r.queue.partition == partition),
                default=None,
            )
            if not self.world.order.tail_from_mint_offset:
                lowest = None
            self.tails[partition] = SimulatedTail(
                self.world, partition, lowest_mint=lowest, on_followed=self._followed
            )
        self._collecting = {}

    def follow(self) -> bool:
        """Read on in each tail."""
        did = False
        for tail in list(self.tails.values()):
            did = tail.follow() or did
        if did:
            self.schedule()
        return did

    def read_back(self) -> bool:
        """Begin or end a reading back."""
        did = False
        for tail in self.tails.values():
            did = tail.read_back() or did
        if did:
            self.schedule()
        return did

    def commit(self) -> bool:
        """One commit, when there is something to say or to learn."""
        offsets = self.requests.to_commit()
        if not offsets and self._waiting.membership_in_doubt:
            offsets = self.requests.lowest_open()
        if not offsets:
            return False
        if self.group.commit(self.name, self.generation, offsets):
            self.requests.was_committed(offsets)
            self._waiting.member_at(self.world.now_ms)
            self.schedule()
            return True
        return False

    # The desk

    def _followed(self, followed: Followed) -> None:
        run_id = followed.event.run_id
        attempt = self._active.get(run_id)
        if attempt is not None:
            attempt.seen(followed)
        if followed.run.state.ended:
            self._done(run_id)

    def tick(self) -> bool:
        """Time passed."""
        for attempt in self._active.values():
            attempt.tick()
        if self._waiting.any_rests:
            self.schedule()
        return False

    def make(self) -> bool:
        """Each attempt under way does its next thing; a slot of one that is over or lost is freed."""
        did = False
        for run_id, attempt in list(self._active.items()):
            if attempt.generation.open:
                did = attempt.step() or did
                ending = attempt.generation.phase is Phase.ENDING
                if ending and not self.world.order.done_when_terminal_is_back:
                    self._done(run_id)
            elif self.world.chance(0.6):
                self._made(run_id, attempt)
                did = True
        return did

    def schedule(self) -> None:
        """Fill the free slots."""
        for ended in self._waiting.place(self.tails, busy=self._active, now_ms=self.world.now_ms):
            self._done(ended)
        while len(self._active) < SLOTS:
            run_id = self._waiting.lanes.take(room_tokens=ROOM_TOKENS)
            if run_id is None:
                return
            self._start(run_id)

    def _start(self, run_id: str) -> None:
        request = self.requests.of_run(run_id)
        assert request is not None, "what waits is held"
        run = self.tails[request.queue.partition].find(run_id)
        assert isinstance(run, FollowedRun), "a pinned run is not forgotten"
        self._active[run_id] = SimulatedAttempt(
            self.world,
            self.producer,
            request=request,
            run=run,
            engine_failures=self._waiting.engine_failures(run_id),
        )

    def _made(self, run_id: str, attempt: SimulatedAttempt) -> None:
        del self._active[run_id]
        lost = attempt.generation.phase is Phase.LOST
        if lost and self.requests.of_run(run_id) is attempt.request:
            self._waiting.lost(
                run_id,
                now_ms=self.world.now_ms,
                past_offset=attempt.acked_offset,
                used_tokens=attempt.generation.said,
                engine_failed=attempt.engine_failed,
            )
        else:
            self._waiting.lanes.finish(run_id, used_tokens=attempt.generation.said)
        self.schedule()

    def _done(self, run_id: str) -> None:
        request = self.requests.of_run(run_id)
        if request is not None:
            self.requests.done(run_id)
            self._forget(request)

    def _forget(self, request: Request) -> None:
        run_id = request.run_id
        self._waiting.forget(run_id)
        tail = self.tails.get(request.queue.partition)
        if tail is not None and tail.caught_up:
            tail.book.unpin(run_id)
