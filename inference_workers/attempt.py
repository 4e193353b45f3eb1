"""One attempt at one run: the engine's stream becomes records on the run's stream.

What may be appended is decided in `decisions/generation.py` and `decisions/speech.py`; here are the engine, the producer and
the waiting. The tail calls `seen` for every record of the run, which may end the attempt at any moment; the engine is then
told in the same instant.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, NoReturn, assert_never

from inference_workers.decisions import generation as generations
from inference_workers.decisions.delta_buffer import Piece
from inference_workers.decisions.generation import (
    BARREN_WORKERS_MAX,
    Generation,
    Loss,
    Phase,
    Sent,
    cause_of_full_grant,
)
from inference_workers.decisions.request_book import Request
from inference_workers.decisions.run_book import Followed, FollowedRun
from inference_workers.decisions.speech import Speech
from inference_workers.engine import (
    Dead,
    Delta,
    EndReason,
    Engine,
    EngineHealth,
    EngineStream,
    Finish,
    GenRequest,
    Invalid,
    Saturated,
    TooLong,
)
from producers.log_writer import Appended, AppendFailed, LogWriter
from schemas.blocked_phrases import blocked_phrases
from schemas.events.tokens import AttemptStarted, RunCancelled, RunEnded, RunEvent, TokensGenerated
from schemas.ids import derived_event_id
from schemas.topics import TOKENS
from schemas.vocabulary import EndCause, EndWriter

logger = logging.getLogger(__name__)

INSTANT_TURNS_MAX: Final = 5
ENGINE_DETAIL_CHARS_MAX: Final = 200


class ProducerUnusable(Exception):
    """A record was not acknowledged, and nothing is known of it: the process is to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the run ends. `detail` is for operators."""

    cause: EndCause
    detail: str = ""


class Attempt:
    """`run` returns when the attempt is over or lost. It holds an engine slot until `slot_freed` returns.

    Where the engine is gone neither returns: whoever owns the engine ends the process, and another worker goes on.
    """

    def __init__(
        self,
        *,
        request: Request,
        run: FollowedRun,
        nonce: str,
        worker_id: str,
        engine: Engine,
        log: LogWriter,
        now_ms: Callable[[], int],
        engine_failures: int,
        on_defect: Callable[[BaseException], None],
    ) -> None:
        queued = run.state.queued
        assert queued is not None, "only a queued run is attempted"
        self.request = request
        self.acked_offset = -1
        self.engine_failed = False
        self.cancelled_ms: int | None = None
        self._run = run
        self._quota_limited = queued.quota_limited or request.event.quota_limited
        self._worker_id = worker_id
        self._engine = engine
        self._log = log
        self._now_ms = now_ms
        self._failures = engine_failures
        self._on_defect = on_defect
        self._generation = generations.begin(
            state=run.state,
            run_id=request.run_id,
            nonce=nonce,
            grant=min(queued.granted_output_tokens, request.event.granted_output_tokens),
            now_ms=now_ms(),
        )
        self._request_id = f"{request.run_id}.{nonce}"
        self._phrases = blocked_phrases(queued.blocked_phrases)
        self._speech = Speech(self._phrases, said_ids=(), said="")
        self._finish: Finish | None = None
        self._stream: EngineStream | None = None
        self._started = False
        self._wake = asyncio.Event()

    @property
    def generation(self) -> Generation:
        """Where the attempt stands."""
        return self._generation

    @property
    def unacknowledged(self) -> bool:
        """Whether a record of an attempt that was begun, with the engine or on the log, is not acknowledged yet."""
        begun = self._stream is not None or self._started
        return begun and any(sent.acked_ms is None for sent in self._generation.awaiting)

    def seen(self, followed: Followed) -> None:
        """A record of the run came by on the tail."""
        if self._generation.phase is Phase.FENCING:
            self._run = followed.run  # G1: what was said before is what is found at our fence.
        if isinstance(followed.event, RunCancelled) and followed.accepted:
            self.cancelled_ms = self._now_ms()
        self._change(
            generations.seen(
                self._generation,
                followed.event,
                accepted=followed.accepted,
                after=followed.run.state,
            )
        )

    def lose(self, why: Loss) -> None:
        """Nothing that this attempt appends counts any more, or it must not append."""
        self._change(generations.lose(self._generation, why))

    def tick(self) -> None:
        """Time passed. Raises ProducerUnusable when the broker has been away for too long."""
        now = self._now_ms()
        self._change(generations.overdue(self._generation, now_ms=now))
        if generations.unacknowledged_too_long(self._generation, now_ms=now):
            raise ProducerUnusable("no acknowledgement")

    async def run(self) -> None:
        """Make the attempt. Raises ProducerUnusable."""
        if not self._generation.open:
            return
        if self._generation.phase is Phase.FENCING and not await self._fence():
            return
        ending = await self._speak()
        if ending is not None and self._generation.open:
            await self._start()
            if (
                self._generation.open
            ):  # The log may have told otherwise while the start waited for room.
                await self._end(ending)
        await self._until(lambda: not self._generation.open)

    async def _fence(self) -> bool:
        """Append our AttemptStarted and read the log up to it; whether it was accepted and the run is ours."""
        await self._start()
        await self._until(lambda: self._generation.phase is not Phase.FENCING)
        return self._generation.open

    async def _start(self) -> None:
        """Append our AttemptStarted, once."""
        if self._started or not self._generation.open:
            return
        self._started = True
        generation = self._generation
        await self._send(
            AttemptStarted(
                run_id=generation.run_id,
                attempt=generation.attempt,
                nonce=generation.nonce,
                worker_id=self._worker_id,
                input_tokens=len(self.request.event.prompt_ids),
            ),
            generation.awaiting[0],
        )

    async def _end(self, ending: Ending) -> None:
        self._change(generations.end(self._generation, now_ms=self._now_ms()))
        await self._send(
            RunEnded(
                run_id=self._generation.run_id,
                cause=ending.cause,
                writer=EndWriter.WORKER,
                nonce=self._generation.nonce,
                end=self._generation.said,
                detail=ending.detail,
            ),
            self._generation.awaiting[-1],
        )

    async def slot_freed(self) -> None:
        """Wait until the engine confirmed the slot free."""
        if self._stream is not None:
            try:
                await self._stream.wait_freed()
            except Dead:
                await self._end_of_process()

    async def _speak(self) -> Ending | None:
        """Have the engine say the rest. None: the attempt is over or lost."""
        state = self._run.state
        if self._generation.tokens_left <= 0:
            return Ending(cause=cause_of_full_grant(quota_limited=self._quota_limited))
        if len(self._run.barren_workers) > BARREN_WORKERS_MAX:  # G7
            return Ending(cause=EndCause.ERROR, detail="too many workers without a token")
        self._speech = Speech(self._phrases, said_ids=self._run.emitted_ids, said=state.text)
        if self._speech.repeats:
            return Ending(cause=EndCause.REPETITION)
        if self._speech.blocked:
            return Ending(cause=EndCause.BLOCKED)
        try:
            self._stream = self._engine.submit(self._engine_request())
        except TooLong:
            if state.n:
                return Ending(cause=EndCause.LENGTH, detail="the context window is full")
            return Ending(cause=EndCause.ERROR, detail="the prompt does not fit the engine")
        except Invalid:
            return Ending(cause=EndCause.ERROR, detail="the engine refused the request")
        except Saturated:
            logger.warning("engine_saturated said=%d", state.n)
            self.lose(Loss.ENGINE_FAILED)
            return None
        except Dead:
            await self._end_of_process()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hear(self._stream))
            if not self._started:
                # The producer has one batch of a partition on the way at a time. What an instant engine says at once rides in the
                # batch of the AttemptStarted instead of waiting for its acknowledgement.
                for _ in range(INSTANT_TURNS_MAX):
                    if self._speech.waiting or self._over:
                        break
                    await asyncio.sleep(0)
                await self._start()
            over = await self._flush_until_over()
        return await self._ending_of(over) if isinstance(over, Finish) else over

    def _engine_request(self) -> GenRequest:
        event, state = self.request.event, self._run.state
        return GenRequest(
            request_id=self._request_id,
            attempt=self._generation.attempt,
            prompt_ids=event.prompt_ids,
            emitted_ids=self._run.emitted_ids,
            emitted_text=state.text,
            emitted_count=state.n,
            max_new_tokens=self._generation.tokens_left,
            sampling=event.sampling,
            stop=event.stop,
            cache_scope=event.cache_scope,
            trace=self.request.trace,
        )

    async def _hear(self, stream: EngineStream) -> None:
        """Put what the engine says into the buffer; the flusher is woken when something is due."""
        async for step in stream:
            if isinstance(step, Delta):
                piece = Piece(text=step.text, ids=step.ids, index=step.index, count=step.count)
                self._speech.hear(piece)
                if self._speech.blocked:
                    self._engine.cancel(self._request_id)
                    self._wake.set()
                    return
                if self._speech.waiting > 1 and self._speech.due_ms:
                    continue  # The flusher knows when.
            else:
                if step.reason not in (EndReason.CANCELLED, EndReason.ERROR):
                    self._speech.end()
                self._finish = step
            self._wake.set()

    @property
    def _over(self) -> bool:
        """The engine says nothing more that counts."""
        return self._finish is not None or self._speech.blocked

    async def _flush_until_over(self) -> Finish | Ending | None:
        """Say what is due until the engine is done, or was told that nothing more is to be said. None: the attempt is not open any more."""
        while self._generation.open:
            now, due = self._now_ms(), self._speech.due_ms
            if due is not None and (now >= due or self._over):
                await self._say()
                if not self._over and self._speech.repeats:
                    self._engine.cancel(self._request_id)
                    return Ending(cause=EndCause.REPETITION)  # What it has made since is not said.
            elif self._speech.blocked:
                return Ending(cause=EndCause.BLOCKED)
            elif self._finish is not None:
                return self._finish
            else:
                await self._wait(None if due is None else due - now)
        return None

    async def _say(self) -> None:
        now = self._now_ms()
        piece = self._speech.take(now_ms=now)
        self._change(
            generations.say(self._generation, index=piece.index, count=piece.count, now_ms=now)
        )
        await self._send(
            TokensGenerated(
                run_id=self._generation.run_id,
                nonce=self._generation.nonce,
                index=piece.index,
                count=piece.count,
                text=piece.text,
                ids=piece.ids,
            ),
            self._generation.awaiting[-1],
        )

    async def _ending_of(self, finish: Finish) -> Ending | None:
        detail = finish.detail[:ENGINE_DETAIL_CHARS_MAX]
        match finish.reason:
            case EndReason.STOP:
                return Ending(cause=EndCause.STOP)
            case EndReason.LENGTH:
                return Ending(cause=cause_of_full_grant(quota_limited=self._quota_limited))
            case EndReason.CONTEXT_FULL:
                # Admission keeps grants within the window, so this is a limit of ours; a client sees that the answer was cut.
                return Ending(cause=EndCause.LENGTH, detail="the context window is full")
            case EndReason.CANCELLED:
                self.lose(Loss.ENGINE_FAILED)  # Not by us, or the attempt would not be open.
                return None
            case EndReason.ERROR:
                return await self._after_engine_error(finish, detail)
            case _:
                assert_never(finish.reason)

    async def _after_engine_error(self, finish: Finish, detail: str) -> Ending | None:
        if self._engine.health() in (EngineHealth.STALLED, EngineHealth.DEAD):
            await self._end_of_process()
        logger.warning("engine_error retryable=%s detail=%s", finish.retryable, detail)
        self.engine_failed = True
        if not finish.retryable or self._failures + 1 >= generations.ENGINE_FAILURES_MAX:
            return Ending(cause=EndCause.ERROR, detail=detail)
        self.lose(Loss.ENGINE_FAILED)
        return None

    async def _end_of_process(self) -> NoReturn:
        while True:
            await asyncio.Event().wait()

    async def _send(self, event: RunEvent, sent: Sent) -> None:
        """Hand a record to the producer. A full buffer (the broker is away) is waited for while the attempt is open."""
        nonce = self._generation.nonce
        ordinal = sent.index
        while self._generation.open:
            try:
                future = await self._log.send(
                    TOKENS,
                    event,
                    event_id=derived_event_id(nonce, sent.kind.value, ordinal),
                    cause_id=self.request.event_id,
                    trace=self.request.trace,
                )
            except AppendFailed as error:
                if not isinstance(error.__cause__, TimeoutError):
                    raise ProducerUnusable(str(error)) from error
                continue  # The buffer is full; `tick` ends the process when this lasts.
            future.add_done_callback(partial(self._acknowledged, sent))
            return

    def _acknowledged(self, sent: Sent, future: asyncio.Future[Appended]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self._on_defect(ProducerUnusable(type(error).__name__))
            return
        self.acked_offset = max(self.acked_offset, future.result().offset)
        self._generation = generations.acknowledged(self._generation, sent, now_ms=self._now_ms())

    def _change(self, after: Generation) -> None:
        before, self._generation = self._generation, after
        if before.phase is after.phase:
            return
        if not after.open:
            self._engine.cancel(self._request_id)
            if after.phase is Phase.LOST:
                logger.info(
                    "attempt_lost run=%s attempt=%d why=%s said=%d",
                    after.run_id,
                    after.attempt,
                    after.loss,
                    after.said,
                )
        self._wake.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._wait(None)

    async def _wait(self, wait_ms: int | None) -> None:
        """Until something happened, or so long."""
        try:
            async with asyncio.timeout(None if wait_ms is None else wait_ms / 1000):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()
