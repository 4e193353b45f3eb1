"""What an account is told of its limits, and the bound on what it may send: the one refusal that is no event.

A record for each request is what a flood must not cause. So it is counted (`metrics.py`) and told in this process's log (`floods.py`).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from edge.auth import Caller
from edge.decisions.problems import Refused
from edge.decisions.refusals import FLOOD, refusal_problem
from edge.state import EdgeState
from schemas.events.tokens import Refusal
from schemas.vocabulary import RefusalReason


def rate_limit_headers(edge: EdgeState, caller: Caller) -> dict[str, str]:
    """`x-ratelimit-…` for creation routes; none until admission has said any limits."""
    view = edge.accounts.quota(caller.account_id, caller.tier)
    return dict(view.headers(edge.clock.now_ms())) if view is not None else {}


def take_prompt(edge: EdgeState, caller: Caller) -> None:
    """The caller sends a prompt. Raises Refused (429) where it sends far more than it may."""
    limits, now_ms = edge.accounts.tier(caller.tier), _now_ms()
    wait_ms = edge.bounds.prompt(caller.account_id, caller.tier, limits, now_ms=now_ms)
    _refuse(edge, caller, "prompt", wait_ms)


def take_change(edge: EdgeState, caller: Caller) -> None:
    """As `take_prompt`, for a chat that the caller makes, renames or deletes."""
    limits, now_ms = edge.accounts.tier(caller.tier), _now_ms()
    wait_ms = edge.bounds.change(caller.account_id, caller.tier, limits, now_ms=now_ms)
    _refuse(edge, caller, "change", wait_ms)


def _refuse(edge: EdgeState, caller: Caller, what: str, wait_ms: int) -> None:
    if not wait_ms:
        return
    edge.floods.refused(caller.account_id)
    edge.metrics.flood_refused.labels(caller.tier.value, what).inc()
    problem = refusal_problem(
        Refusal(reason=RefusalReason.RATE_LIMITED, retry_after_ms=wait_ms, limit=FLOOD)
    )
    headers = {**rate_limit_headers(edge, caller), **problem.headers}
    raise Refused(replace(problem, headers=headers))


def _now_ms() -> int:
    return int(asyncio.get_running_loop().time() * 1000)
