"""Reading a request's body: bounded while it arrives, and JSON as UTF-8 knows it."""

from __future__ import annotations

import asyncio
from typing import Final

import orjson
from starlette.requests import ClientDisconnect, Request

from edge.decisions.problems import INVALID, Problem, Refused, invalid, too_large
from edge.decisions.requests import BODY_BYTES_MAX

BODY_WAIT_S_MAX: Final = 15.0


async def read_json(request: Request) -> object:
    """The body's JSON. Raises Refused: 413 once it is known to be too large, 400 when it is no JSON, 408 when it does not come."""
    body = await read_body(request, BODY_BYTES_MAX)
    try:
        # Refuses lone surrogates, NaN and trailing bytes: none of them is JSON text in UTF-8.
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        raise invalid("The body is not valid JSON.", code="invalid_json") from None


async def read_body(request: Request, bytes_max: int) -> bytes:
    """The body. Raises Refused: 413 once it is known to be too large, 408 when it does not come."""
    stated = request.headers.get("content-length")
    if stated is not None and stated.isdecimal() and int(stated) > bytes_max:
        raise too_large(bytes_max)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_WAIT_S_MAX):
            async for piece in request.stream():
                body += piece
                if len(body) > bytes_max:
                    raise too_large(bytes_max)
    except TimeoutError:
        raise Refused(
            Problem(
                status=408,
                type=INVALID,
                code="body_timeout",
                message="The body did not arrive in time.",
                headers={"connection": "close"},
            )
        ) from None
    except ClientDisconnect:
        raise invalid("The connection closed before the body was complete.") from None
    return bytes(body)
