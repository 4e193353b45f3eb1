"""One attempt in the simulator: the order of effects of `inference_workers/attempt.py`, one step at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from inference_workers.decisions import generation as generations
from inference_workers.decisions.generation import (
    BARREN_WORKERS_MAX,
    ENGINE_FAILURES_MAX,
    Generation,
    Loss,
    Phase,
    Sent,
    cause_of_full_grant,
)
from inference_workers.decisions.request_book import Request
from inference_workers.decisions.run_book import Followed, FollowedRun
from inference_workers.decisions.speech import Speech
from schemas.blocked_phrases import blocked_phrases
from schemas.events.tokens import AttemptStarted, RunEnded, RunEvent, TokensGenerated
from schemas.ids import derived_event_id
from schemas.topics import TOKENS
from schemas.vocabulary import EndCause, EndWriter
from tests.simulation.engine import Stream
from tests.simulation.world import Crashed, Producer, World


class SimulatedAttempt:
    """It holds a slot until `step` was called once more after it was over or lost."""

    def __init__(
        self,
        world: World,
        producer: Producer,
        *,
        request: Request,
        run: FollowedRun,
        engine_failures: int,
    ) -> None:
        queued = run.state.queued
        assert queued is not None, "only a queued run is attempted"
        self.request = request
        self.acked_offset = -1
        self.engine_failed = False
        self.world = world
        self._producer = producer
        self._run = run
        self._quota_limited = queued.quota_limited or request.event.quota_limited
        self._failures = engine_failures
        self._phrases = blocked_phrases(queued.blocked_phrases)
        self._speech = Speech(self._phrases, said_ids=(), said="")
        self._stream: Stream | None = None
        self._begun = False
        self._ending: EndCause | None = None
        self.generation: Generation = generations.begin(
            state=run.state,
            run_id=request.run_id,
            nonce=world.fresh("n"),
            grant=min(queued.granted_output_tokens, request.event.granted_output_tokens),
            now_ms=world.now_ms,
        )

    def seen(self, followed: Followed) -> None:
        """A record of the run came by on the tail."""
        if self.generation.phase is Phase.FENCING:
            self._run = followed.run  # G1
        self.generation = generations.seen(
            self.generation,
            followed.event,
            accepted=followed.accepted,
            after=followed.run.state,
        )

    def lose(self, why: Loss) -> None:
        """This attempt appends nothing more."""
        self.generation = generations.lose(self.generation, why)

    def tick(self) -> None:
        """Time passed. Raises Crashed where the broker is away for too long."""
        now = self.world.now_ms
        self.generation = generations.overdue(self.generation, now_ms=now)
        if generations.unacknowledged_too_long(self.generation, now_ms=now):
            raise Crashed("no acknowledgement")

    def step(self) -> bool:
        """The next effect, if there is one now."""
        generation = self.generation
        if not generation.open:
            return False
        if not self._begun:
            self._begun = True
            self._send(
                AttemptStarted(
                    run_id=generation.run_id,
                    attempt=generation.attempt,
                    nonce=generation.nonce,
                    worker_id=self._producer.name,
                    input_tokens=len(self.request.event.prompt_ids),
                ),
                generation.awaiting[0],
            )
            return True
        if generation.phase is not Phase.SPEAKING:
            return False
        if self._stream is None and self._ending is None:
            self._submit()
        if self._stream is not None and self._ending is None:
            self._hear(self._stream)
        return self.generation.open and self._flush()

    def _submit(self) -> None:
        if self.generation.tokens_left <= 0:
            self._ending = cause_of_full_grant(quota_limited=self._quota_limited)
        elif len(self._run.barren_workers) > BARREN_WORKERS_MAX:  # G7
            self.world.sometimes["barren run ended"] += 1
            self._ending = EndCause.ERROR
        else:
            state = self._run.state
            self._speech = Speech(self._phrases, said_ids=self._run.emitted_ids, said=state.text)
            if self._speech.blocked:
                self._ending = EndCause.BLOCKED
                return
            self._stream = Stream(
                self.world.rng,
                emitted=state.text,
                emitted_ids=self._run.emitted_ids,
                tokens_max=self.generation.tokens_left,
            )

    def _hear(self, stream: Stream) -> None:
        if self.world.chance(0.0 if self.world.draining else 0.02):
            self._engine_error()
            return
        for piece in stream.pieces():
            self._speech.hear(piece)
            if self._speech.blocked:
                self._ending = EndCause.BLOCKED
                return
        if not stream.full and not stream.stopped:
            return
        self._speech.end()
        if self._speech.blocked:
            self._ending = EndCause.BLOCKED
        elif stream.full:
            self._ending = cause_of_full_grant(quota_limited=self._quota_limited)
        else:
            self._ending = EndCause.STOP

    def _engine_error(self) -> None:
        self.engine_failed = True
        if self._failures + 1 >= ENGINE_FAILURES_MAX:
            self._ending = EndCause.ERROR
        else:
            self.lose(Loss.ENGINE_FAILED)

    def _flush(self) -> bool:
        now, due = self.world.now_ms, self._speech.due_ms
        if due is not None and (now >= due or self._ending is not None):
            piece = self._speech.take(now_ms=now)
            self.generation = generations.say(
                self.generation, index=piece.index, count=piece.count, now_ms=now
            )
            self._send(
                TokensGenerated(
                    run_id=self.generation.run_id,
                    nonce=self.generation.nonce,
                    index=piece.index,
                    count=piece.count,
                    text=piece.text,
                    ids=piece.ids,
                ),
                self.generation.awaiting[-1],
            )
            return True
        if due is None and self._ending is not None:
            self.generation = generations.end(self.generation, now_ms=now)
            self._send(
                RunEnded(
                    run_id=self.generation.run_id,
                    cause=self._ending,
                    writer=EndWriter.WORKER,
                    nonce=self.generation.nonce,
                    end=self.generation.said,
                ),
                self.generation.awaiting[-1],
            )
            return True
        return False

    def _send(self, event: RunEvent, sent: Sent) -> None:
        acknowledged: Callable[[int], None] = partial(self._acknowledged, sent)
        self._producer.send(
            TOKENS,
            self.request.queue.partition,
            event,
            event_id=derived_event_id(self.generation.nonce, sent.kind.value, sent.index),
            cause_id=self.request.event_id,
            on_ack=acknowledged,
        )

    def _acknowledged(self, sent: Sent, offset: int) -> None:
        self.acked_offset = max(self.acked_offset, offset)
        self.generation = generations.acknowledged(self.generation, sent, now_ms=self.world.now_ms)
