"""Where work comes from: reading the queues that are ours, keeping a tail for each of their token partitions, committing what is done.

An assignment is worked off in this order: what is gone is dropped at once; the queues that are new are read from what was committed
to their end at that moment; then a tail begins at the lowest mint offset among the requests found, or at the end. Requests
that are read later and were minted earlier are read back by their tail.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NoReturn

from inference_workers.decisions.request_book import Queue, Request
from inference_workers.desk import Desk
from inference_workers.membership import Membership, QueueRecord
from inference_workers.partition_tail import PartitionTail
from infra.log.records import BadRecord
from infra.log.span_reader import SpanFailed, SpanReader
from producers.log_writer import LogWriter
from producers.parking import park
from schemas.events.generations import GenerationRequested
from schemas.ids import BadId, run_address
from schemas.vocabulary import Lane

logger = logging.getLogger(__name__)

READ_WAIT_MS: Final = 100
COMMIT_EVERY_S: Final = 0.5
COLLECT_AGAIN_AFTER_S: Final = 0.5


class Intake:
    """`start` it inside its membership. `model` and `epoch` are what requests must be for."""

    def __init__(
        self,
        *,
        bootstrap: str,
        client_id: str,
        model: str,
        epoch: int,
        session_ms: int,
        desk: Desk,
        log: LogWriter,
        spans: SpanReader,
        tasks: asyncio.TaskGroup,
        now_ms: Callable[[], int],
    ) -> None:
        self.parked = 0
        # Set once every queue of an assignment can be served.
        self.serving = asyncio.Event()
        self.membership = Membership(
            bootstrap=bootstrap,
            client_id=client_id,
            model=model,
            session_ms=session_ms,
            on_revoked=desk.pause,
            on_assigned=self._assigned,
        )
        self._bootstrap = bootstrap
        self._client_id = client_id
        self._model = model
        self._epoch = epoch
        self._desk = desk
        self._log = log
        self._spans = spans
        self._tasks = tasks
        self._now_ms = now_ms
        self._loops: list[asyncio.Task[NoReturn]] = []
        self._followers: dict[int, asyncio.Task[None]] = {}
        self._reassigned = asyncio.Event()
        self._batch_read = asyncio.Event()

    def start(self) -> None:
        """Begin to read, to follow and to commit."""
        loops = (self._read(), self._keep_tails(), self._commit())
        self._loops = [self._tasks.create_task(loop) for loop in loops]

    async def stop(self) -> None:
        """End that and leave the group; answers under way are not touched."""
        for loop in self._loops:
            loop.cancel()
        await self.membership.leave()

    def _assigned(self, queues: frozenset[Queue]) -> None:
        self._desk.own(queues)
        partitions = {queue.partition for queue in queues}
        for partition in list(self._followers):
            if partition not in partitions:
                self._followers.pop(partition).cancel()
                self._desk.tails.pop(partition, None)
        logger.info(
            "queues_assigned queues=%d partitions=%s",
            len(queues),
            ",".join(str(partition) for partition in sorted(partitions)),
        )
        self._reassigned.set()

    async def _read(self) -> NoReturn:
        """Read requests into the desk. Raises AppendFailed where a bad record could not be parked."""
        while True:
            batch = await self.membership.read(wait_ms=READ_WAIT_MS)
            await self._take(batch, self.membership.generation)
            self._batch_read.set()
            self.membership.pause_lanes(self._desk.requests.full_lanes)

    async def _take(self, batch: list[QueueRecord], generation: int) -> None:
        for record in batch:
            if self.membership.generation != generation:
                return  # Rebalanced meanwhile: all of it is read again from what was committed.
            request = self._request(record)
            if isinstance(request, Request):
                self._desk.take(request)
                continue
            await self._park(record, request)
            if self.membership.generation == generation:
                self._desk.requests.skip(record.queue, record.record.offset)
        if batch:
            self._desk.schedule()

    def _request(self, record: QueueRecord) -> Request | str:
        """The request, or why the record is none."""
        found = record.record
        if isinstance(found, BadRecord):
            return found.reason
        event = found.event
        assert isinstance(event, GenerationRequested), "the topic's only event"
        try:
            address = run_address(event.run_id)
        except BadId:
            return "run_id is no run id"
        if address.epoch != self._epoch:
            return "run_id is of another topic epoch"
        if address.partition != record.queue.partition:
            return "run_id is of another partition"
        if event.model != self._model or event.lane is not record.queue.lane:
            return "model or lane is not this topic's"
        return Request(
            queue=record.queue,
            offset=found.offset,
            event_id=found.envelope.event_id,
            trace=found.envelope.trace,
            event=event,
        )

    async def _park(self, record: QueueRecord, reason: str) -> None:
        found = record.record
        if not isinstance(found, BadRecord):
            at = (found.partition, found.offset, found.appended_ms)
            found = BadRecord(*at, None, None, (), f"{reason}; see the source")
        self.parked += 1
        logger.warning(
            "request_parked topic=%s partition=%d offset=%d reason=%s",
            record.topic.name,
            found.partition,
            found.offset,
            reason,
        )
        await park(self._log, record.topic, found)

    async def _keep_tails(self) -> NoReturn:
        """Give every owned partition a tail."""
        while True:
            await self._reassigned.wait()
            self._reassigned.clear()
            generation = self.membership.generation
            missing = [q for q in self._desk.requests.queues if q.partition not in self._followers]
            try:
                collected = await self._collect(missing, generation)
            except SpanFailed:
                await asyncio.sleep(COLLECT_AGAIN_AFTER_S)
                self._reassigned.set()
                continue
            if collected:
                for partition in sorted({queue.partition for queue in missing}):
                    self._follow(partition)
                self._moved()  # There may be nothing to follow: more workers than partitions.

    async def _collect(self, queues: list[Queue], generation: int) -> bool:
        """Wait until these queues were read to where they end now. False: rebalanced meanwhile."""
        ends: dict[Queue, int] = {}
        for lane in Lane:
            partitions = sorted(queue.partition for queue in queues if queue.lane is lane)
            if partitions:
                bounds = await self._spans.bounds(self.membership.topic_of(lane), partitions)
                for partition in partitions:
                    ends[Queue(lane=lane, partition=partition)] = bounds[partition].end
        while self.membership.generation == generation:
            # Asked before the look, so that a batch read in between wakes this loop.
            self._batch_read.clear()
            for queue in list(ends):
                position = await self.membership.position(queue)
                if position is not None and position >= ends[queue]:
                    del ends[queue]
            full = self._desk.requests.full_lanes
            if all(queue.lane in full for queue in ends):
                return self.membership.generation == generation
            await self._batch_read.wait()
        return False

    def _follow(self, partition: int) -> None:
        tail = PartitionTail(
            partition=partition,
            bootstrap=self._bootstrap,
            client_id=self._client_id,
            spans=self._spans,
            on_followed=self._desk.followed,
            on_moved=self._moved,
            on_read_back=self._desk.read_back,
        )
        self._desk.tails[partition] = tail
        self._followers[partition] = self._tasks.create_task(
            tail.follow(self._desk.lowest_mint(partition)), name=f"tail-{partition}"
        )

    def _moved(self) -> None:
        """A tail folded a batch."""
        self._desk.schedule()
        if not self.serving.is_set() and all(t.caught_up for t in self._desk.tails.values()):
            self.serving.set()

    async def _commit(self) -> NoReturn:
        """Commit what is done, now and then; at once when membership is in doubt, to learn of it."""
        while True:
            try:
                async with asyncio.timeout(COMMIT_EVERY_S):
                    await self._desk.doubt.wait()
            except TimeoutError:
                pass
            self._desk.doubt.clear()
            await self.commit_now()

    async def commit_now(self) -> None:
        """One commit, when there is something to say or to learn."""
        requests = self._desk.requests
        offsets = requests.to_commit()
        if not offsets and self._desk.membership_in_doubt:
            offsets = requests.lowest_open()
        if not offsets:
            return
        asked_ms = self._now_ms()
        if await self.membership.commit(offsets):
            requests.was_committed(offsets)
            self._desk.member_at(asked_ms)
            self._desk.schedule()
