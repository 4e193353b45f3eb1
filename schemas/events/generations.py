"""chat.generations.<model>.<lane>: work for workers, in the run's own partition."""

from __future__ import annotations

from schemas.events import Event
from schemas.events.accounts import Sampling
from schemas.vocabulary import Lane, Tier


class GenerationRequested(Event, frozen=True, kw_only=True):
    """One request for an engine. The lowest offset of a run counts; a replay may differ and is ignored.

    `cache_scope` is a secret derived from the account: prefix reuse never crosses it.
    """

    run_id: str
    account_id: str
    chat_id: str
    tier: Tier
    lane: Lane
    model: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    granted_output_tokens: int
    cache_scope: str
    deadline_ms: int
    quota_limited: bool = False


GenerationEvent = GenerationRequested
