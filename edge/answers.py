"""Answers as JSON, and problems as the one error shape."""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from starlette.responses import Response

from edge.decisions.problems import Problem


def json_answer(
    body: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON answer."""
    return Response(
        orjson.dumps(body),
        status_code=status,
        media_type="application/json",
        headers={"cache-control": "no-store", **(headers or {})},
    )


def problem_answer(problem: Problem) -> Response:
    """The answer to a request that is refused."""
    return json_answer(problem.body(), status=problem.status, headers=problem.headers)
