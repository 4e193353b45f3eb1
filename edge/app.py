"""The application: the table of routes, and what becomes of a refusal."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from edge import (
    account_routes,
    admin_routes,
    chat_routes,
    health_routes,
    message_routes,
    run_routes,
)
from edge.answers import problem_answer
from edge.catch_up import LogBehind
from edge.decisions.problems import INVALID, NOT_FOUND, SERVER, Problem, Refused, log_behind
from edge.rim import Rim
from edge.state import SCOPE_KEY, EdgeState
from infra.history import HistoryUnavailable

_CHAT = "/v1/chats/{chat_id}"
_RUN = _CHAT + "/runs/{run_id}"

ROUTES = (
    Route("/v1/chats", chat_routes.create_chat, methods=["POST"]),
    Route("/v1/chats", chat_routes.list_chats, methods=["GET"]),
    Route(_CHAT, chat_routes.read_chat, methods=["GET"]),
    Route(_CHAT, chat_routes.rename_chat, methods=["PATCH"]),
    Route(_CHAT, chat_routes.delete_chat, methods=["DELETE"]),
    Route(_CHAT + "/messages", message_routes.post_message, methods=["POST"]),
    Route(_CHAT + "/messages", message_routes.list_messages, methods=["GET"]),
    Route(_RUN, run_routes.read_run, methods=["GET"]),
    Route(_RUN + "/events", run_routes.follow_run, methods=["GET"]),
    Route(_RUN + "/cancel", run_routes.cancel_run, methods=["POST"]),
    Route("/v1/quota", account_routes.read_quota, methods=["GET"]),
    Route("/v1/models", account_routes.list_models, methods=["GET"]),
    Route("/v1/admin/policy", admin_routes.read_policy, methods=["GET"]),
    Route("/v1/admin/policy", admin_routes.change_policy, methods=["PUT"]),
    Route("/healthz", health_routes.live, methods=["GET"]),
    Route("/readyz", health_routes.ready, methods=["GET"]),
    Route("/metrics", health_routes.metrics, methods=["GET"]),
)


def build_app(edge: EdgeState) -> ASGIApp:
    """The ASGI application of one edge process."""
    handlers = {
        Refused: _refused,
        HistoryUnavailable: _store_failed,
        LogBehind: _log_behind,
        HTTPException: _http_error,
    }
    # Not `Starlette`: its outermost layer answers a failure in a shape of its own before ours sees it.
    routed = ExceptionMiddleware(Router(list(ROUTES), redirect_slashes=False), handlers=handlers)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope[SCOPE_KEY] = edge
        scope["app"] = (
            app  # With it the router raises what it cannot route, and our handlers answer.
        )
        await routed(scope, receive, send)

    return Rim(app, edge.metrics)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused), "registered for it"
    return problem_answer(error.problem)


async def _store_failed(request: Request, error: Exception) -> Response:
    return problem_answer(
        Problem(
            status=503,
            type=SERVER,
            code="history_unavailable",
            message="The history store does not answer.",
            headers={"retry-after": "1"},
        )
    )


async def _log_behind(request: Request, error: Exception) -> Response:
    return problem_answer(log_behind().problem)


def _methods(path: str) -> list[str]:
    """What may be asked of this path: several routes may share it."""
    found = [route.methods or set() for route in ROUTES if route.path_regex.match(path)]
    return sorted(set().union(*found))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for it"
    known = {
        404: Problem(
            status=404, type=NOT_FOUND, code="route_not_found", message="There is no such route."
        ),
        405: Problem(
            status=405,
            type=INVALID,
            code="method_not_allowed",
            message="This route does not take that method.",
            headers={"allow": ", ".join(_methods(request.scope["path"]))},
        ),
    }
    return problem_answer(
        known.get(
            error.status_code,
            Problem(
                status=error.status_code,
                type=INVALID if error.status_code < 500 else SERVER,
                code="http_error",
                message="The request could not be served.",
            ),
        )
    )
