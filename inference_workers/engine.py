"""What a worker may ask of an engine, and what every engine promises.

An engine turns prompt ids into text. The rules, which one conformance suite enforces on every
implementation:

E1. A stream yields deltas and then exactly one Finish, and nothing after it. `cancel` makes it
    yield Finish(CANCELLED) within 50 ms whatever the engine does; the slot stays busy until the
    engine confirms (`EngineStream.wait_freed`), or the watchdog calls it stalled.
E2. Text is whole characters, is never taken back, and never holds any part of a stop string.
E3. Index and count are in tokens of the answer, never in deltas. A token whose text is still held
    back is in no count.
E4. An answer is resumed by ids where all of them are exact, else by its text, which ends where a
    delta ended.
E5. Admission is ours: `submit` refuses when no slot is free, so nothing ever waits inside the
    engine. Order, fairness and deadlines are therefore decided by the worker, and no request
    carries a priority.
E6. No progress for a stated time while busy: the engine is STALLED for good, every stream ends
    with a retryable error, and the process is to end; another worker resumes from the log.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self

from schemas.events.accounts import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class GenRequest:
    """One attempt at one answer.

    What earlier attempts said comes as `emitted_*`: `emitted_ids` are all the ids where every one
    is exact (empty at the start), else None, and then `emitted_text` is what counts.
    `max_new_tokens` is what this attempt may still say: the grant less `emitted_count`.
    """

    request_id: str
    attempt: int = 1
    prompt_ids: tuple[int, ...]
    emitted_ids: tuple[int, ...] | None = ()
    emitted_text: str = ""
    emitted_count: int = 0
    max_new_tokens: int
    # Temperature 0 is greedy: always the likeliest token.
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    # Prefixes are reused only between requests of one scope: derive it from the account.
    cache_scope: str = ""
    trace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The next piece of the answer: `count` (>= 1) tokens, the first of which has `index` within
    the whole answer, earlier attempts included. `ids` are these tokens' ids, or None from the
    first delta on where they are not exact.
    """

    text: str
    ids: tuple[int, ...] | None
    index: int
    count: int

    @property
    def end(self) -> int:
        """Tokens of the answer so far, this delta included."""
        return self.index + self.count


class EndReason(StrEnum):
    """Why an attempt ended."""

    # The model ended its turn, or a stop string was about to appear.
    STOP = "stop"
    # max_new_tokens were said.
    LENGTH = "length"
    # The slot's context window is full: a limit of ours, not the caller's.
    CONTEXT_FULL = "context_full"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUsage:
    """In tokens. `generated` counts what the engine made in this attempt, `delivered` what the
    deltas held: the difference was held back.
    """

    prompt: int
    cached: int
    generated: int
    delivered: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The end of a stream. `stop_match` is the stop string that ended it. `retryable` says that
    another attempt may do better; a worker then leaves the answer open. `detail` is for logs and
    never holds user text.
    """

    reason: EndReason
    stop_match: str | None = None
    usage: EngineUsage
    retryable: bool = False
    detail: str = ""


EngineStep = Delta | Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFreed:
    """The engine confirmed that a stream's slot is free, `delay_ms` after the stream's Finish."""

    request_id: str
    delay_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCaps:
    """`context_window` is per slot, in tokens of prompt and answer together."""

    model: str
    slots: int
    context_window: int
    stop_strings_max: int
    stop_string_chars_max: int

    @property
    def kv_tokens_max(self) -> int:
        """Tokens that all slots together can hold."""
        return self.slots * self.context_window


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """`busy` counts slots that the engine has not confirmed free, so it includes `releasing`:
    those whose stream has already ended. `kv_tokens` is what they all hold.
    """

    slots: int
    busy: int
    releasing: int
    generated_tokens_total: int
    prompt_tokens_total: int
    progress_age_ms: float
    kv_tokens: int

    @property
    def free(self) -> int:
        return self.slots - self.busy


class EngineHealth(StrEnum):
    """STARTING before start and CLOSED after close; STALLED and DEAD are for good: end the
    process.
    """

    STARTING = "starting"
    READY = "ready"
    STALLED = "stalled"
    DEAD = "dead"
    CLOSED = "closed"


class EngineRefusal(Exception):
    """A request that was not taken: nothing was started and no slot is held."""


class Saturated(EngineRefusal):
    """Every slot is busy."""


class TooLong(EngineRefusal):
    """Prompt and what was said so far leave no room for a single token."""


class Invalid(EngineRefusal):
    """The request makes no sense: the caller's mistake, never cured by a retry."""


class Dead(EngineRefusal):
    """The engine is not there any more, or not yet."""


class EngineStream(Protocol):
    """Deltas, then one Finish, then the end of the iteration. One reader."""

    @property
    def request_id(self) -> str: ...

    def __aiter__(self) -> AsyncIterator[EngineStep]: ...

    async def __anext__(self) -> EngineStep: ...

    async def wait_freed(self) -> SlotFreed:
        """Waits until the engine confirmed the slot free. Raises Dead where it never will. Any
        number of waiters, at any time.
        """
        ...


class Engine(Protocol):
    """`async with engine:` starts it and, at the end, closes it without a drain; enter and leave
    in one task.
    """

    @property
    def caps(self) -> EngineCaps: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def submit(self, request: GenRequest) -> EngineStream:
        """Takes a slot at once, or raises Saturated, TooLong, Invalid or Dead. Never waits."""
        ...

    def cancel(self, request_id: str) -> bool:
        """Ends that stream with CANCELLED now. False where it already ended or never was;
        repeating it is harmless.
        """
        ...

    def load(self) -> EngineLoad: ...

    def health(self) -> EngineHealth: ...

    async def wait_failed(self) -> EngineHealth:
        """Returns only when the engine is STALLED or DEAD."""
        ...

    async def close(self, *, drain_s: float) -> None:
        """Refuses new requests, lets the open ones run for up to `drain_s` seconds, cancels the
        rest and stops the engine. Repeatable.
        """
        ...
