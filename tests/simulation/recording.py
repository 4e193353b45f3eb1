"""The recorder's shell in the simulator, with the order of effects of `processors/recorder.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, cast

from processors.decisions.recorder import Concluded, Partition, ReadBack, Seen, misplaced
from schemas.events.tokens import PartitionTick, TokenEvent
from schemas.ids import derived_event_id
from schemas.topics import ACCOUNTS, OUTCOMES, TOKENS
from tests.simulation.log import Group, Record
from tests.simulation.process import Member
from tests.simulation.world import Send, World, keyed_partition

TICK_EVERY_MS: Final = 2_000
BATCH_RECORDS_MAX: Final = 12


@dataclass(slots=True)
class _Pending:
    """Outputs of one run on their way."""

    run_id: str
    partition: Partition
    sent: list[Send]


class Recorder(Member[int]):
    """One process of the group on the token log."""

    def __init__(self, world: World, group: Group[int]) -> None:
        super().__init__(world, "recorder", group, may_lose=False)
        self._positions: dict[int, int] = {}
        self._partitions: dict[int, Partition] = {}
        self._ticked_ms: dict[int, int] = {}
        self._pending: list[_Pending] = []
        self.actions += [self.take, self.acknowledge, self.overdue, self.tick, self.commit]

    def assigned(self, before: list[int]) -> None:
        self._partitions.clear()
        self._ticked_ms.clear()
        self._positions = {number: self.start_of(number) for number in self.owned}

    @property
    def open_runs(self) -> int:
        """Runs that owe a terminal, as far as this one has read."""
        return sum(partition.open_runs for partition in self._partitions.values())

    def take(self) -> bool:
        """Fold the next records of each partition."""
        did = False
        for number, position in self._positions.items():
            records = self.world.log.partition(TOKENS, number).records
            if position >= len(records):
                continue
            did = True
            partition = self._partitions.get(number)
            if partition is None:
                partition = self._partitions[number] = Partition(position)
            batch = records[position : position + self.world.rng.randint(1, BATCH_RECORDS_MAX)]
            for record in batch:
                self._take_one(number, partition, record)
            self._positions[number] = position + len(batch)
        return did

    def _take_one(self, number: int, partition: Partition, record: Record) -> None:
        seen = seen_of(record)
        assert misplaced(number, seen) is None, "C6: every record lies in its run's partition"
        step = partition.take(seen)
        if isinstance(step, ReadBack):
            self.world.sometimes["recorder read back"] += 1
            log = self.world.log.partition(TOKENS, number)
            span = log.records[step.mint_offset : step.through + 1]
            step = partition.replace(step, [seen_of(each) for each in span])
        if step is not None:
            self._conclude(partition, step)

    def _conclude(self, partition: Partition, done: Concluded) -> None:
        chat = keyed_partition(done.outcome.chat_id)
        account = keyed_partition(done.usage.account_id)
        sent = [
            self.producer.send(
                OUTCOMES, chat, done.outcome, event_id=done.outcome_id, cause_id=done.cause_id
            ),
            self.producer.send(
                ACCOUNTS, account, done.usage, event_id=done.usage_id, cause_id=done.cause_id
            ),
        ]
        self._pending.append(_Pending(done.run_id, partition, sent))
        if not self.world.order.recorder_commits_after_outputs:
            partition.acknowledged(done.run_id)

    def acknowledge(self) -> bool:
        """Report the outputs that are on the log."""
        done = [each for each in self._pending if all(send.acked for send in each.sent)]
        for each in done:
            each.partition.acknowledged(each.run_id)
            self._pending.remove(each)
        return bool(done)

    def overdue(self) -> bool:
        """End what is past its deadline."""
        did = False
        for number, partition in self._partitions.items():
            for late in partition.overdue():
                self.producer.send(
                    TOKENS, number, late.ended, event_id=late.event_id, cause_id=late.cause_id
                )
                did = True
        return did

    def tick(self) -> bool:
        """Move the partition's time while runs are open."""
        now = self.world.now_ms
        for number, partition in self._partitions.items():
            if not partition.open_runs:
                self._ticked_ms.pop(number, None)
            elif now - self._ticked_ms.setdefault(number, now) >= TICK_EVERY_MS:
                self._ticked_ms[number] = now
                event_id = derived_event_id(f"tokens/{number}/{partition.position}", "Tick")
                self.producer.send(TOKENS, number, PartitionTick(), event_id=event_id)
        return False  # Time alone is no progress.

    def commit(self) -> bool:
        """C3."""
        ready = {number: part.commit_offset() for number, part in self._partitions.items()}
        moved = {n: at for n, at in ready.items() if self.group.committed.get(n) != at}
        return bool(moved) and self.group.commit(self.name, self.generation, moved)


def seen_of(record: Record) -> Seen:
    """The record as the decisions know it."""
    return Seen(
        offset=record.offset,
        appended_ms=record.appended_ms,
        event_id=record.event_id,
        event=cast("TokenEvent", record.event),
    )
