"""chat.workers: what each worker says of its load. Soft state: deleting it changes no outcome."""

from __future__ import annotations

from schemas.events import Event, Part
from schemas.vocabulary import Lane


class LaneLoad(Part, frozen=True, kw_only=True):
    """What waits in one lane of a worker. Tokens are those of the prompts and of what the answers may have at most.

    `ahead_…` would start before a first request of an account that is new to the lane. `used_percent` of what requests claim is what
    they were seen to use in the end, `used_tokens_mean` one request's use; 0: none seen yet. `coming_tokens_per_s` is what
    requests that came lately claim.
    """

    lane: Lane
    queued_requests: int = 0
    queued_tokens: int = 0
    ahead_requests: int = 0
    ahead_tokens: int = 0
    used_percent: int = 0
    used_tokens_mean: int = 0
    coming_tokens_per_s: float = 0.0


class WorkerLoadReported(Event, frozen=True, kw_only=True):
    """A worker's report. `partitions` are those of the token topic whose requests it owns; rates are tokens per second.

    `full_tokens_per_s` is prompt and output together over the seconds in which every slot was busy; 0: not seen yet. `kv_tokens` of
    `kv_tokens_max` are held by the requests that run.
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


WorkerEvent = WorkerLoadReported
