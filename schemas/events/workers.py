"""chat.workers: what each worker says of its load. Soft state: deleting it changes no outcome."""

from __future__ import annotations

from schemas.events import Event


class WorkerLoadReported(Event, frozen=True, kw_only=True):
    """A worker's report. `partitions` are those of the token topic whose requests it owns; rates are tokens per second."""

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


WorkerEvent = WorkerLoadReported
