"""The edge's shell in the simulator: mint, submit, follow the token log, serve viewers, cancel, give up.

A run that the tail began too late for is read back from its mint offset while what the tail brings for it waits, and both are
joined at the exact offset.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, cast

from edge.decisions.viewer import Shown, Transcript
from schemas.events.accounts import LoadView, PromptSubmitted
from schemas.events.tokens import PartitionTick, RunCancelled, RunEvent, TokenEvent
from schemas.ids import RunAddress, derived_event_id, mint_run_id, run_address
from schemas.run_fold import Ending
from schemas.topics import ACCOUNTS, TOKENS
from schemas.vocabulary import CancelReason
from tests.simulation.clients import Client, Intent
from tests.simulation.log import Record
from tests.simulation.process import Process
from tests.simulation.viewers import Viewer
from tests.simulation.world import MODEL, TOKEN_PARTITIONS, World, keyed_partition

DECISION_WAIT_MS_MAX: Final = 6_000
RECENT_ENDS_MAX: Final = 64
TAIL_RECORDS_MAX: Final = 12
ID_KEY: Final = b"simulated-secret"


@dataclass(slots=True)
class _Waiting:
    """A POST that waits for the decision on its run."""

    intent: Intent
    sent_ms: int


@dataclass(slots=True)
class _Load:
    """A run being read back up to `end`; `behind` is what the tail brought meanwhile."""

    end: int
    behind: list[Record] = field(default_factory=list)


class Edge(Process):
    """One edge process. Its memory is soft: it begins at the end of the log and reads back what it is asked for."""

    def __init__(self, world: World, client: Client) -> None:
        super().__init__(world, "edge")
        self._client = client
        self._positions = [world.log.end(TOKENS, number) for number in range(TOKEN_PARTITIONS)]
        self._floors = list(self._positions)
        self._runs: dict[str, Transcript] = {}
        self._loads: dict[str, _Load] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._sinks: dict[str, list[Viewer]] = {}
        self._ends: dict[str, dict[str, None]] = {}
        self._leaves: dict[str, str] = {}
        self.actions += [self.follow, self.submit, self.follow, self.finish_load, self.give_up]
        self.actions += [self.cancel, self.forget]

    # Submitting

    def submit(self) -> bool:
        """A client POSTs a message."""
        intent = None if self.world.draining else self._client.next_intent()
        if intent is None:
            return False
        rng = self.world.rng
        partition = int(rng.random() * TOKEN_PARTITIONS)
        run_id = mint_run_id(
            key=ID_KEY,
            account_id=intent.account_id,
            address=RunAddress(
                epoch=1, partition=partition, mint_offset=self._positions[partition]
            ),
            random=rng.getrandbits(80).to_bytes(10, "big"),
        )
        self._runs[run_id] = Transcript()
        self._waiting[run_id] = _Waiting(intent, self.world.now_ms)
        message_id = self.world.fresh("msg-")
        self.producer.send(
            ACCOUNTS,
            keyed_partition(intent.account_id),
            PromptSubmitted(
                run_id=run_id,
                account_id=intent.account_id,
                tier=intent.tier,
                chat_id=intent.chat_id,
                user_message_id=f"{message_id}-user",
                assistant_message_id=f"{message_id}-answer",
                parent_id=None if intent.from_root else self._leaves.get(intent.chat_id),
                parent_given=intent.from_root,
                content=intent.content,
                model=MODEL,
                max_output_tokens=intent.output_tokens,
                on_busy=intent.on_busy,
                idempotency_key=intent.key,
                fingerprint=intent.fingerprint,
                prompt_tokens={MODEL: intent.input_tokens},
                load=LoadView(pressure=4 if self.world.chance(0.03) else 0),
                ended_runs=tuple(self._ends.get(intent.account_id, ())),
            ),
            event_id=derived_event_id(run_id, "PromptSubmitted"),
        )
        self._client.submitted(intent, run_id)
        return True

    def give_up(self) -> bool:
        """Answer 503 to who waited too long. Without a key nobody will come back, so the run must not go on."""
        for run_id, waiting in self._waiting.items():
            if self.world.now_ms - waiting.sent_ms > DECISION_WAIT_MS_MAX:
                del self._waiting[run_id]
                if waiting.intent.key is None:
                    self._append_cancel(run_id, CancelReason.GAVE_UP)
                    self.world.sometimes["gave up"] += 1
                return True
        return False

    def cancel(self) -> bool:
        """A client cancels a run, at any time: before it is queued, in mid-answer, twice, after its end."""
        if self.world.draining or not self.world.chance(0.03):
            return False
        run_id = self._client.run_to_cancel()
        if run_id is None:
            return False
        self._append_cancel(run_id, CancelReason.USER)
        return True

    def _append_cancel(self, run_id: str, reason: CancelReason) -> None:
        self.producer.send(
            TOKENS,
            run_address(run_id).partition,
            RunCancelled(run_id=run_id, reason=reason),
            event_id=derived_event_id(run_id, f"RunCancelled {reason.value}"),
        )

    # Following

    def follow(self) -> bool:
        """Read on in each partition of the token log."""
        did = False
        for number, position in enumerate(self._positions):
            records = self.world.log.partition(TOKENS, number).records
            if position >= len(records):
                continue
            did = True
            batch = records[position : position + self.world.rng.randint(1, TAIL_RECORDS_MAX)]
            for record in batch:
                self._positions[number] = record.offset + 1
                event = cast("TokenEvent", record.event)
                if not isinstance(event, PartitionTick):
                    self._apply(number, record, event)
        return did

    def _apply(self, number: int, record: Record, event: RunEvent) -> None:
        run_id = event.run_id
        load = self._loads.get(run_id)
        if load is not None:
            load.behind.append(record)
            return
        run = self._runs.get(run_id)
        if run is None:
            if run_address(run_id).mint_offset < self._floors[number]:
                return
            run = self._runs[run_id] = Transcript()
        shown = run.accept(record.offset, record.appended_ms, event)
        if not shown:
            return
        for viewer in tuple(self._sinks.get(run_id, ())):
            self._push(run_id, viewer, shown)
        self._turned(run_id, run)

    def _push(self, run_id: str, viewer: Viewer, shown: tuple[Shown, ...]) -> None:
        if not viewer.receive(shown):
            self._sinks[run_id].remove(viewer)

    def _turned(self, run_id: str, run: Transcript) -> None:
        state = run.state
        if state.queued is not None and state.ended:
            self._ends.setdefault(state.queued.account_id, {})[run_id] = None
            self._leaves[state.queued.chat_id] = state.queued.assistant_message_id
        waiting = self._waiting.get(run_id)
        if waiting is None or (state.queued is None and not state.ended):
            return
        del self._waiting[run_id]
        match state.ending:
            case Ending.REFUSED:
                assert state.refusal is not None, "admission states it"
                self._client.refused(waiting.intent, run_id, state.refusal.reason)
            case Ending.REDIRECTED:
                self._client.redirected(waiting.intent, run_id, state.redirected_to)
            case _:
                self._client.admitted(waiting.intent, run_id)

    def forget(self) -> bool:
        """Forget an ended run that nobody views: from then on it and all that were minted before it are known by reading back only."""
        if self.world.draining or not self.world.chance(0.2):
            return False
        for run_id, run in self._runs.items():
            if run.state.ended and not self._sinks.get(run_id) and run_id not in self._waiting:
                address = run_address(run_id)
                floor = max(self._floors[address.partition], address.mint_offset + 1)
                self._floors[address.partition] = floor
                del self._runs[run_id]
                self.world.sometimes["edge forgot"] += 1
                return True
        return False

    # Viewers

    def connect(self, viewer: Viewer) -> None:
        """A viewer asks for what follows its cursor."""
        run_id = viewer.run_id
        run = self._runs.get(run_id)
        if run is None:
            address = run_address(run_id)
            if address.mint_offset >= self._floors[address.partition]:
                return  # It has no record yet: 404, and the viewer tries again.
            if run_id not in self._loads:
                self._loads[run_id] = _Load(end=self._positions[address.partition])
            return
        if viewer.position > run.end and self.world.order.resume_waits_for_tail:
            return  # Another edge had read further: first catch up, so that nothing is sent twice.
        self._tell(viewer, run)

    def _tell(self, viewer: Viewer, run: Transcript) -> None:
        while viewer.position < run.end:
            assert run.tells(viewer.position), "V5: a simulated answer is short"
            shown = run.after(viewer.position, chars_max=self.world.rng.choice((1, 7, 10_000)))
            assert shown, "V2: something follows"
            before = viewer.position
            if not viewer.receive(shown):
                return
            if viewer.position <= before:
                return  # Complained about; asking again would bring the same.
        viewer.edge = self.name
        self._sinks.setdefault(viewer.run_id, []).append(viewer)

    def disconnect(self, viewer: Viewer) -> None:
        """The connection is gone."""
        viewers = self._sinks.get(viewer.run_id, [])
        if viewer in viewers:
            viewers.remove(viewer)

    def finish_load(self) -> bool:
        """A run has been read back."""
        for run_id, load in self._loads.items():
            address = run_address(run_id)
            run = Transcript()
            log = self.world.log.partition(TOKENS, address.partition)
            span = log.records[address.mint_offset : load.end]
            behind = load.behind if self.world.order.read_back_joins_tail else []
            for record in (*span, *behind):
                event = cast("TokenEvent", record.event)
                if not isinstance(event, PartitionTick) and event.run_id == run_id:
                    run.accept(record.offset, record.appended_ms, event)
            del self._loads[run_id]
            if run.last_offset >= 0:
                self._runs[run_id] = run
                self._turned(run_id, run)
            self.world.sometimes["edge read back"] += 1
            return True
        return False
