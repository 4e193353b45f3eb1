"""The runs that this edge holds: folded from the tail of the token log, and fanned out to their viewers.

A run's id says from which offset on its records lie. The table keeps for each partition a *floor*: it has seen every record of every
run minted at or above it, and has forgotten none of those. So a run at or above the floor that is not held has no record yet, and a
run below it is known only by catch-up (`edge/catch_up.py`), which hands it in through `begin_load` and `finish_load`.

All of it is soft state: a run that was forgotten is read back from the log or from history.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

from edge.decisions.token_cursor import run_digest
from edge.decisions.viewer import DeltaShown, Shown, Transcript, joined
from edge.sse import frame
from infra.log.records import BadRecord, LogRecord
from schemas.events.tokens import PartitionTick, RunQueued, TokenEvent
from schemas.ids import BadId, RunAddress, run_address

ENDED_RUNS_MAX: Final = 2_000
ENDED_CHARS_MAX: Final = 32_000_000
ENDED_AGE_S_MAX: Final = 900.0
HELD_AGE_S_MIN: Final = 30.0
"""A run is held at least this long, so that one minted by an edge whose tail lags a little is still above the floor."""
UNDECIDED_AGE_S_MAX: Final = 600.0
RECENT_ENDS_MAX: Final = 64
RECENT_ACCOUNTS_MAX: Final = 20_000


class FrameSink(Protocol):
    """One viewer's connection. Never blocks: a viewer that cannot keep up closes itself."""

    def offer(self, data: bytes) -> None:
        """Whole frames, in order."""

    def end(self) -> None:
        """Nothing follows: the run ended, or this edge drains."""


class LiveRun:
    """One run: its transcript, who views it, and who waits for a change."""

    __slots__ = (
        "address",
        "digest",
        "held_since",
        "run_id",
        "sinks",
        "stored",
        "transcript",
        "waiting",
    )

    def __init__(self, run_id: str, address: RunAddress, held_since: float) -> None:
        self.run_id = run_id
        self.address = address
        self.digest = run_digest(run_id)
        self.transcript = Transcript()
        self.sinks: set[FrameSink] = set()
        self.held_since = held_since
        self.stored = False
        """Whether the store was seen to have the concluded run."""
        self.waiting: list[asyncio.Future[None]] = []
        """Who waits for a change."""

    def frames(self, shown: Iterable[Shown]) -> bytes:
        """The events as frames, joined."""
        return b"".join([frame(self.run_id, self.digest, one) for one in shown])

    async def changed(self) -> None:
        """Wait for the next accepted record, or `wake`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self.waiting:
                self.waiting.remove(waiter)

    def wake(self) -> None:
        """Let everyone who waits look again."""
        waiters, self.waiting = self.waiting, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    @property
    def idle(self) -> bool:
        """Nobody views it and nobody waits for it."""
        return not self.sinks and not self.waiting


class RunTable:
    """All runs that are held. Only the event loop touches it."""

    def __init__(self, *, epoch: int, starts: Mapping[int, int], now: Callable[[], float]) -> None:
        self.epoch = epoch
        self.positions: dict[int, int] = dict(starts)
        """The offset of the next record of each partition: where the fold of all runs stands."""
        self._floors: dict[int, int] = dict(starts)
        self._now = now
        self._runs: dict[str, LiveRun] = {}
        self._loading: dict[str, list[LogRecord]] = {}
        self._undecided: OrderedDict[str, float] = OrderedDict()
        self._ended: OrderedDict[str, float] = OrderedDict()
        self._ended_chars = 0
        self._by_chat: dict[str, dict[str, LiveRun]] = {}
        self._recent_ends: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()
        self._moved = asyncio.Event()
        self.newest_ms = 0
        """The newest append time seen: the broker's clock."""
        self.bad_records = 0
        self.writes = 0
        self.last_shown_ms = 0
        self.on_turned: Callable[[LiveRun, LogRecord], None] = lambda run, record: None
        """Told each accepted record of a run on the tail that is no delta, after it was folded."""
        self.on_written: Callable[[int], None] = lambda appended_ms: None
        """Told the append time of a record that was just written to its viewers."""

    # Reading

    def get(self, run_id: str) -> LiveRun | None:
        """The run, if it is held."""
        return self._runs.get(run_id)

    def knows(self, address: RunAddress) -> bool:
        """Whether a run at this address that is not held has no record yet."""
        floor = self._floors.get(address.partition)
        return address.epoch == self.epoch and floor is not None and address.mint_offset >= floor

    def expect(self, run_id: str) -> LiveRun:
        """The run, held from now on; for a run that the table `knows`. Call it before the run's first record can exist."""
        held = self._runs.get(run_id)
        if held is not None:
            return held
        address = run_address(run_id)
        assert self.knows(address), "a run below the floor is only known by catch-up"
        return self._hold(run_id, address)

    def runs_of_chat(self, chat_id: str) -> list[LiveRun]:
        """The admitted runs of the chat that are held, oldest first."""
        found = self._by_chat.get(chat_id)
        if not found:
            return []
        return sorted(
            found.values(), key=lambda run: (run.transcript.queued_ms, run.transcript.queued_offset)
        )

    def ended_runs(self, account_id: str) -> tuple[str, ...]:
        """Runs of the account that were seen to end lately: a set, never a counter."""
        return tuple(self._recent_ends.get(account_id, ()))

    @property
    def held(self) -> int:
        """How many runs are held."""
        return len(self._runs)

    def all_runs(self) -> list[LiveRun]:
        """Every run that is held."""
        return list(self._runs.values())

    async def reach(self, ends: Mapping[int, int]) -> None:
        """Wait until the fold of each of these partitions stands at this offset or beyond."""
        while any(self.positions[partition] < end for partition, end in ends.items()):
            self._moved.clear()
            await self._moved.wait()

    # Folding

    def apply(self, records: Iterable[LogRecord | BadRecord]) -> None:
        """Fold records of the tail, in order, and hand the frames to the viewers: for each run in one piece."""
        turns: dict[LiveRun, list[Shown]] = {}
        for record in records:
            self.positions[record.partition] = record.offset + 1
            if isinstance(record, BadRecord):
                self.bad_records += 1  # Parked by the topic's named reader.
                continue
            self.newest_ms = max(self.newest_ms, record.appended_ms)
            event: TokenEvent = record.envelope.event  # type: ignore[assignment]
            if isinstance(event, PartitionTick):
                continue
            if self._loading and event.run_id in self._loading:
                self._loading[event.run_id].append(record)
                continue
            run = self._runs.get(event.run_id) or self._first_seen(event.run_id, record.partition)
            if run is None:
                continue
            before = run.transcript.state
            shown = run.transcript.accept(record.offset, record.appended_ms, event)
            if run.transcript.state is before:
                continue  # Not accepted.
            if run.sinks:
                turn = turns.get(run)
                turns[run] = [*turn, *shown] if turn else list(shown)
                self.last_shown_ms = record.appended_ms
            if not (len(shown) == 1 and type(shown[0]) is DeltaShown):
                self._turned(run, queued_now=isinstance(event, RunQueued))
                self.on_turned(run, record)
            if run.waiting:
                run.wake()
        for run, turn in turns.items():
            self._fan_out(run, turn)
        self._moved.set()

    def _fan_out(self, run: LiveRun, turn: list[Shown]) -> None:
        if turn:
            data = run.frames(joined(turn))
            for sink in tuple(run.sinks):
                sink.offer(data)
            self.writes += len(run.sinks)
            self.on_written(self.last_shown_ms)
        if run.transcript.state.ended:
            for sink in tuple(run.sinks):
                sink.end()

    def _first_seen(self, run_id: str, partition: int) -> LiveRun | None:
        try:
            address = run_address(run_id)
        except BadId:
            return None
        if address.partition != partition or not self.knows(address):
            return None
        return self._hold(run_id, address)

    def _hold(self, run_id: str, address: RunAddress) -> LiveRun:
        run = LiveRun(run_id, address, self._now())
        self._runs[run_id] = run
        self._undecided[run_id] = run.held_since
        return run

    def _turned(self, run: LiveRun, *, queued_now: bool) -> None:
        """Keep the indices in step with a run that was queued or has ended."""
        state = run.transcript.state
        if queued_now and state.queued is not None:
            self._undecided.pop(run.run_id, None)
            self._by_chat.setdefault(state.queued.chat_id, {})[run.run_id] = run
        if state.ended and run.run_id not in self._ended:
            self._undecided.pop(run.run_id, None)
            self._ended[run.run_id] = self._now()
            self._ended_chars += len(state.text)
            if state.queued is not None:
                self._note_end(state.queued.account_id, run.run_id)

    def _note_end(self, account_id: str, run_id: str) -> None:
        ends = self._recent_ends.setdefault(account_id, OrderedDict())
        self._recent_ends.move_to_end(account_id)
        ends[run_id] = None
        if len(ends) > RECENT_ENDS_MAX:
            ends.popitem(last=False)
        if len(self._recent_ends) > RECENT_ACCOUNTS_MAX:
            self._recent_ends.popitem(last=False)

    # Catch-up

    def begin_load(self, run_id: str) -> int:
        """From now on the run's records are set aside. Gives the offset up to which (exclusive) the caller has to read."""
        assert run_id not in self._loading, "one load of a run at a time"
        self._loading[run_id] = []
        return self.positions[run_address(run_id).partition]

    def is_loading(self, run_id: str) -> bool:
        """Whether somebody reads this run back."""
        return run_id in self._loading

    def finish_load(self, run_id: str, transcript: Transcript) -> LiveRun | None:
        """Join what was read with what was set aside, exactly; hold the run if it has any record."""
        for record in self._loading.pop(run_id):
            transcript.accept(record.offset, record.appended_ms, record.event)  # type: ignore[arg-type]
        if transcript.last_offset < 0:
            return None
        run = LiveRun(run_id, run_address(run_id), self._now())
        run.transcript = transcript
        self._runs[run_id] = run
        self._undecided[run_id] = run.held_since
        self._turned(run, queued_now=True)
        return run

    def abandon_load(self, run_id: str) -> None:
        """The load failed; nothing is known."""
        self._loading.pop(run_id, None)

    # Forgetting

    def forget_old(self) -> None:
        """Keep ended and undecided runs within their limits. Runs that are viewed or open stay."""
        now = self._now()
        for run_id, since in list(self._undecided.items()):
            if now - since <= UNDECIDED_AGE_S_MAX:
                break
            if self._runs[run_id].idle:
                del self._undecided[run_id]
                self._forget(run_id)
        for run_id, since in list(self._ended.items()):
            age = now - since
            over = len(self._ended) > ENDED_RUNS_MAX or self._ended_chars > ENDED_CHARS_MAX
            if age <= HELD_AGE_S_MIN or (age <= ENDED_AGE_S_MAX and not over):
                break
            if self._runs[run_id].idle:
                del self._ended[run_id]
                self._ended_chars -= len(self._runs[run_id].transcript.state.text)
                self._forget(run_id)

    def _forget(self, run_id: str) -> None:
        run = self._runs.pop(run_id)
        partition = run.address.partition
        self._floors[partition] = max(self._floors[partition], run.address.mint_offset + 1)
        queued = run.transcript.state.queued
        if queued is not None:
            of_chat = self._by_chat.get(queued.chat_id, {})
            of_chat.pop(run_id, None)
            if not of_chat:
                self._by_chat.pop(queued.chat_id, None)
