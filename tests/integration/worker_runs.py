"""Worker processes, and what stands around them: runs queued and requested as admission and context do it, and a reader that folds."""

from __future__ import annotations

import re
import secrets
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from inference_workers.decisions.script import Script, answer
from infra.command.topics import apply_topics
from infra.log.epoch import topic_epoch
from infra.log.records import BadRecord, LogRecord
from infra.log.span_reader import SpanFailed, SpanReader
from producers.log_writer import Appended, LogWriter
from schemas.events import Event
from schemas.events.generations import GenerationRequested
from schemas.events.tokens import (
    AttemptStarted,
    PartitionTick,
    RunCancelled,
    RunEnded,
    RunQueued,
    TokensGenerated,
)
from schemas.ids import RANDOM_BYTES, RunAddress, derived_event_id, mint_run_id, run_address
from schemas.run_fold import NEW_RUN, RunState, fold
from schemas.topics import TOKENS, Topic, generations
from schemas.vocabulary import CancelReason, Lane, Tier
from tests.integration.processes import end_process, start_module
from tests.integration.waiting import ACK_WAIT_MS, PATIENCE_S, eventually, eventually_async

MODEL: Final = "smollm2-135m"
PARTITIONS: Final = 4
SESSION_S: Final = 3.0
KEY: Final = b"k" * 32


_ASSIGNED: Final = re.compile(r"queues_assigned queues=(\d+) partitions=([\d,]*)\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """How many queues (a partition of a lane each), and the token partitions that they belong to."""

    queues: int
    partitions: frozenset[int]


def script_text(prompt_ids: tuple[int, ...], tokens: int, script: Script = Script.WORDS) -> str:
    """What the scripted engine says to this prompt, uninterrupted."""
    said = answer(script=script, prompt_ids=prompt_ids, tokens=tokens)
    return b"".join(token.says for token in said).decode()


class WorkerProcess:
    """`python -m inference_workers.worker` with the scripted engine."""

    def __init__(
        self,
        folder: Path,
        *,
        bootstrap: str,
        variables: Mapping[str, str],
        faults: str = "",
    ) -> None:
        name = f"worker-{secrets.token_hex(3)}"
        self._ready = folder / f"{name}.ready"
        self.log_path = folder / f"{name}.log"
        chosen = {
            "TURNLOG_HOME": str(folder),
            "TURNLOG_KAFKA": bootstrap,
            "TURNLOG_SESSION_MS": str(int(SESSION_S * 1000)),
            "TURNLOG_ENGINE": "scripted",
            "TURNLOG_READY_FILE": str(self._ready),
            "TURNLOG_PART": name,
            **variables,
        }
        module = "tests.integration.faulty_worker" if faults else "inference_workers.worker"
        arguments = (faults,) if faults else ()
        self.process = start_module(module, *arguments, log=self.log_path, variables=chosen)
        self.name = name

    def wait_ready(self) -> None:
        """Return when it says that it serves."""

        def ready() -> bool:
            ended = self.process.poll() is not None
            if self._ready.exists():
                return True  # Also where it has served and ended before we looked.
            if ended:
                raise RuntimeError(f"the worker ended early ({self.process.returncode})")
            return False

        eventually(ready, what="the worker is ready")

    def assignment(self) -> Assignment | None:
        """Its last one, as its log says; None before the first."""
        found = _ASSIGNED.findall(self.log())
        if not found:
            return None
        queues, named = found[-1]
        partitions = frozenset(int(partition) for partition in named.split(",") if partition)
        return Assignment(queues=int(queues), partitions=partitions)

    def takes_part(self) -> bool:
        """Whether it owns a queue, as far as its log says."""
        assignment = self.assignment()
        return assignment is not None and assignment.queues > 0

    def losses(self, run_id: str) -> list[str]:
        """Why it lost attempts at the run, as its log says: each of them is followed by another attempt."""
        return re.findall(rf"attempt_lost run={run_id} attempt=\d+ why=(\w+)", self.log())

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        return self.ended()

    def ended(self) -> int:
        """Wait until it ends by itself; its exit code."""
        return self.process.wait(timeout=PATIENCE_S)

    def log(self) -> str:
        return self.log_path.read_text("utf-8", "replace")

    def end(self) -> None:
        """However it stands."""
        end_process(self.process)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A record of a run, and whether it counted."""

    offset: int
    appended_ms: int
    event: Event
    accepted: bool


@dataclass(slots=True, kw_only=True)
class RunLog:
    """A run as any reader sees it: every record with the fold's verdict, and the state after them all."""

    state: RunState = NEW_RUN
    seen: list[Seen] = field(default_factory=list)

    def of(self, kind: type[Event], *, accepted: bool = True) -> list[Seen]:
        return [s for s in self.seen if isinstance(s.event, kind) and s.accepted is accepted]

    def check(self) -> None:
        """I2 and I3: dense indices, exactly one accepted terminal, nothing counted after it."""
        n = 0
        for piece in self.of(TokensGenerated):
            assert isinstance(piece.event, TokensGenerated)
            assert piece.event.index == n
            n += piece.event.count
        assert n == self.state.n
        terminals = self.of(RunEnded) + self.of(RunCancelled)
        assert len(terminals) == 1
        assert all(s.offset <= terminals[0].offset for s in self.seen if s.accepted)


class Runs:
    """Stands for everybody but the worker."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._log = LogWriter(bootstrap=bootstrap, client_id="test")
        self._spans = SpanReader(bootstrap=bootstrap, client_id="test")
        self._epoch = 0

    async def __aenter__(self) -> Self:
        await apply_topics(self._bootstrap, models=(MODEL,), partitions=PARTITIONS)
        self._epoch = await topic_epoch(self._bootstrap)
        await self._log.__aenter__()
        await self._spans.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._spans.__aexit__()
        await self._log.__aexit__()

    async def mint(self, partition: int) -> str:
        """A run id as an edge mints it."""
        bounds = await self._spans.bounds(TOKENS, [partition])
        address = RunAddress(
            epoch=self._epoch, partition=partition, mint_offset=bounds[partition].end
        )
        random = secrets.token_bytes(RANDOM_BYTES)
        return mint_run_id(key=KEY, account_id="a", address=address, random=random)

    async def queue(self, run_id: str, *, grant: int = 1_000, lane: Lane = Lane.FREE) -> Appended:
        """What admission writes."""
        return await self._append(
            TOKENS,
            RunQueued(
                run_id=run_id,
                account_id="a",
                chat_id="chat",
                user_message_id="m1",
                assistant_message_id="m2",
                parent_id=None,
                tier=Tier.FREE,
                lane=lane,
                model=MODEL,
                input_budget_tokens=1_000,
                granted_output_tokens=grant,
                deadline_ms=60_000,
            ),
        )

    async def request(
        self,
        run_id: str,
        prompt_ids: tuple[int, ...] = (1, 2, 3),
        *,
        grant: int = 1_000,
        lane: Lane = Lane.FREE,
        quota_limited: bool = False,
    ) -> Appended:
        """What context writes."""
        return await self._append(
            generations(MODEL, lane),
            GenerationRequested(
                run_id=run_id,
                account_id="a",
                chat_id="chat",
                tier=Tier.FREE,
                lane=lane,
                model=MODEL,
                prompt_ids=prompt_ids,
                granted_output_tokens=grant,
                cache_scope="scope",
                deadline_ms=60_000,
                quota_limited=quota_limited,
            ),
        )

    async def cancel(self, run_id: str) -> Appended:
        """What the edge writes."""
        return await self._append(TOKENS, RunCancelled(run_id=run_id, reason=CancelReason.USER))

    async def pretend(self, run_id: str, *, attempt: int, said: int) -> None:
        """What a worker that then died wrote: an attempt and so many tokens of the answer to (1, 2, 3)."""
        nonce = f"dead-{attempt}"
        started = AttemptStarted(
            run_id=run_id, attempt=attempt, nonce=nonce, worker_id="dead", input_tokens=3
        )
        await self._append(TOKENS, started)
        text = script_text((1, 2, 3), said)
        await self._append(
            TOKENS,
            TokensGenerated(run_id=run_id, nonce=nonce, index=0, count=said, text=text),
        )

    async def uncommitted(self) -> int:
        """Requests that the group has not committed, over all its queues."""
        admin = AIOKafkaAdminClient(bootstrap_servers=self._bootstrap)
        await admin.start()
        try:
            offsets = await admin.list_consumer_group_offsets(f"worker.{MODEL}")
        finally:
            await admin.close()
        lag = 0
        for lane in Lane:
            topic = generations(MODEL, lane)
            bounds = await self._spans.bounds(topic, list(range(PARTITIONS)))
            for partition, kept in bounds.items():
                found = offsets.get(TopicPartition(topic.name, partition))
                lag += kept.end - max(0, found.offset if found is not None else 0)
        return lag

    async def all_committed(self) -> None:
        """Wait until the group has committed every request."""

        async def committed() -> bool:
            return await self.uncommitted() == 0

        await eventually_async(committed, what="every request is committed")

    async def start(self, partition: int = 0, prompt_ids: tuple[int, ...] = (1, 2, 3)) -> str:
        """Mint, queue and request."""
        run_id = await self.mint(partition)
        await self.queue(run_id)
        await self.request(run_id, prompt_ids)
        return run_id

    async def poison(self, lane: Lane, partition: int) -> Appended:
        """Bytes that are no event, where a request should be."""
        future = await self._log.send_raw(
            generations(MODEL, lane).name, b"{", key=b"k", partition=partition, headers=[]
        )
        return await future

    async def parked(self, lane: Lane, partition: int) -> int:
        """How many records the lane's partition has in `.dead`."""
        topic = generations(MODEL, lane)
        dead = Topic(
            name=topic.dead,
            key=topic.key,
            events=(),
            retention_ms=topic.retention_ms,
            writers=topic.writers,
            readers=topic.readers,
        )
        return (await self._spans.bounds(dead, [partition]))[partition].end

    async def read(self, run_id: str) -> RunLog:
        """Fold the run from its mint offset to the partition's end."""
        address = run_address(run_id)
        end = (await self._spans.bounds(TOKENS, [address.partition]))[address.partition].end
        log = RunLog()
        async for batch in self._spans.span(TOKENS, address.partition, address.mint_offset, end):
            for record in batch:
                self._see(log, run_id, record)
        return log

    def _see(self, log: RunLog, run_id: str, record: LogRecord | BadRecord) -> None:
        if isinstance(record, BadRecord) or isinstance(record.event, PartitionTick):
            return
        event = record.event
        if event.run_id != run_id:  # type: ignore[attr-defined]
            return
        log.state, accepted = fold(log.state, event)  # type: ignore[arg-type]
        log.seen.append(
            Seen(
                offset=record.offset,
                appended_ms=record.appended_ms,
                event=event,
                accepted=accepted,
            )
        )

    async def _read_if_there(self, run_id: str) -> RunLog:
        """As `read`, and "not yet" while the broker is away."""
        try:
            return await self.read(run_id)
        except SpanFailed as error:
            raise AssertionError("the broker is away") from error

    async def until_ended(self, run_id: str) -> RunLog:
        """The run once it has its terminal, checked."""
        log = await self.until_ended_or(run_id, None)
        assert log is not None
        return log

    async def until_ended_or(
        self, run_id: str, worker: subprocess.Popen[bytes] | None
    ) -> RunLog | None:
        """As `until_ended`; None where the worker's process ends before the run does."""

        async def ended() -> tuple[RunLog | None] | None:
            gone = worker is not None and worker.poll() is not None
            log = await self._read_if_there(run_id)
            if log.state.ended:
                return (log,)
            return (None,) if gone else None

        (log,) = await eventually_async(ended, within_s=2 * PATIENCE_S, what="the run has ended")
        if log is not None:
            log.check()
        return log

    async def until_said(self, run_id: str, tokens: int, *, attempt: int = 1) -> RunLog:
        """The run once so many tokens of it are accepted in this attempt or a later one."""

        async def said() -> RunLog | None:
            log = await self._read_if_there(run_id)
            enough = log.state.n >= tokens and log.state.attempt >= attempt
            return log if enough else None

        return await eventually_async(said, what=f"{tokens} tokens were said")

    def writer_of(self, log: RunLog) -> str:
        """The worker of the attempt that was accepted last."""
        events = [seen.event for seen in log.of(AttemptStarted)]
        found = [event for event in events if isinstance(event, AttemptStarted)]
        return found[-1].worker_id

    async def _append(self, topic: Topic, event: Event) -> Appended:
        event_id = derived_event_id(secrets.token_hex(8), type(event).__name__)
        return await self._log.append(topic, event, event_id=event_id, wait_ms_max=ACK_WAIT_MS)


async def settled(workers: list[WorkerProcess]) -> None:
    """Return when these workers own all queues together, each some (with several), and none still what it gave up."""

    async def shared() -> bool:
        found = [worker.assignment() for worker in workers]
        owned = [assignment for assignment in found if assignment is not None]
        if len(owned) < len(workers) or not all(each.queues for each in owned):
            return False
        every = frozenset[int]().union(*(each.partitions for each in owned))
        queues = sum(each.queues for each in owned)
        return queues == PARTITIONS * len(Lane) and every == frozenset(range(PARTITIONS))

    await eventually_async(shared, what="the workers share all queues")
