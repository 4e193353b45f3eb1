"""What the embedded server says about one request, turned into the seat's pieces and its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from inference_workers.decisions.held_text import Piece
from inference_workers.decisions.lost_ids import lost_ids
from inference_workers.engine import EndReason
from inference_workers.loopback_http import LoopbackCall
from inference_workers.slot_book import Seat

_SERVER_ERROR: Final = 500


class _Progress(msgspec.Struct):
    cache: int = 0


class _Event(msgspec.Struct):
    """The fields that are read of one event of `/completion`."""

    content: str = ""
    tokens: tuple[int, ...] = ()
    stop: bool = False
    tokens_predicted: int = 0
    stop_type: str = "none"
    prompt_progress: _Progress | None = None
    error: dict[str, Any] | None = None


_event: Final = msgspec.json.Decoder(_Event)


class CompletionListener:
    """Turns the events of one call into the seat's pieces and end. `bytes_of` is what each token
    says, by id, and `id_of` the reverse; `remember` gets the ids made, just before the slot is free.
    """

    def __init__(
        self,
        seat: Seat,
        *,
        bytes_of: tuple[bytes, ...],
        id_of: Mapping[bytes, int],
        remember: Callable[[tuple[int, ...]], None],
    ) -> None:
        self.finished = False
        self._ids: list[int] = []
        self._remember = remember
        self._seat = seat
        self._bytes_of = bytes_of
        self._id_of = id_of
        self._call: LoopbackCall | None = None
        self._begun = False
        self._made = 0

    def attach(self, call: LoopbackCall) -> None:
        self._call = call
        self._seat.when_over(self._close_if_begun)

    def hear(self, data: bytes) -> None:
        """One event. Not JSON of that shape: the engine is not the one that was tried; it
        raises.
        """
        event = _event.decode(data)
        self._begun = True
        if event.stop and event.error is None:
            self._end(event)
        elif self._seat.over:
            self._close_if_begun()
        elif event.error is not None:
            self._refused(event.error)
        elif event.prompt_progress is not None:
            self._seat.prefilled(cached=event.prompt_progress.cache)
        else:
            self._piece(event)

    def cut_off(self, *, complete: bool) -> None:
        """The call ended without a last event, which the seat may have wanted."""
        if self._seat.over:
            return
        call = self._call
        status = call.status if call is not None else 0
        kind = _error_type(call.body) if call is not None and complete else "cut off"
        self._seat.ended(
            EndReason.ERROR,
            retryable=not complete or status >= _SERVER_ERROR,
            detail=f"the engine answered {status}, {kind}",
        )

    def _close_if_begun(self) -> None:
        """A request that the engine has not begun would outlive its connection: wait for its first
        event, which comes with its first batch."""
        if self._begun and self._call is not None and not self.finished:
            self._call.abort()

    def _piece(self, event: _Event) -> None:
        count = event.tokens_predicted - self._made
        if count < 1:
            return
        self._made = event.tokens_predicted
        data = event.content.encode()
        ids = self._exact_ids(data, event.tokens, count)
        self._ids.extend(ids or ())
        self._seat.made(Piece(data=data, ids=ids, count=count))

    def _exact_ids(
        self, data: bytes, tokens: tuple[int, ...], count: int
    ) -> tuple[int, ...] | None:
        if len(tokens) == count:
            return tokens
        if len(tokens) != 1:
            return None
        last = self._bytes_of[tokens[0]]
        if not last or not data.endswith(last):
            return None
        missing = data[: -len(last)]
        before = lost_ids(missing=missing, count=count - 1, id_of=self._id_of)
        return None if before is None else (*before, tokens[0])

    def _end(self, event: _Event) -> None:
        """The engine lets go of the slot right after this event, before it looks at its queue."""
        self.finished = True
        reason = EndReason.STOP
        if event.stop_type == "limit":
            full = event.tokens_predicted < self._seat.request.max_new_tokens
            reason = EndReason.CONTEXT_FULL if full else EndReason.LENGTH
        self._seat.ended(reason, generated=event.tokens_predicted)
        self._remember(tuple(self._ids))
        self._seat.freed()

    def _refused(self, error: Mapping[str, Any]) -> None:
        code = error.get("code")
        again = not isinstance(code, int) or code >= _SERVER_ERROR
        detail = f"the engine's error {code}, {error.get('type')}"
        self._seat.ended(EndReason.ERROR, retryable=again, detail=detail)


def _error_type(body: bytes) -> str:
    try:
        error = msgspec.json.decode(body).get("error", {})
        return str(error.get("type", "unknown"))
    except (msgspec.DecodeError, AttributeError):
        return "unknown"
