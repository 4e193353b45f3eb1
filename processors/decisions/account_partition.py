"""One partition of the account log in memory: its accounts, its known ids, its limits; what is saved of it, and how it is restored.

Rules (cited by assertions and tests):
  S1  A record is judged by the last limits below it (LIMITS_VERSIONS_MAX are kept), by the known ids below it, and by its account's
      state, so deciding it again after a crash gives the same outputs.
  S2  A save covers the records up to some offset whose outputs are all acknowledged. Its rows are acknowledged before its snapshots
      are sent, and its snapshots before a source record is. A snapshot is the account as it was at that offset.
  S3  Of the snapshots of one account the one with the highest applied offset counts, not the last written: a zombie may have written an
      older one later. Where they differ, the right one is written again, before compaction can drop it.
  S4  A copy of a record whose version is kept is no new version: part of a topic that is appended again must not bring an old policy
      back. The same limits by another record are one, so that a copy of that is known, too. New ones are held against every account
      with open runs (Q16), also when the record comes again after a crash: an account that was saved beyond it has had its cancels
      delivered.
  S5  The ladder's level (rules L1 to L4) follows from the partition's prompts. Its moves are kept by offset, so a record that is decided
      again is judged at the level it was judged at first: all since the last save, and older ones up to LADDER_MOVES_MAX in all.
  S6  A record that decodes and that no decision can use changes nothing. It is parked with its reason before its source record is
      acknowledged; whoever decides it again finds the same account, and so the same reason.
  S7  Who applies a policy writes it into one partition first, whose offset is its order in all others (`order`). There the highest order
      counts, in whatever order they come: so policies that are applied at the same time end alike in every partition. What has no order
      counts as it comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from processors.decisions.account import judge, lower, unfit
from processors.decisions.account_state import (
    AccountOutput,
    AccountState,
    Command,
    restored,
    snapshot,
)
from processors.decisions.known_ids import Facts, KnownIds
from processors.decisions.ladder import CALM, moved, saturation_ms
from schemas.events.account_snapshots import (
    AccountSnapshot,
    AccountSnapshotEvent,
    IdempotencyKeyBound,
    LadderKept,
    LadderMoved,
    LimitsKept,
    LimitsVersion,
    RunKnown,
)
from schemas.events.accounts import AccountEvent, LimitsChanged, PromptSubmitted, UsageMeasured
from schemas.events.tokens import RunQueued

LIMITS_VERSIONS_MAX: Final = 16
LADDER_MOVES_MAX: Final = 64
# Twice as many as a process decides before it must save.
UNSAVED_MOVES_MAX: Final = 8_000

Row = RunKnown | IdempotencyKeyBound | LimitsKept | LadderKept
PartitionRow = AccountSnapshot | LimitsKept | LadderKept


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What one record brought: outputs to send, rows to save, and the accounts that it changed, as of now. `event_id` is the record's.

    `unfit`: why it brought nothing and is to be parked (S6).
    """

    offset: int
    event_id: str = ""
    outputs: tuple[AccountOutput, ...] = ()
    rows: tuple[Row, ...] = ()
    accounts: tuple[AccountState, ...] = ()
    unfit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """What a span of decided records leaves behind: first the rows, then the snapshots (S2)."""

    rows: tuple[Row, ...]
    accounts: tuple[AccountState, ...]


def plan_save(decided: Sequence[Decided]) -> Save:
    """The save of these records, which are in order and whose outputs are acknowledged."""
    accounts: dict[str, AccountState] = {}
    for each in decided:
        for account in each.accounts:
            accounts[account.account_id] = account
    rows: list[Row] = []
    # Of a kind of which the partition has one row the newest says all.
    newest: dict[type[Row], Row] = {}
    for each in decided:
        for row in each.rows:
            if isinstance(row, LimitsKept | LadderKept):
                newest[type(row)] = row
            else:
                rows.append(row)
    return Save(rows=(*rows, *newest.values()), accounts=tuple(accounts.values()))


def limits_below(versions: Sequence[LimitsVersion], offset: int) -> LimitsChanged | None:
    """S1."""
    for version in reversed(versions):
        if version.source_offset < offset:
            return version.limits
    return None


def outranked(limits: LimitsChanged, by: LimitsChanged) -> bool:
    """S7. Whether these limits were put in order before the ones that are here."""
    return limits.order is not None and by.order is not None and limits.order < by.order


class AccountPartition:
    """The state of one partition. Build it from the rows of chat.account-snapshots, in any order."""

    def __init__(self, rows: Iterable[AccountSnapshotEvent] = ()) -> None:
        self._accounts: dict[str, AccountState] = {}
        self._saved: dict[str, AccountState] = {}
        self._limits: tuple[LimitsVersion, ...] = ()
        self._moves: tuple[LadderMoved, ...] = ()
        self._known = KnownIds()
        self._newest_ms = 0
        # Accounts, and kinds of the partition's own rows, of which a later row is not the newest.
        self._stale: set[str | type[Row]] = set()
        limits_offset = ladder_offset = -1
        for row in rows:
            match row:
                case AccountSnapshot():
                    self._restore(row)
                case RunKnown() | IdempotencyKeyBound():
                    self._known.learn(row)
                case LimitsKept():
                    if row.source_offset >= limits_offset:
                        self._limits, limits_offset = row.versions, row.source_offset
                        self._stale.discard(LimitsKept)
                    else:
                        self._stale.add(LimitsKept)
                case LadderKept():
                    if row.source_offset >= ladder_offset:
                        self._moves, ladder_offset = row.moves, row.source_offset
                        self._stale.discard(LadderKept)
                    else:
                        self._stale.add(LadderKept)
                case _:
                    assert_never(row)
        self._saved.update(self._accounts)
        self._saved_limits = self._limits
        self._saved_moves = self._moves

    def _restore(self, row: AccountSnapshot) -> None:
        """S3."""
        known = self._accounts.get(row.account_id)
        if known is None or row.applied_offset >= known.applied_offset:
            self._accounts[row.account_id] = restored(row)
            self._stale.discard(row.account_id)
        else:
            self._stale.add(row.account_id)

    def __len__(self) -> int:
        return len(self._accounts)

    @property
    def limits(self) -> tuple[LimitsVersion, ...]:
        """The versions of the limits, oldest first."""
        return self._limits

    @property
    def level(self) -> int:
        """The ladder's level after the last prompt taken."""
        return self._moves[-1].level if self._moves else CALM.level

    @property
    def known(self) -> KnownIds:
        """The run ids and idempotency keys."""
        return self._known

    def account(self, account_id: str) -> AccountState:
        """The account as of the last record taken."""
        return self._accounts.get(account_id) or AccountState(account_id=account_id)

    def take(self, *, offset: int, appended_ms: int, event_id: str, event: AccountEvent) -> Decided:
        """Judge one record and remember what it brought."""
        self._newest_ms = max(self._newest_ms, appended_ms)
        match event:
            case LimitsChanged():
                return self._take_limits(offset, event_id, event)
            case PromptSubmitted() | UsageMeasured():
                command = Command(
                    offset=offset, appended_ms=appended_ms, event_id=event_id, event=event
                )
                return self._take_command(command)
            case _:
                assert_never(event)

    def _take_limits(self, offset: int, event_id: str, event: LimitsChanged) -> Decided:
        rows = self._new_limits(offset, event_id, event)
        if not any(version.source_offset == offset for version in self._limits):
            return Decided(offset=offset)  # S4
        changed: list[AccountState] = []
        outputs: list[AccountOutput] = []
        for account in [each for each in self._accounts.values() if each.open]:
            after, cancels = lower(account, event, offset=offset)
            if cancels:
                self._accounts[after.account_id] = after
                changed.append(after)
                outputs.extend(cancels)
        return Decided(
            offset=offset,
            event_id=event_id,
            outputs=tuple(outputs),
            rows=rows,
            accounts=tuple(changed),
        )

    def _new_limits(
        self, offset: int, event_id: str, event: LimitsChanged
    ) -> tuple[LimitsKept, ...]:
        """S4, S7. Take the version in, if it is one; the row to save for it."""
        newest = self._limits[-1] if self._limits else None
        if newest is not None and (
            newest.source_offset >= offset or outranked(event, newest.limits)
        ):
            return ()
        if any(version.event_id == event_id for version in self._limits):
            return ()
        version = LimitsVersion(source_offset=offset, limits=event, event_id=event_id)
        self._limits = (*self._limits, version)[-LIMITS_VERSIONS_MAX:]
        return (self._limits_row(self._limits),)

    def _take_command(self, command: Command) -> Decided:
        limits = limits_below(self._limits, command.offset)
        level, moves = self._judged_at(command, limits)
        before = self.account(command.event.account_id)
        if command.offset <= before.applied_offset:
            return Decided(offset=command.offset, rows=moves)  # Q1
        if reason := unfit(before, command.event):
            return Decided(offset=command.offset, unfit=reason)  # S6
        facts = self._facts(command)
        after, outputs = judge(before, command, facts, limits, level)
        self._accounts[after.account_id] = after
        rows = _new_rows(command, facts, outputs)
        for row in rows:
            self._known.learn(row)
        return Decided(
            offset=command.offset,
            event_id=command.event_id,
            outputs=tuple(outputs),
            rows=(*rows, *moves),
            accounts=(after,),
        )

    def _judged_at(
        self, command: Command, limits: LimitsChanged | None
    ) -> tuple[int, tuple[LadderKept, ...]]:
        """S5. The level for this record, and the row to save where it moved."""
        newest = self._moves[-1] if self._moves else CALM
        prompt = command.event
        if not isinstance(prompt, PromptSubmitted) or limits is None:
            return newest.level, ()
        if newest.source_offset >= command.offset:
            below = [each for each in self._moves if each.source_offset <= command.offset]
            return (below[-1] if below else CALM).level, ()
        now = moved(
            limits.ladder,
            newest,
            saturation=saturation_ms(prompt.load),
            offset=command.offset,
            appended_ms=command.appended_ms,
        )
        if now is newest:
            return newest.level, ()
        self._moves = (*self._moves, now)[-UNSAVED_MOVES_MAX:]
        return now.level, (self._ladder_row(self._moves),)

    def _facts(self, command: Command) -> Facts:
        match command.event:
            case PromptSubmitted() as prompt:
                return self._known.facts(
                    account_id=prompt.account_id,
                    run_id=prompt.run_id,
                    idempotency_key=prompt.idempotency_key,
                    offset=command.offset,
                    appended_ms=command.appended_ms,
                )
            case UsageMeasured():
                return Facts()
            case _:
                assert_never(command.event)

    def saved(self, save: Save) -> list[RunKnown | IdempotencyKeyBound]:
        """Note that a save is acknowledged, and give the rows that may be removed (K4)."""
        for account in save.accounts:
            self._saved[account.account_id] = account
        for row in save.rows:
            if isinstance(row, LimitsKept):
                self._saved_limits = row.versions
            elif isinstance(row, LadderKept):
                before = sum(1 for move in self._moves if move.source_offset < row.source_offset)
                kept_from = max(0, min(before, len(self._moves) - LADDER_MOVES_MAX))
                self._moves = self._moves[kept_from:]
                self._saved_moves = row.moves[-LADDER_MOVES_MAX:]
        return self._known.forget(self._newest_ms)

    def rows_out_of_order(self) -> list[PartitionRow]:
        """S3. What has to be written again at assignment."""
        return [
            row
            for row in self.rows_to_refresh()
            if (row.account_id if isinstance(row, AccountSnapshot) else type(row)) in self._stale
        ]

    def rows_to_refresh(self) -> list[PartitionRow]:
        """S3. Every saved state, for the regular writing again: after it no zombie's row is the last one."""
        rows: list[PartitionRow] = [snapshot(account) for account in self._saved.values()]
        if self._saved_limits:
            rows.append(self._limits_row(self._saved_limits))
        if self._saved_moves:
            rows.append(self._ladder_row(self._saved_moves))
        return rows

    @staticmethod
    def _limits_row(versions: tuple[LimitsVersion, ...]) -> LimitsKept:
        return LimitsKept(source_offset=versions[-1].source_offset, versions=versions)

    @staticmethod
    def _ladder_row(moves: tuple[LadderMoved, ...]) -> LadderKept:
        return LadderKept(source_offset=moves[-1].source_offset, moves=moves)


def _new_rows(
    command: Command, facts: Facts, outputs: Sequence[AccountOutput]
) -> tuple[RunKnown | IdempotencyKeyBound, ...]:
    prompt = command.event
    if not isinstance(prompt, PromptSubmitted) or facts.run_known:
        return ()
    known = RunKnown(
        account_id=prompt.account_id,
        run_id=prompt.run_id,
        source_offset=command.offset,
        appended_ms=command.appended_ms,
    )
    admitted = any(isinstance(output, RunQueued) for output in outputs)
    if prompt.idempotency_key is None or not admitted:
        return (known,)
    bound = IdempotencyKeyBound(
        account_id=prompt.account_id,
        idempotency_key=prompt.idempotency_key,
        run_id=prompt.run_id,
        fingerprint=prompt.fingerprint,
        source_offset=command.offset,
        appended_ms=command.appended_ms,
    )
    return (known, bound)
