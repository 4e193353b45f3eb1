"""One partition of the token log in memory, stamped as a broker would, with short ways to write a run's records."""

from __future__ import annotations

from dataclasses import dataclass, field

from processors.decisions.recorder import Seen
from schemas.events.tokens import (
    AttemptStarted,
    PartitionTick,
    RunCancelled,
    RunEnded,
    RunRedirected,
    TokenEvent,
    TokensGenerated,
)
from schemas.ids import RunAddress, mint_run_id
from schemas.run_fold import NEW_RUN, RunState, fold
from schemas.vocabulary import CancelReason, EndCause, EndWriter, Lane, Tier
from tests.run_samples import queued

PARTITION = 3
ID_KEY = b"k" * 32
ACCOUNT = "acc-1"


@dataclass(slots=True)
class TokenLog:
    """Appends at `now_ms`, which the test moves."""

    now_ms: int = 10_000
    records: list[Seen] = field(default_factory=list)
    minted: int = 0

    @property
    def end(self) -> int:
        return len(self.records)

    def mint(self, account: str = ACCOUNT) -> str:
        self.minted += 1
        return mint_run_id(
            key=ID_KEY,
            account_id=account,
            address=RunAddress(epoch=1, partition=PARTITION, mint_offset=self.end),
            random=self.minted.to_bytes(10, "big"),
        )

    def append(self, event: TokenEvent, event_id: str = "") -> Seen:
        seen = Seen(
            offset=self.end,
            appended_ms=self.now_ms,
            event_id=event_id or f"e-{self.end}",
            event=event,
        )
        self.records.append(seen)
        return seen

    def queued(self, run_id: str, *, deadline_ms: int = 1_000, account: str = ACCOUNT) -> Seen:
        return self.append(
            queued(
                run_id,
                account_id=account,
                chat_id="chat",
                user_message_id="user",
                assistant_message_id="answer",
                tier=Tier.FREE,
                lane=Lane.FREE,
                deadline_ms=deadline_ms,
            )
        )

    def attempt(self, run_id: str, number: int, nonce: str, input_tokens: int = 7) -> Seen:
        return self.append(
            AttemptStarted(
                run_id=run_id,
                attempt=number,
                nonce=nonce,
                worker_id="w",
                input_tokens=input_tokens,
            )
        )

    def tokens(self, run_id: str, nonce: str, index: int, text: str, count: int = 1) -> Seen:
        return self.append(
            TokensGenerated(run_id=run_id, nonce=nonce, index=index, count=count, text=text)
        )

    def stopped(self, run_id: str, nonce: str, end: int, cause: EndCause = EndCause.STOP) -> Seen:
        return self.append(
            RunEnded(run_id=run_id, cause=cause, writer=EndWriter.WORKER, nonce=nonce, end=end)
        )

    def cancelled(self, run_id: str, reason: CancelReason = CancelReason.USER) -> Seen:
        return self.append(RunCancelled(run_id=run_id, reason=reason))

    def refused(self, run_id: str) -> Seen:
        return self.append(
            RunEnded(run_id=run_id, cause=EndCause.REFUSED, writer=EndWriter.ADMISSION)
        )

    def redirected(self, run_id: str, to: str | None) -> Seen:
        return self.append(RunRedirected(run_id=run_id, account_id=ACCOUNT, to_run_id=to))

    def tick(self) -> Seen:
        return self.append(PartitionTick())

    def truth(self, run_id: str) -> tuple[RunState, Seen | None]:
        """The run folded from the beginning, and its accepted terminal."""
        state, terminal = NEW_RUN, None
        for seen in self.records:
            if isinstance(seen.event, PartitionTick) or seen.event.run_id != run_id:
                continue
            state, accepted = fold(state, seen.event)
            if accepted and state.ended:
                terminal = seen
        return state, terminal
