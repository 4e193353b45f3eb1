"""What the outermost layer promises, whatever the application does."""

from __future__ import annotations

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from edge.metrics import Metrics
from edge.rim import Rim

SECRET = "what a user wrote"


async def _breaks(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError(SECRET)


async def test_a_failure_is_one_answer_in_the_one_shape_and_quotes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport = httpx.ASGITransport(app=Rim(_breaks, Metrics()))
    async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
        answer = await client.get("/", headers={"x-request-id": "r-1"})
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == "r-1"
    assert answer.json() == {
        "error": {
            "message": "Something went wrong on our side.",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    }
    assert SECRET not in answer.text
    assert "RuntimeError" in caplog.text
    assert SECRET not in caplog.text
