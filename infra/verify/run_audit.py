"""The token log under audit: every run folded from its mint offset, and every record accepted or ignored for a reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import assert_never

from infra.verify.findings import LogTime, Record
from infra.verify.verdicts import Ignored, Kind, why_ignored
from processors.decisions.recorder import Seen, misplaced
from schemas.events.tokens import (
    AttemptStarted,
    PartitionTick,
    RunCancelled,
    RunEnded,
    RunEvent,
    RunQueued,
    RunRedirected,
    TokenEvent,
    TokensGenerated,
)
from schemas.ids import run_address
from schemas.run_fold import NEW_RUN, Ending, RunState, fold
from schemas.vocabulary import CancelReason, EndWriter


@dataclass(slots=True)
class AcceptedStream:
    """What was accepted of one run, checked by rules of its own, not by the fold that accepted it (I1 to I3)."""

    n: int = 0
    attempt: int = 0
    nonce: str | None = None
    nonces: set[str] = field(default_factory=set)
    text: str = ""
    terminals: int = 0
    broken: list[tuple[str, str]] = field(default_factory=list)

    def take(self, event: RunEvent, *, ends: bool) -> None:
        """The next accepted event; `ends`: the fold took it as the run's terminal."""
        if self.terminals:
            self._breaks("I2", f"{type(event).__name__} was accepted after the terminal")
        match event:
            case TokensGenerated():
                self._tokens(event)
            case AttemptStarted():
                if event.attempt != self.attempt + 1 or event.nonce in self.nonces:
                    self._breaks("I3", f"attempt {event.attempt} follows {self.attempt}")
                self.attempt, self.nonce = event.attempt, event.nonce
                self.nonces.add(event.nonce)
            case RunEnded(writer=EndWriter.WORKER) if event.end != self.n:
                self._breaks("I1", f"the terminal at {event.end} hides tokens up to {self.n}")
            case RunEnded() | RunQueued() | RunCancelled() | RunRedirected():
                pass
            case _:
                assert_never(event)
        self.terminals += ends
        if self.terminals > 1:
            self._breaks("I1", "two terminals were accepted")

    def _tokens(self, event: TokensGenerated) -> None:
        if event.index != self.n or event.count < 1:
            self._breaks("I2", f"tokens {event.index} were accepted at {self.n}")
        if event.nonce != self.nonce:
            self._breaks("I3", f"tokens {event.index} were accepted from another attempt")
        self.n += event.count
        self.text += event.text

    def _breaks(self, invariant: str, detail: str) -> None:
        self.broken.append((invariant, detail))


@dataclass(slots=True, kw_only=True)
class RunFacts:
    """One run. `whole`: everything since its mint offset is still kept. `twice` is the fold of every record taken twice (I12)."""

    run_id: str
    mint_offset: int
    whole: bool
    state: RunState = NEW_RUN
    twice: RunState = NEW_RUN
    accepted: AcceptedStream = field(default_factory=AcceptedStream)
    first_ms: int = 0
    queued_ms: int = 0
    ended_ms: int = 0
    end_offset: int | None = None

    @property
    def finished(self) -> bool:
        """Queued, and ended with an answer, perhaps an empty one."""
        return self.state.ending is Ending.FINISHED

    def take(self, record: Record, event: RunEvent) -> Ignored | None:
        """Fold one record. Gives why it was ignored, or None where it counted."""
        self.first_ms = self.first_ms or record.appended_ms
        before = self.state
        self.state, counted = fold(before, event)
        self.twice = fold(fold(self.twice, event)[0], event)[0]
        if not counted:
            return why_ignored(before, event)
        if isinstance(event, RunQueued):
            self.queued_ms = record.appended_ms
        if self.state.ended:
            self.ended_ms, self.end_offset = record.appended_ms, record.offset
        self.accepted.take(event, ends=self.state.ended)
        return None


class RunAudit:
    """Take the token log in, each partition in order from the first offset that is kept."""

    def __init__(self, time: LogTime, *, epoch: int | None = None) -> None:
        """Run ids of another `epoch` belong to other offsets and are only counted; None: every epoch is this one."""
        self._time = time
        self._epoch = epoch
        self._first: dict[int, int] = {}
        self.runs: dict[str, RunFacts] = {}
        self.counts: Counter[str] = Counter()
        self.ignored: Counter[tuple[Kind, str]] = Counter()
        # What admission wrote here, to be held against its decisions.
        self.admission: list[Record] = []

    def begins(self, partition: int, first: int) -> None:
        """The first offset that is kept of a partition; 0 where it is not said."""
        self._first[partition] = first

    def judged(self, run_id: str) -> bool:
        """Whether the token log can say everything about this run. Raises BadId."""
        address = run_address(run_id)
        own = self._epoch is None or address.epoch == self._epoch
        return own and address.mint_offset >= self._first.get(address.partition, 0)

    def take(self, record: Record) -> Ignored | None:
        """Fold one record of the token log."""
        self._time.saw(record.appended_ms)
        event: TokenEvent = record.event  # type: ignore[assignment]
        if isinstance(event, PartitionTick):
            self.counts["ticks"] += 1
            return None
        seen = Seen(
            offset=record.offset,
            appended_ms=record.appended_ms,
            event_id=record.event_id,
            event=event,
        )
        if misplaced(record.partition, seen) is not None:
            self.counts["malformed token records"] += 1
            return None
        run = self.runs.get(event.run_id)
        if run is None:
            run = self.runs[event.run_id] = RunFacts(
                run_id=event.run_id,
                mint_offset=run_address(event.run_id).mint_offset,
                whole=self.judged(event.run_id),
            )
        if _by_admission(event):
            self.admission.append(record)
        ignored = run.take(record, event)
        if not run.whole:
            return ignored
        if ignored is not None:
            self.ignored[ignored.kind, type(event).__name__] += 1
        else:
            self._count(event)
        return ignored

    def _count(self, event: RunEvent) -> None:
        match event:
            case TokensGenerated():
                self.counts["deltas"] += 1
                self.counts["tokens"] += event.count
            case AttemptStarted():
                self.counts["attempts"] += 1
                if event.attempt == 2:
                    self.counts["runs with a second attempt"] += 1
            case RunCancelled():
                self.counts["cancels"] += 1
                self.counts[f"cancels: {event.reason}"] += 1
            case RunQueued() | RunEnded() | RunRedirected():
                pass
            case _:
                assert_never(event)


def _by_admission(event: RunEvent) -> bool:
    match event:
        case RunQueued() | RunRedirected():
            return True
        case RunEnded(writer=writer):
            return writer is EndWriter.ADMISSION
        case RunCancelled(reason=reason):
            return reason in (CancelReason.INTERRUPT, CancelReason.LIMITS)
        case _:
            return False
