"""What every simulated process stands on: the log, the clock, the seeded randomness, the network between process and broker.

A process hands records to its producer and goes on; the network appends them later, in order within a partition, and acknowledges
later still. A crash leaves some prefix of what was handed over on its way: those ghosts may be appended long after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from schemas.events import Event
from schemas.ids import partition_for_key
from schemas.topics import (
    ACCOUNT_SNAPSHOTS,
    ACCOUNTS,
    ADMISSIONS,
    CHATS,
    OUTCOMES,
    QUOTAS,
    TOKENS,
    USAGE,
    Topic,
    generations,
)
from schemas.vocabulary import Lane
from tests.simulation.log import Group, Log, Record

MODEL: Final = "model"
LANES: Final = (Lane.PLUS, Lane.FREE)
TOKEN_PARTITIONS: Final = 2
KEYED_PARTITIONS: Final = 2
TRACE_TAIL: Final = 60
# Without faults a producer is quick.
DRAIN_MOVES: Final = 6
# How often a stalled network does not move when it could.
STALLED_NETWORK_SHARE: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The orders of effects that the shells keep. All True in production; a mutation drops one."""

    commit_after_snapshots: bool = True
    snapshots_after_rows: bool = True
    snapshot_as_of_offset: bool = True
    tail_from_mint_offset: bool = True
    read_back_unknown_runs: bool = True
    recorder_commits_after_outputs: bool = True
    done_when_terminal_is_back: bool = True
    resume_waits_for_tail: bool = True
    read_back_joins_tail: bool = True


class Crashed(Exception):
    """The process ends here, as the real one does where it cannot go on."""


class Send:
    """A record handed to a producer."""

    __slots__ = ("acked", "cause_id", "event", "event_id", "offset", "on_ack", "partition", "topic")

    def __init__(
        self,
        topic: Topic,
        partition: int,
        event: Event,
        *,
        event_id: str,
        cause_id: str,
        on_ack: Callable[[int], None] | None,
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.event = event
        self.event_id = event_id
        self.cause_id = cause_id
        self.on_ack = on_ack
        self.acked = False
        self.offset = -1

    def acknowledge(self) -> None:
        """The broker's answer has come back."""
        self.acked = True
        if self.on_ack is not None:
            self.on_ack(self.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often what goes wrong, a step or a send. `focus`: the kind of process that it happens to, and that acts more often.

    `stall`: the network of one process hardly moves for a while.
    """

    focus: str = ""
    crash: float = 0.0
    pause: float = 0.0
    rebalance: float = 0.0
    duplicate: float = 0.0
    jump: float = 0.0
    skew: float = 0.0
    policy: float = 0.0
    lose_acked: float = 0.0
    fail_send: float = 0.0
    late_ack: float = 0.0
    stall: float = 0.0


CALM: Final = Faults()


class World:
    """Everything that is shared. `sometimes` counts what a batch of seeds must have seen."""

    def __init__(self, seed: int, *, order: Order, tracing: bool = False) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.faults = CALM
        self.order = order
        self.draining = False
        self.log = Log(
            {
                TOKENS: TOKEN_PARTITIONS,
                ACCOUNTS: KEYED_PARTITIONS,
                ACCOUNT_SNAPSHOTS: KEYED_PARTITIONS,
                ADMISSIONS: KEYED_PARTITIONS,
                QUOTAS: KEYED_PARTITIONS,
                USAGE: KEYED_PARTITIONS,
                CHATS: KEYED_PARTITIONS,
                OUTCOMES: KEYED_PARTITIONS,
                **{generations(MODEL, lane): TOKEN_PARTITIONS for lane in LANES},
            }
        )
        self.sometimes: Counter[str] = Counter()
        self.ghosts: list[Producer] = []
        self._drawn = 0
        self._trace: list[str] | None = [] if tracing else None

    def group(self, name: str, count: int) -> Group[int]:
        """A group over the partitions of one topic."""
        return Group(name, range(count), rng=self.rng)

    @property
    def now_ms(self) -> int:
        """The clock: the broker's and, since nobody compares them, everybody's own."""
        return self.log.now_ms

    def chance(self, probability: float) -> bool:
        """Drawn from the seed."""
        return self.rng.random() < probability

    def fresh(self, prefix: str) -> str:
        """A name that was never given before."""
        self._drawn += 1
        return f"{prefix}{self._drawn}"

    @property
    def tracing(self) -> bool:
        """Whether somebody will read the trace."""
        return self._trace is not None

    def trace(self, line: str) -> None:
        """Note one step of the schedule."""
        if self._trace is not None:
            self._trace.append(f"{self.now_ms % 10_000_000:>8} {line}")

    @property
    def schedule_tail(self) -> list[str]:
        """The last lines of the trace."""
        return (self._trace or [])[-TRACE_TAIL:]

    @property
    def schedule(self) -> list[str]:
        """The whole trace."""
        return self._trace or []


def keyed_partition(key: str) -> int:
    """Where records of this account or chat lie."""
    return partition_for_key(key, KEYED_PARTITIONS)


class Producer:
    """One process's way to the broker."""

    __slots__ = ("_acks", "_queue", "_world", "may_lose", "name", "stalled")

    def __init__(self, world: World, name: str, *, may_lose: bool = False) -> None:
        self.name = name
        # Whether this process has promised to survive that an acknowledged record is not there.
        self.may_lose = may_lose
        self.stalled = False
        self._world = world
        self._queue: list[Send] = []
        self._acks: list[Send] = []

    def send(
        self,
        topic: Topic,
        partition: int,
        event: Event,
        *,
        event_id: str,
        cause_id: str = "",
        on_ack: Callable[[int], None] | None = None,
    ) -> Send:
        """Hand a record over, without waiting."""
        send = Send(topic, partition, event, event_id=event_id, cause_id=cause_id, on_ack=on_ack)
        self._queue.append(send)
        return send

    @property
    def idle(self) -> bool:
        """Nothing is on its way in either direction."""
        return not self._queue and not self._acks

    def step(self) -> bool:
        """The network moves a little. Raises Crashed where a send failed."""
        if not self._queue and not self._acks:
            return False
        if self.stalled and self._world.chance(STALLED_NETWORK_SHARE):
            return False
        for _ in range(DRAIN_MOVES if self._world.draining else self._world.rng.choice((1, 1, 3))):
            if not self._move():
                break
        return True

    def _move(self) -> bool:
        """An acknowledgement arrives, or a record is appended."""
        world = self._world
        if self._acks and (not self._queue or world.chance(0.5)):
            self._acks.pop(0).acknowledge()
            return True
        if not self._queue:
            return False
        send = self._take()
        if self.may_lose and world.chance(world.faults.lose_acked):
            send.offset = world.log.end(send.topic, send.partition)
            world.sometimes["lost append"] += 1
            world.trace(f"{self.name}: LOST {_brief(send)}")
        elif world.chance(world.faults.fail_send):
            if world.chance(0.5):
                self._append(send)
            world.trace(f"{self.name}: not acknowledged, ends {_brief(send)}")
            raise Crashed(self.name)
        else:
            self._append(send)
        if world.chance(world.faults.late_ack):
            self._acks.append(send)
        else:
            send.acknowledge()
        return True

    def _take(self) -> Send:
        """Any send that no other one for its partition precedes."""
        queue = self._queue
        if len(queue) == 1:
            return queue.pop()
        picked = queue[int(self._world.rng.random() * len(queue))]
        for at, send in enumerate(queue):
            if send.partition == picked.partition and send.topic is picked.topic:
                return queue.pop(at)
        raise AssertionError("the picked one is in the queue")

    def _append(self, send: Send) -> Record:
        record = self._world.log.append(
            send.topic,
            send.partition,
            send.event,
            event_id=send.event_id,
            cause_id=send.cause_id,
            writer=self.name,
        )
        send.offset = record.offset
        if self._world.tracing:
            self._world.trace(f"{self.name}: {_brief(send)} @{record.offset}")
        return record

    def die(self) -> None:
        """The process is gone. What it handed over last may yet arrive."""
        world = self._world
        kept = world.rng.randint(0, len(self._queue))
        for send in self._queue:
            send.on_ack = None
        del self._queue[kept:]
        self._acks.clear()
        if self._queue:
            world.ghosts.append(self)

    def haunt(self) -> bool:
        """Append one record of a dead process. True while there are more."""
        if self._queue:
            world = self._world
            send = self._queue.pop(0)
            self._append(send)
            world.sometimes["append by a dead process"] += 1
        return bool(self._queue)


def _brief(send: Send) -> str:
    event = send.event
    run = str(getattr(event, "run_id", ""))[-6:]
    said = [
        f"{name}={getattr(event, name)}"
        for name in ("attempt", "nonce", "index", "count", "cause", "end", "reason", "account_id")
        if getattr(event, name, None) is not None
    ]
    return f"{send.topic.name}/{send.partition} {type(event).__name__} {run} {' '.join(said)}"
