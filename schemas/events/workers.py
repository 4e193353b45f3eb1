"""chat.workers: what each worker says of its load. Soft state: deleting it changes no outcome."""

from __future__ import annotations

from schemas.events import Event, Part
from schemas.vocabulary import Lane


class AccountLoad(Part, frozen=True, kw_only=True):
    """An account of which others go first, since it had much lately or has much waiting.

    About `ahead_tokens` of its lane start before its next request, and `turn_tokens` of all lanes; None: far ahead, or not known.
    """

    account_id: str
    ahead_tokens: int
    turn_tokens: int | None = None


class LaneLoad(Part, frozen=True, kw_only=True):
    """What waits in one lane of a worker. Tokens are those of the prompts and of what the answers may have at most.

    `ahead_…` would start before a first request of an account that is new to the lane. `used_percent` of what requests claim is what
    they were seen to use in the end, `used_tokens_mean` one request's use; 0: none seen yet. `coming_tokens_per_s` is what
    requests that came lately claim.

    What follows counts tokens as they are likely to be used. `turn_tokens` of all lanes start before a newcomer, with those who are
    likely to come; None: far ahead, or not known. `accounts` are those that wait for more than a newcomer, as far as they are told.
    """

    lane: Lane
    queued_requests: int = 0
    queued_tokens: int = 0
    ahead_requests: int = 0
    ahead_tokens: int = 0
    used_percent: int = 0
    used_tokens_mean: int = 0
    coming_tokens_per_s: float = 0.0
    turn_tokens: int | None = None
    accounts: tuple[AccountLoad, ...] = ()


class WorkerLoadReported(Event, frozen=True, kw_only=True):
    """A worker's report. `partitions` are those of the token topic whose requests it owns; rates are tokens per second.

    `full_tokens_per_s` is prompt and output together over the seconds in which every slot was busy; 0: not seen yet. `kv_tokens` of
    `kv_tokens_max` are held by the requests that run. `free_ms`: when 1, 2, 4, 8 … slots are expected to be free, in ms from the report on;
    those count that are free already. Empty: not known, or so many slots that the pace says it.
    """

    worker_id: str
    model: str
    epoch: int
    slots: int
    busy: int
    queued_requests: int
    queued_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    partitions: tuple[int, ...]
    draining: bool = False
    lanes: tuple[LaneLoad, ...] = ()
    full_tokens_per_s: float = 0.0
    kv_tokens: int = 0
    kv_tokens_max: int = 0
    free_ms: tuple[int, ...] = ()


WorkerEvent = WorkerLoadReported
