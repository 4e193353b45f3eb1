"""Admission's shell in the simulator: the same order of effects as `processors/account_ledger.py`, by the same decisions.

Outputs are sent without waiting. A save covers the records whose outputs are acknowledged: rows, then (acknowledged) snapshots, then
(acknowledged) the commit. The process may die between any two of these, and two processes may believe that a partition is theirs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import assert_never, cast

from processors.decisions.account_partition import AccountPartition, Decided, Save, plan_save
from processors.decisions.account_state import AccountOutput, output_id, snapshot
from schemas.events.account_snapshots import (
    AccountSnapshot,
    AccountSnapshotEvent,
    IdempotencyKeyBound,
    LadderKept,
    LimitsKept,
    RunKnown,
)
from schemas.events.accounts import AccountEvent
from schemas.events.admissions import PromptAdmitted, PromptRefused
from schemas.events.quotas import QuotaReleased, QuotaReserved
from schemas.events.tokens import RunCancelled, RunEnded, RunQueued, RunRedirected
from schemas.events.usage import UsageSettled
from schemas.ids import derived_event_id, run_address
from schemas.topics import ACCOUNT_SNAPSHOTS, ACCOUNTS, ADMISSIONS, QUOTAS, TOKENS, USAGE, Topic
from tests.simulation.log import Group
from tests.simulation.process import Member
from tests.simulation.world import Send, World, keyed_partition

StateRow = AccountSnapshot | RunKnown | IdempotencyKeyBound | LimitsKept | LadderKept


@dataclass(slots=True)
class _InFlight:
    decided: Decided
    sent: list[Send]

    @property
    def delivered(self) -> bool:
        return all(send.acked for send in self.sent)


@dataclass(slots=True)
class _Owned:
    """A partition while we believe that it is ours. `state` None: it is not loaded."""

    number: int
    position: int
    state: AccountPartition | None = None
    rewriting: list[Send] = field(default_factory=list)
    in_flight: deque[_InFlight] = field(default_factory=deque)


class _Stage(Enum):
    ROWS = auto()
    SNAPSHOTS = auto()
    COMMIT = auto()


@dataclass(slots=True)
class _Saving:
    """One save of one partition under way. `waiting` are the sends of its stage."""

    owned: _Owned
    plan: Save
    upto: int
    stage: _Stage
    waiting: list[Send]


class Admission(Member[int]):
    """One process of the group on chat.accounts."""

    def __init__(self, world: World, group: Group[int]) -> None:
        super().__init__(world, "admission", group)
        self._partitions: dict[int, _Owned] = {}
        self._saving: list[_Saving] = []
        self.actions += [self.load, self.take, self.save, self.producer.step]

    # Assignment

    def assigned(self, before: list[int]) -> None:
        # Eager: everything is revoked first, and what comes back is loaded again.
        self._partitions = {
            number: _Owned(number=number, position=self.start_of(number)) for number in self.owned
        }

    def load(self) -> bool:
        """Read the rows of a new partition to their end; write again what lies out of order."""
        for owned in self._partitions.values():
            if owned.state is None:
                log = self.world.log.partition(ACCOUNT_SNAPSHOTS, owned.number)
                rows = [cast("AccountSnapshotEvent", record.event) for record in log.records]
                owned.state = AccountPartition(rows)
                if len(owned.state):
                    self.world.sometimes["snapshot restored"] += 1
                again = owned.state.rows_out_of_order()
                if again:
                    self.world.sometimes["snapshot rewritten"] += 1
                owned.rewriting = [self._send_row(owned.number, row) for row in again]
                return True
        return False

    # Deciding

    def take(self) -> bool:
        """Decide the next records and send what they bring."""
        did = False
        for owned in list(self._partitions.values()):
            if owned.state is None or not all(send.acked for send in owned.rewriting):
                continue
            records = self.world.log.partition(ACCOUNTS, owned.number).records
            if owned.position < len(records):
                self._take_next(owned, owned.state)
                did = True
        return did

    def _take_next(self, owned: _Owned, state: AccountPartition) -> None:
        record = self.world.log.partition(ACCOUNTS, owned.number).records[owned.position]
        decided = state.take(
            offset=record.offset,
            appended_ms=record.appended_ms,
            event_id=record.event_id,
            event=cast("AccountEvent", record.event),
        )
        owned.position += 1
        if decided.outputs and self.group.owners.get(owned.number) != self.name:
            self.world.sometimes["zombie owner decided"] += 1
        sent = []
        for output in decided.outputs:
            topic, partition = _place(output)
            sent.append(
                self.producer.send(
                    topic,
                    partition,
                    output,
                    event_id=output_id(decided.event_id, output),
                    cause_id=record.event_id,
                )
            )
        owned.in_flight.append(_InFlight(decided, sent))

    # Saving

    def save(self) -> bool:
        """The next step of the save under way, or the start of one."""
        if not self._saving:
            return self._begin_save()
        did = False
        # As in the real shell, a stage begins when that before it is acknowledged in all partitions.
        if not all(send.acked for saving in self._saving for send in saving.waiting):
            return False
        for saving in self._saving:
            did = self._next_stage(saving) or did
        self._saving = [saving for saving in self._saving if saving.stage is not _Stage.COMMIT]
        return did

    def _begin_save(self) -> bool:
        order = self.world.order
        for owned in self._partitions.values():
            span: list[Decided] = []
            while owned.in_flight and owned.in_flight[0].delivered:
                span.append(owned.in_flight.popleft().decided)
            if not span or owned.state is None:
                continue
            plan = plan_save(span)
            if not order.snapshot_as_of_offset:
                state = owned.state
                plan = replace(
                    plan, accounts=tuple(state.account(each.account_id) for each in plan.accounts)
                )
            saving = _Saving(owned, plan, span[-1].offset + 1, _Stage.ROWS, [])
            if order.snapshots_after_rows:
                saving.waiting = [self._send_row(owned.number, row) for row in plan.rows]
            if not order.commit_after_snapshots:
                self._commit(saving)
            self._saving.append(saving)
        return bool(self._saving)

    def _next_stage(self, saving: _Saving) -> bool:
        match saving.stage:
            case _Stage.ROWS:
                saving.stage = _Stage.SNAPSHOTS
                saving.waiting = [
                    self._send_row(saving.owned.number, snapshot(account))
                    for account in saving.plan.accounts
                ]
            case _Stage.SNAPSHOTS:
                saving.stage = _Stage.COMMIT
                if not self.world.order.snapshots_after_rows:
                    for row in saving.plan.rows:
                        self._send_row(saving.owned.number, row)
                self._commit(saving)
            case _Stage.COMMIT:
                raise AssertionError("a committed save is over")
            case _:
                assert_never(saving.stage)
        return True

    def _commit(self, saving: _Saving) -> None:
        owned = saving.owned
        assert owned.state is not None, "what is saved was loaded"
        removable = owned.state.saved(saving.plan)
        assert not removable, "a seed lasts less than the 24 h of K2"
        if self._partitions.get(owned.number) is owned:
            self.group.commit(self.name, self.generation, {owned.number: saving.upto})

    def _send_row(self, number: int, row: StateRow) -> Send:
        match row:
            case LimitsKept() | LadderKept():
                event_id = derived_event_id(f"{number}", type(row).__name__, row.source_offset)
            case AccountSnapshot():
                event_id = derived_event_id(row.account_id, "AccountSnapshot", row.applied_offset)
            case RunKnown() | IdempotencyKeyBound():
                event_id = derived_event_id(row.run_id, type(row).__name__, row.source_offset)
            case _:
                assert_never(row)
        return self.producer.send(ACCOUNT_SNAPSHOTS, number, row, event_id=event_id)


def _place(output: AccountOutput) -> tuple[Topic, int]:
    match output:
        case QuotaReserved() | QuotaReleased():
            return QUOTAS, keyed_partition(output.account_id)
        case UsageSettled():
            return USAGE, keyed_partition(output.account_id)
        case PromptAdmitted() | PromptRefused():
            return ADMISSIONS, keyed_partition(output.chat_id)
        case RunQueued() | RunEnded() | RunRedirected() | RunCancelled():
            return TOKENS, run_address(output.run_id).partition
        case _:
            assert_never(output)
