"""What an account may know of itself: its quota and its models."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from edge.allowances import rate_limit_headers
from edge.answers import json_answer
from edge.decisions.problems import unavailable
from edge.state import caller_of, state_of


async def read_quota(request: Request) -> Response:
    """GET /v1/quota"""
    edge, caller = state_of(request), caller_of(request)
    view = edge.accounts.quota(caller.account_id, caller.tier)
    if view is None:
        raise unavailable("The limits are not known yet.", code="limits_unknown")
    return json_answer(view.body(), headers=rate_limit_headers(edge, caller))


async def list_models(request: Request) -> Response:
    """GET /v1/models"""
    edge, caller = state_of(request), caller_of(request)
    data = [
        {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "turnlog",
            "context_window": edge.models[name].context_window,
        }
        for name in edge.models_of(caller.tier)
    ]
    return json_answer({"object": "list", "data": data})
