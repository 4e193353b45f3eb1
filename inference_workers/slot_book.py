"""Which request has which slot of an engine, and how each stream comes to its one end.

Every engine keeps one book and only reports into it: what was made, why it ended, that the slot is
free. The book refuses (E5), holds text back (E2), counts (E3), ends (E1) and watches (E6).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

from inference_workers.decisions.held_text import (
    Heard,
    HeldText,
    Piece,
    Release,
    end,
    hear,
    hold_nothing,
)
from inference_workers.engine import (
    Dead,
    Delta,
    EndReason,
    EngineCaps,
    EngineHealth,
    EngineLoad,
    EngineUsage,
    Finish,
    GenRequest,
    Invalid,
    Saturated,
    SlotFreed,
    TooLong,
)
from inference_workers.engine_stream import AnswerStream

STOP_STRINGS_MAX: Final = 4
STOP_STRING_CHARS_MAX: Final = 64
# How often within its limit the watchdog looks.
_LOOKS_PER_LIMIT: Final = 8
# So many looks in a row may come late before the watchdog judges all the same.
_LATE_LOOKS_MAX: Final = 8


class Seat:
    """One request in one slot. The engine calls `made`, then `ended` unless `over`, then
    `freed`.
    """

    def __init__(self, book: SlotBook, request: GenRequest, slot: int, *, fed_tokens: int) -> None:
        self.request = request
        self.slot = slot
        self.stream = AnswerStream(request.request_id)
        self._book = book
        self._held: HeldText = hold_nothing(
            stop=request.stop,
            index=request.emitted_count,
            exact=request.emitted_ids is not None,
        )
        self._prompt_tokens = len(request.prompt_ids)
        self._fed_tokens = fed_tokens
        self._cached_tokens = 0
        self._generated = 0
        self._progress_at = book.now()
        self._over_at: float | None = None
        self._on_over: Callable[[], None] | None = None

    @property
    def over(self) -> bool:
        """The stream has ended: make no more, and confirm the slot free when it is."""
        return self._over_at is not None

    @property
    def over_for_s(self) -> float | None:
        return None if self._over_at is None else self._book.now() - self._over_at

    @property
    def silent_for_s(self) -> float:
        """Since the engine last said something about this request."""
        return self._book.now() - self._progress_at

    @property
    def generated(self) -> int:
        """Tokens the engine made in this attempt."""
        return self._generated

    @property
    def kv_tokens(self) -> int:
        """Tokens that the slot holds."""
        return self._fed_tokens + self._generated

    def when_over(self, call: Callable[[], None]) -> None:
        """Have `call` called once when the stream is over, at once if it is. The latest counts."""
        self._on_over = call
        if self.over:
            call()

    def prefilled(self, *, cached: int) -> None:
        """The engine works on the prompt: progress, of which `cached` tokens needed no work."""
        self._cached_tokens = cached
        self._progress_at = self._book.now()
        self._book.progressed()

    def made(self, piece: Piece) -> None:
        """The engine made this. A stop string in it ends the stream."""
        if self.over:
            return
        self._generated += piece.count
        self._progress_at = self._book.now()
        self._book.progressed(tokens=piece.count)
        heard = hear(self._held, piece)
        self._say(heard)
        if heard.stop_match is not None:
            self._finish(EndReason.STOP, stop_match=heard.stop_match)

    def ended(
        self,
        reason: EndReason,
        *,
        generated: int | None = None,
        retryable: bool = False,
        detail: str = "",
    ) -> None:
        """The engine came to an end. What is held is said unless another attempt will say it."""
        if self.over:
            return
        if generated is not None:
            self._generated = generated
        if not retryable:
            self._say(end(self._held))
        self._finish(reason, retryable=retryable, detail=detail)

    def cancel(self) -> bool:
        """End the stream now; what its reader has not taken is dropped."""
        if self.over:
            return False
        self._finish(EndReason.CANCELLED, drop_waiting=True)
        return True

    def freed(self) -> None:
        """The engine confirmed that the slot is free."""
        assert self.over, "a slot is free only after its stream's end"
        self._book.seat_freed(self)

    def _say(self, heard: Heard) -> None:
        self._held = heard.held
        if heard.release is not None:
            self.stream.push(_delta(heard.release))

    def _finish(
        self,
        reason: EndReason,
        *,
        stop_match: str | None = None,
        retryable: bool = False,
        detail: str = "",
        drop_waiting: bool = False,
    ) -> None:
        dropped = self.stream.waiting_tokens if drop_waiting else 0
        usage = EngineUsage(
            prompt=self._prompt_tokens,
            cached=self._cached_tokens,
            generated=self._generated,
            delivered=self._held.index - self.request.emitted_count - dropped,
        )
        self.stream.finish(
            Finish(
                reason=reason,
                stop_match=stop_match,
                usage=usage,
                retryable=retryable,
                detail=detail,
            ),
            drop_waiting=drop_waiting,
        )
        self._over_at = self._book.now()
        if self._on_over is not None:
            self._on_over()


class SlotBook:
    """All seats of one engine. `stalled_after_s` bounds three silences: no progress at all while
    some slot is busy, no further token of an answer that has begun, and a slot that nobody
    confirms free after its stream's end.
    """

    def __init__(self, caps: EngineCaps, *, stalled_after_s: float) -> None:
        self.caps = caps
        self.health = EngineHealth.STARTING
        self._stalled_after_s = stalled_after_s
        self._seats: dict[int, Seat] = {}
        self._progress_at = self.now()
        self._generated_total = 0
        self._prompt_total = 0
        self._failed: asyncio.Event = asyncio.Event()
        self._all_free: asyncio.Event = asyncio.Event()
        self._all_free.set()

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

    @property
    def free_slots(self) -> tuple[int, ...]:
        return tuple(slot for slot in range(self.caps.slots) if slot not in self._seats)

    @property
    def seats(self) -> tuple[Seat, ...]:
        return tuple(self._seats.values())

    def take(self, request: GenRequest, *, slot: int | None = None, fed_tokens: int) -> Seat:
        """A seat for the request, which will feed `fed_tokens` to the engine. Raises a refusal."""
        if self.health is not EngineHealth.READY:
            raise Dead(f"the engine is {self.health.value}")
        _check(request, self.caps)
        if self._open_seat(request.request_id) is not None:
            raise Invalid("this request is already being answered")
        if fed_tokens >= self.caps.context_window:
            raise TooLong(f"{fed_tokens} tokens, window {self.caps.context_window}")
        free = self.free_slots
        if not free:
            raise Saturated(f"all {self.caps.slots} slots are busy")
        if not self._seats:
            self._progress_at = self.now()  # Idleness is no silence.
        chosen = free[0] if slot is None else slot
        seat = Seat(self, request, chosen, fed_tokens=fed_tokens)
        assert seat.slot in free, "the slot is taken"
        self._seats[seat.slot] = seat
        self._all_free.clear()
        self._prompt_total += fed_tokens
        return seat

    def cancel(self, request_id: str) -> bool:
        seat = self._open_seat(request_id)
        return seat is not None and seat.cancel()

    def progressed(self, *, tokens: int = 0) -> None:
        self._progress_at = self.now()
        self._generated_total += tokens

    def seat_freed(self, seat: Seat) -> None:
        if self._seats.get(seat.slot) is not seat:
            return
        del self._seats[seat.slot]
        self.progressed()
        waited_s = seat.over_for_s or 0.0
        seat.stream.freed(SlotFreed(request_id=seat.request.request_id, delay_ms=waited_s * 1000))
        if not self._seats:
            self._all_free.set()

    def load(self) -> EngineLoad:
        return EngineLoad(
            slots=self.caps.slots,
            busy=len(self._seats),
            releasing=sum(seat.over for seat in self._seats.values()),
            generated_tokens_total=self._generated_total,
            prompt_tokens_total=self._prompt_total,
            kv_tokens=sum(seat.kv_tokens for seat in self._seats.values()),
            progress_age_ms=(self.now() - self._progress_at) * 1000 if self._seats else 0.0,
        )

    def ready(self) -> None:
        self.health = EngineHealth.READY

    def fail(self, health: EngineHealth, why: str) -> None:
        """STALLED or DEAD, for good: every stream ends so that another attempt may go on."""
        if self.health is not EngineHealth.READY:
            return
        self.health = health
        for seat in self.seats:
            seat.ended(EndReason.ERROR, retryable=True, detail=why)
            seat.stream.never_freed(why)
        self._failed.set()

    def shut(self) -> None:
        """Take nobody any more. A failure stays what it is."""
        if self.health in {EngineHealth.READY, EngineHealth.STARTING}:
            self.health = EngineHealth.CLOSED

    async def wait_failed(self) -> EngineHealth:
        await self._failed.wait()
        return self.health

    async def wait_all_free(self, timeout_s: float) -> bool:
        """True when every slot is confirmed free within the time."""
        try:
            await asyncio.wait_for(self._all_free.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def drain(self, *, drain_s: float, confirm_s: float) -> None:
        """Let the open answers run for up to drain_s, then cancel the rest and have them
        confirmed.
        """
        if self.health in {EngineHealth.STALLED, EngineHealth.DEAD}:
            return  # Its streams have ended, and nobody will confirm.
        self.shut()
        if await self.wait_all_free(drain_s):
            return
        for seat in self.seats:
            seat.cancel()
        if not await self.wait_all_free(confirm_s):
            for seat in self.seats:
                seat.stream.never_freed("the engine closed first")

    async def watch(self) -> None:
        """E6, for as long as the engine is ready."""
        look_s = self._stalled_after_s / _LOOKS_PER_LIMIT
        late_looks = 0
        while self.health is EngineHealth.READY:
            asked_at = self.now()
            await asyncio.sleep(look_s)
            # A process that stood still itself has heard nothing of its engine meanwhile: it listens first.
            late_looks = late_looks + 1 if self.now() - asked_at > 2 * look_s else 0
            if 0 < late_looks <= _LATE_LOOKS_MAX:
                continue
            why = self._silence()
            if why is not None:
                self.fail(EngineHealth.STALLED, why)

    def _open_seat(self, request_id: str) -> Seat | None:
        """A later attempt may come while the slot of an earlier one is not yet confirmed free."""
        for seat in self._seats.values():
            if seat.request.request_id == request_id and not seat.over:
                return seat
        return None

    def _silence(self) -> str | None:
        if not self._seats:
            return None
        if self.now() - self._progress_at > self._stalled_after_s:
            return f"no progress for {self._stalled_after_s:g} s"
        for seat in self._seats.values():
            if (seat.over_for_s or 0.0) > self._stalled_after_s:
                return f"slot {seat.slot} not confirmed free for {self._stalled_after_s:g} s"
            # Before its first token a request may rightly wait while others' prompts are read.
            if not seat.over and seat.generated and seat.silent_for_s > self._stalled_after_s:
                return f"slot {seat.slot} mute for {self._stalled_after_s:g} s"
        return None


def _delta(release: Release) -> Delta:
    return Delta(text=release.text, ids=release.ids, index=release.index, count=release.count)


def _check(request: GenRequest, caps: EngineCaps) -> None:
    """What no engine could make sense of."""
    if not request.request_id or not request.prompt_ids:
        raise Invalid("a request without an id or a prompt")
    if request.max_new_tokens < 1:
        raise Invalid("max_new_tokens below 1")
    if request.emitted_count < 0 or (
        request.emitted_ids is not None and len(request.emitted_ids) != request.emitted_count
    ):
        raise Invalid("emitted ids and emitted count disagree")
    if len(request.stop) > caps.stop_strings_max or not all(
        1 <= len(text) <= caps.stop_string_chars_max for text in request.stop
    ):
        raise Invalid("too many stop strings, or one of a length out of bounds")
    temperature, top_p = request.sampling.temperature, request.sampling.top_p
    if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
        raise Invalid("a temperature below 0")
    if top_p is not None and not 0 < top_p <= 1:
        raise Invalid("a top_p not in (0, 1]")
