"""The outermost layer: every answer has an id, every error the one shape, and nothing that a user wrote reaches a log line.

Pure ASGI: a middleware that wraps the body stream would buffer it and double its cost.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import traceback
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge.answers import problem_answer
from edge.decisions.problems import DRAINING, SERVER, Problem
from edge.metrics import Metrics

REQUEST_ID_PATTERN: Final = re.compile(rb"[A-Za-z0-9_.-]{1,64}")
FAILED: Final = Problem(
    status=500, type=SERVER, code="internal_error", message="Something went wrong on our side."
)

log = logging.getLogger(__name__)


class Rim:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
                self._metrics.requests.labels(str(message["status"])).inc()
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            # The server has waited long enough for this request and ends.
            if not started:
                await problem_answer(DRAINING)(scope, receive, send_with_id)
            raise
        except Exception as error:  # noqa: BLE001 - the rim: whatever it is, it becomes one answer
            # The kind and the place, never the message: it may quote what a user wrote.
            place = traceback.extract_tb(error.__traceback__)[-1]
            log.error(  # noqa: TRY400
                "request %s failed: %s at %s:%s",
                request_id.decode(),
                type(error).__name__,
                place.filename,
                place.lineno,
            )
            if started:
                raise ResponseBroken from None
            await problem_answer(FAILED)(scope, receive, send_with_id)


class ResponseBroken(Exception):
    """The response had begun: the connection is closed, so that it does not look complete."""


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and REQUEST_ID_PATTERN.fullmatch(value):
            return bytes(value)
    return secrets.token_hex(12).encode()
