"""An engine without a model: deterministic tokens at a settable pace, and faults on request.

For tests and benchmarks. It follows the same rules as a real engine, and it is stricter: a request
that continues an answer with other tokens than the script's is Invalid.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from inference_workers.booked_engine import BookedEngine
from inference_workers.decisions.held_text import Piece
from inference_workers.decisions.script import Script, ScriptToken, answer
from inference_workers.engine import (
    EndReason,
    EngineCaps,
    EngineHealth,
    EngineStream,
    GenRequest,
    Invalid,
)
from inference_workers.slot_book import (
    STOP_STRING_CHARS_MAX,
    STOP_STRINGS_MAX,
    Seat,
)

# At no delay this many tokens are made before others have the loop.
_BURST_TOKENS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedFaults:
    """What goes wrong, for requests whose attempt is at most `attempts_max` and whose prompt has at
    least `prompt_tokens_min`. Numbers of tokens are of one attempt; None never. A mute stream makes
    nothing more and confirms nothing."""

    attempts_max: int = 1
    prompt_tokens_min: int = 0
    die_after_tokens: int | None = None
    mute_after_tokens: int | None = None
    error_after_tokens: int | None = None
    error_is_retryable: bool = True
    confirm_delay_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedSettings:
    """`prefill_delay_s` comes before the first token, `token_delay_s` before every other."""

    model: str = "smollm2-135m"
    slots: int = 64
    context_window: int = 4096
    tokens_per_answer: int = 64
    script: Script = Script.WORDS
    # A real engine does not know all the ids of a character that is spread over tokens.
    exact_ids: bool = True
    prefill_delay_s: float = 0.0
    token_delay_s: float = 0.0
    stalled_after_s: float = 10.0
    faults: ScriptedFaults = ScriptedFaults()


class ScriptedEngine(BookedEngine):
    """The Engine protocol over a script."""

    def __init__(self, settings: ScriptedSettings) -> None:
        self._settings = settings
        caps = EngineCaps(
            model=settings.model,
            slots=settings.slots,
            context_window=settings.context_window,
            stop_strings_max=STOP_STRINGS_MAX,
            stop_string_chars_max=STOP_STRING_CHARS_MAX,
        )
        super().__init__(caps, stalled_after_s=settings.stalled_after_s)
        self._closing = asyncio.Event()

    async def close(self, *, drain_s: float) -> None:
        confirm_s = self._settings.faults.confirm_delay_s + 1
        await self._drain(drain_s=drain_s, confirm_s=confirm_s)
        self._closing.set()

    def submit(self, request: GenRequest) -> EngineStream:
        fed = len(request.prompt_ids) + request.emitted_count
        self._check_continues(request)
        seat = self._book.take(request, fed_tokens=fed)
        self._tasks.create_task(self._speak(seat))
        return seat.stream

    def _answer(self, request: GenRequest, *, start: int) -> Iterator[ScriptToken]:
        return answer(
            script=self._settings.script,
            prompt_ids=request.prompt_ids,
            tokens=self._settings.tokens_per_answer,
            start=start,
        )

    def _check_continues(self, request: GenRequest) -> None:
        """What was said before has to be the script's own beginning."""
        said = list(zip(range(request.emitted_count), self._answer(request, start=0), strict=False))
        if len(said) < request.emitted_count:
            raise Invalid("more was said than the script has")
        if b"".join(token.says for _, token in said) != request.emitted_text.encode():
            raise Invalid("the text said before is not the script's")
        if request.emitted_ids not in (None, tuple(token.id for _, token in said)):
            raise Invalid("the ids said before are not the script's")

    async def _speak(self, seat: Seat) -> None:
        """One attempt, from the prompt to the slot's release."""
        faults, request = self._settings.faults, seat.request
        long = len(request.prompt_ids) >= faults.prompt_tokens_min
        faulty = long and request.attempt <= faults.attempts_max
        await self._pause(seat, self._settings.prefill_delay_s)
        seat.prefilled(cached=0)
        room = self._settings.context_window - len(request.prompt_ids) - request.emitted_count
        limit = min(request.max_new_tokens, room)
        for piece in self._pieces(request, limit):
            if faulty and _due(faults.die_after_tokens, seat):
                self._book.fail(EngineHealth.DEAD, "scripted death")
                return
            if faulty and _due(faults.mute_after_tokens, seat):
                await self._closing.wait()
                return
            if faulty and _due(faults.error_after_tokens, seat):
                again = faults.error_is_retryable
                seat.ended(EndReason.ERROR, retryable=again, detail="scripted error")
            if seat.over:
                break
            seat.made(piece)
            if self._settings.token_delay_s or seat.generated % _BURST_TOKENS == 0:
                await self._pause(seat, self._settings.token_delay_s)
        if seat.generated < limit:
            seat.ended(EndReason.STOP)
        full = room < request.max_new_tokens
        seat.ended(EndReason.CONTEXT_FULL if full else EndReason.LENGTH)
        await asyncio.sleep(faults.confirm_delay_s if faulty else 0)
        seat.freed()

    def _pieces(self, request: GenRequest, limit: int) -> Iterator[Piece]:
        """At most `limit` tokens; where ids are not exact a spread character is one piece."""
        tokens = self._answer(request, start=request.emitted_count)
        said = (token for _, token in zip(range(limit), tokens, strict=False))
        if self._settings.exact_ids:
            yield from (Piece(data=t.says, ids=(t.id,), count=1) for t in said)
            return
        held: list[ScriptToken] = []
        for token in said:
            held.append(token)
            if token.ends_phrase:
                ids = (token.id,) if len(held) == 1 else None
                yield Piece(data=b"".join(t.says for t in held), ids=ids, count=len(held))
                held.clear()
        if held:
            yield Piece(data=b"".join(t.says for t in held), ids=None, count=len(held))

    async def _pause(self, seat: Seat, delay_s: float) -> None:
        """Wait, or until the stream is over. Without a delay others have the loop once."""
        if delay_s <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        timer = asyncio.get_running_loop().call_later(delay_s, _wake, woken)
        seat.when_over(lambda: _wake(woken))
        try:
            await woken
        finally:
            timer.cancel()


def _due(after_tokens: int | None, seat: Seat) -> bool:
    return after_tokens is not None and seat.generated >= after_tokens


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
