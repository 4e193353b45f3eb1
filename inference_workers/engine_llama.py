"""The embedded engine: llama.cpp's server inside this process, spoken to through its loopback port.

What was found by trying it, and what follows:
- A string prompt has control-token look-alikes read in it, so only ids are sent.
- A request outlives its client while it is queued inside the engine, so each is given a slot of its
  own that is known to be free, and is closed only once the engine has begun it.
- Closing a connection frees its slot within a batch or two; `/slots` says when.
- An incomplete character is not sent, and then only its last id: the others are found from the
  bytes where there is one way, else the ids are not exact from there on.
- Running out of context looks like reaching the limit, so the totals are compared.
- A slot's cache is reused within one scope only; the server's further store of prompts is off,
  because it is searched whatever slot is asked for and knows no scopes.
- Stop strings are searched here, not there: one rule for every engine, at token boundaries.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self
from urllib.parse import urlsplit

import msgspec
import xllamacpp

from inference_workers.booked_engine import BookedEngine
from inference_workers.engine import (
    Dead,
    EndReason,
    EngineCaps,
    EngineHealth,
    EngineStream,
    GenRequest,
)
from inference_workers.llama_listener import CompletionListener
from inference_workers.loopback_http import LoopbackCall, LoopbackPort
from inference_workers.slot_book import (
    STOP_STRING_CHARS_MAX,
    STOP_STRINGS_MAX,
    Seat,
)
from infra.models import ModelSpec, PromptModel, model_spec
from infra.models.tokenizer import token_bytes

_ASK_TIMEOUT_S: Final = 30.0
_CONFIRM_POLL_S: Final = 0.02
_CONFIRM_AT_CLOSE_S: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSettings:
    """One thread, because two spin against a busy broker and become slower than one. Small batches,
    because a cancel is seen between two batches."""

    model: str = "smollm2-135m"
    slots: int = 4
    threads: int = 1
    batch_tokens: int = 64
    # None: the model's whole window. Memory grows with slots and window: 94 MB for 4096 tokens.
    slot_window_tokens: int | None = None
    # A batch takes 1 s on an idle core and many on a busy one.
    stalled_after_s: float = 30.0


class _Slot(msgspec.Struct):
    id: int
    is_processing: bool


_slots: Final = msgspec.json.Decoder(list[_Slot])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """What a slot's cache holds from its last request, and for whom; None: for nobody."""

    scope: str | None = None
    ids: tuple[int, ...] = ()
    used: int = 0


class LlamaEngine(BookedEngine):
    """The Engine protocol over one embedded server."""

    def __init__(self, settings: LlamaSettings, model: PromptModel) -> None:
        self._settings = settings
        self._spec = model_spec(settings.model)
        self._model = model
        self._token_bytes = token_bytes(model.vocabulary)
        self._id_of = _ids_of_bytes(self._token_bytes)
        caps = EngineCaps(
            model=settings.model,
            slots=settings.slots,
            context_window=_window(settings, self._spec),
            stop_strings_max=STOP_STRINGS_MAX + len(self._spec.stop_strings),
            stop_string_chars_max=STOP_STRING_CHARS_MAX,
        )
        super().__init__(caps, stalled_after_s=settings.stalled_after_s)
        self._kept = [_Kept() for _ in range(settings.slots)]
        self._uses = 0
        self._calls: set[LoopbackCall] = set()
        self._server: Any = None
        self._port: LoopbackPort | None = None

    @property
    def port(self) -> LoopbackPort:
        """The server's own port. Raises Dead before the start."""
        if self._port is None:
            raise Dead("the engine has not started")
        return self._port

    async def __aenter__(self) -> Self:
        key = secrets.token_urlsafe(24)
        self._server = await asyncio.to_thread(_start_server, self._settings, self._spec, key)
        address = urlsplit(self._server.listening_address)
        assert address.hostname is not None
        assert address.port is not None
        self._port = LoopbackPort(host=address.hostname, port=address.port, key=key)
        return await super().__aenter__()

    async def close(self, *, drain_s: float) -> None:
        await self._drain(drain_s=drain_s, confirm_s=_CONFIRM_AT_CLOSE_S)
        for call in tuple(self._calls):
            call.abort()
        if self.health() is EngineHealth.STALLED:
            return  # It would not end either; the process has to.
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(_Ending(server).let_go)

    def submit(self, request: GenRequest) -> EngineStream:
        request = replace(request, stop=(*request.stop, *self._spec.stop_strings))
        fed = request.prompt_ids + self._emitted(request)
        slot, shares = self._best_slot(request, fed)
        seat = self._book.take(request, slot=slot, fed_tokens=len(fed))
        self._uses += 1
        self._kept[seat.slot] = _Kept(scope=request.cache_scope, ids=fed, used=self._uses)
        self._tasks.create_task(self._generate(seat, fed, reuse=shares))
        return seat.stream

    def _emitted(self, request: GenRequest) -> tuple[int, ...]:
        """E4: the ids, or where they are not exact the text's."""
        if request.emitted_ids is not None:
            return request.emitted_ids
        return self._model.encode_text(request.emitted_text)

    def _best_slot(self, request: GenRequest, fed: tuple[int, ...]) -> tuple[int | None, bool]:
        """The free slot whose cache shares most with the request, and whether it may be reused:
        never across scopes, since the time to the first token would tell what another asked."""
        best: tuple[int, int, int] | None = None
        for slot in self._book.free_slots:
            kept = self._kept[slot]
            same = kept.scope == request.cache_scope
            shared = _shared_prefix(kept.ids, fed) if same else 0
            rank = (shared, -kept.used, slot)
            if best is None or rank > best:
                best = rank
        if best is None:
            return None, False
        return best[2], best[0] > 0

    async def _generate(self, seat: Seat, fed: tuple[int, ...], *, reuse: bool) -> None:
        if seat.over:  # Cancelled before the engine had heard of it.
            self._forget(seat.slot)
            seat.freed()
            return
        listener = CompletionListener(
            seat,
            bytes_of=self._token_bytes,
            id_of=self._id_of,
            remember=lambda made: self._remember(seat, made),
        )
        body = msgspec.json.encode(self._ask_for(seat, fed, reuse=reuse))
        try:
            call = await self.port.open("/completion", body, listener.hear)
        except OSError as error:
            self._book.fail(EngineHealth.DEAD, f"the engine's port: {type(error).__name__}")
            return
        listener.attach(call)
        self._calls.add(call)
        try:
            complete = await call.done
        finally:
            self._calls.discard(call)
        if listener.finished:
            return
        if not seat.generated:
            self._forget(seat.slot)
        if not complete or call.status != 200:
            listener.cut_off(complete=complete)
            await self._confirm_free(seat)
            return
        seat.ended(EndReason.ERROR, retryable=True, detail="the stream had no last event")
        await self._confirm_free(seat)

    async def _confirm_free(self, seat: Seat) -> None:
        """Wait until the engine itself says so; the watchdog bounds it."""
        while self._book.health in {EngineHealth.READY, EngineHealth.CLOSED}:
            try:
                status, body = await self.port.ask("/slots", timeout_s=_ASK_TIMEOUT_S)
            except OSError as error:
                self._book.fail(EngineHealth.DEAD, f"the engine's port: {type(error).__name__}")
                return
            busy = status != 200 or any(
                slot.is_processing for slot in _slots.decode(body) if slot.id == seat.slot
            )
            if not busy:
                seat.freed()
                return
            await asyncio.sleep(_CONFIRM_POLL_S)

    def _remember(self, seat: Seat, made: tuple[int, ...]) -> None:
        kept = self._kept[seat.slot]
        self._kept[seat.slot] = _Kept(scope=kept.scope, ids=kept.ids + made, used=kept.used)

    def _forget(self, slot: int) -> None:
        """Nobody knows how much of a prompt the slot read, or whose what it holds now is."""
        self._kept[slot] = _Kept(used=self._uses)

    def _ask_for(self, seat: Seat, fed: tuple[int, ...], *, reuse: bool) -> Mapping[str, Any]:
        sampling = seat.request.sampling
        warm = sampling.temperature
        return {
            "prompt": fed,
            "id_slot": seat.slot,
            "n_predict": seat.request.max_new_tokens,
            "stream": True,
            "return_tokens": True,
            "return_progress": True,
            "cache_prompt": reuse,
            "temperature": self._spec.temperature_default if warm is None else warm,
            "top_p": self._spec.top_p_default if sampling.top_p is None else sampling.top_p,
            "seed": -1 if sampling.seed is None else sampling.seed,
        }


class _Ending:
    """Holds the last reference to the server, so that its slow end happens in a thread."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def let_go(self) -> None:
        del self._server


def _start_server(settings: LlamaSettings, spec: ModelSpec, key: str) -> Any:
    """Load the model and open the port: about 1 s, in a thread."""
    params = xllamacpp.CommonParams()
    params.model.path = str(spec.path())
    params.n_parallel = settings.slots
    params.n_ctx = settings.slots * _window(settings, spec)
    params.n_batch = params.n_ubatch = settings.batch_tokens
    params.cpuparams.n_threads = settings.threads
    params.cpuparams_batch.n_threads = settings.threads
    # The server's own store of prompts knows no scopes: it gave one account what another had asked.
    params.cache_ram_mib = 0
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [key]
    params.endpoint_slots = True
    params.ui = False
    params.verbosity = -1
    return xllamacpp.Server(params)


def _window(settings: LlamaSettings, spec: ModelSpec) -> int:
    window = settings.slot_window_tokens or spec.context_window
    assert window <= spec.context_window, "a slot beyond the model's window"
    return window


def _ids_of_bytes(said: Sequence[bytes]) -> Mapping[bytes, int]:
    """The token that says these bytes, where only one does."""
    count = Counter(said)
    return {data: i for i, data in enumerate(said) if data and count[data] == 1}


def _shared_prefix(kept: tuple[int, ...], fed: tuple[int, ...]) -> int:
    """Length of the common beginning, found by halving: comparing slices is quick."""
    low, high = 0, min(len(kept), len(fed))
    while low < high:
        middle = (low + high + 1) // 2
        if kept[low:middle] == fed[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
