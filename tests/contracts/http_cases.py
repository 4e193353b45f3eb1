"""The rim of the HTTP contract as data: a request, and the status, code and param of its answer. Nothing here reaches the log.

`{chat}` is a chat of the caller, `{run}` a run id of the caller without any record, `{foreign_chat}`, `{foreign_run}` and
`{foreign_message}` are somebody else's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCase:
    """One request. `body` bytes go as they are. `token`: which one to send."""

    name: str
    method: str = "POST"
    path: str = "/v1/chats/{chat}/messages"
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    token: str = "valid"
    status: int
    code: str | None
    param: str | None = None


def _post(name: str, body: bytes, status: int, code: str, param: str | None = None) -> HttpCase:
    return HttpCase(name=name, body=body, status=status, code=code, param=param)


def _get(name: str, path: str, status: int, code: str, param: str | None = None) -> HttpCase:
    return HttpCase(name=name, method="GET", path=path, status=status, code=code, param=param)


_BIG: Final = b'{"content":"' + b"x" * 262_144 + b'"}'

BODIES: Final = (
    _post("no body", b"", 400, "invalid_json"),
    _post("broken JSON", b'{"content": "x"', 400, "invalid_json"),
    _post("bytes after the JSON", b'{"content":"x"} {}', 400, "invalid_json"),
    _post("no UTF-8", b'{"content":"\xff"}', 400, "invalid_json"),
    _post("a lone surrogate", b'{"content":"\\ud800"}', 400, "invalid_json"),
    _post("a lone low surrogate", b'{"content":"a\\udc00b"}', 400, "invalid_json"),
    _post("NaN", b'{"content":"x","temperature":NaN}', 400, "invalid_json"),
    _post("an infinite number", b'{"content":"x","temperature":1e999}', 400, "invalid_json"),
    _post("nested beyond reason", b"[" * 5_000 + b"]" * 5_000, 400, "invalid_json"),
    _post("an array", b"[]", 400, "invalid_body"),
    _post("a string", b'"content"', 400, "invalid_body"),
    _post("an unknown field", b'{"content":"x","colour":1}', 400, "unknown_field", "colour"),
    _post("tools", b'{"content":"x","tools":[]}', 400, "not_supported", "tools"),
    _post(
        "a format", b'{"content":"x","response_format":{}}', 400, "not_supported", "response_format"
    ),
    _post("an image", b'{"content":[{"type":"image"}]}', 400, "not_supported", "content"),
    _post("enqueue", b'{"content":"x","on_busy":"enqueue"}', 400, "not_supported", "on_busy"),
    _post("interrupt", b'{"content":"x","on_busy":"interrupt"}', 400, "not_supported", "on_busy"),
    _post(
        "cancel", b'{"content":"x","on_disconnect":"cancel"}', 400, "not_supported", "on_disconnect"
    ),
    _post(
        "cancel later",
        b'{"content":"x","on_disconnect":{"cancel_after_s":3}}',
        400,
        "not_supported",
        "on_disconnect",
    ),
    _post("a number as content", b'{"content":1}', 400, "invalid_value", "content"),
    _post("no content", b"{}", 400, "missing_field", "content"),
    _post("empty content", b'{"content":""}', 422, "content_length", "content"),
    _post(
        "long content", b'{"content":"' + b"x" * 128_001 + b'"}', 422, "content_length", "content"
    ),
    _post(
        "more than the context",
        b'{"content":"' + b"x y " * 32_000 + b'"}',
        422,
        "context_too_long",
        "content",
    ),
    _post(
        "a text as a number",
        b'{"content":"x","temperature":"1"}',
        400,
        "invalid_value",
        "temperature",
    ),
    _post("true as a number", b'{"content":"x","seed":true}', 400, "invalid_value", "seed"),
    _post(
        "a huge number",
        b'{"content":"x","seed":99999999999999999999}',
        400,
        "invalid_value",
        "seed",
    ),
    _post(
        "a negative limit",
        b'{"content":"x","max_output_tokens":-1}',
        400,
        "invalid_value",
        "max_output_tokens",
    ),
    _post(
        "five stops", b'{"content":"x","stop":["a","b","c","d","e"]}', 400, "invalid_value", "stop"
    ),
    _post(
        "a long stop",
        b'{"content":"x","stop":["' + b"a" * 65 + b'"]}',
        400,
        "invalid_value",
        "stop",
    ),
    _post("an unknown model", b'{"content":"x","model":"gpt"}', 400, "unknown_model", "model"),
    _post("a parent that is none", b'{"content":"x","parent_id":"msg_x"}', 404, "not_found"),
    _post("a foreign parent", b'{"content":"x","parent_id":"{foreign_message}"}', 404, "not_found"),
    _post("a body above 256 KiB", _BIG, 413, "body_too_large"),
    HttpCase(
        name="an Idempotency-Key that is too long",
        body=b'{"content":"x"}',
        headers={"idempotency-key": "k" * 256},
        status=400,
        code="invalid_value",
        param="Idempotency-Key",
    ),
    HttpCase(
        name="a chat with an unknown field",
        path="/v1/chats",
        body=b'{"name":"x"}',
        status=400,
        code="unknown_field",
        param="name",
    ),
    HttpCase(
        name="a title that is too long",
        path="/v1/chats",
        body=b'{"title":"' + b"t" * 201 + b'"}',
        status=400,
        code="invalid_value",
        param="title",
    ),
    HttpCase(
        name="a system prompt beyond the context",
        path="/v1/chats",
        body=b'{"system_prompt":"' + b"x y " * 7_900 + b'"}',
        status=422,
        code="context_too_long",
        param="system_prompt",
    ),
    HttpCase(
        name="renaming without a title",
        method="PATCH",
        path="/v1/chats/{chat}",
        body=b"{}",
        status=400,
        code="missing_field",
        param="title",
    ),
)

IDS: Final = (
    _get("a chat id that is none", "/v1/chats/nonsense", 404, "not_found"),
    _get("a foreign chat", "/v1/chats/{foreign_chat}", 404, "not_found"),
    _get("a foreign chat's messages", "/v1/chats/{foreign_chat}/messages", 404, "not_found"),
    _get("a run in a foreign chat", "/v1/chats/{foreign_chat}/runs/{run}", 404, "not_found"),
    _get("a foreign run", "/v1/chats/{chat}/runs/{foreign_run}", 404, "not_found"),
    _get("a foreign run's events", "/v1/chats/{chat}/runs/{foreign_run}/events", 404, "not_found"),
    _get("a run without any record", "/v1/chats/{chat}/runs/{run}", 404, "not_found"),
    _get("a foreign leaf", "/v1/chats/{chat}/messages?leaf={foreign_message}", 404, "not_found"),
    HttpCase(
        name="cancelling a foreign run",
        path="/v1/chats/{chat}/runs/{foreign_run}/cancel",
        status=404,
        code="not_found",
    ),
    HttpCase(
        name="posting to a foreign chat",
        path="/v1/chats/{foreign_chat}/messages",
        body=b'{"content":"x"}',
        status=404,
        code="not_found",
    ),
    HttpCase(
        name="deleting a foreign chat",
        method="DELETE",
        path="/v1/chats/{foreign_chat}",
        status=404,
        code="not_found",
    ),
    _get("an upper-case id", "/v1/chats/{CHAT}", 404, "not_found"),
)

LISTINGS: Final = (
    _get("a bad cursor of chats", "/v1/chats?cursor=nonsense", 400, "invalid_cursor", "cursor"),
    _get(
        "a bad cursor of messages",
        "/v1/chats/{chat_with_leaf}/messages?cursor=x",
        400,
        "invalid_cursor",
        "cursor",
    ),
    _get("a limit of zero", "/v1/chats?limit=0", 400, "invalid_value", "limit"),
    _get("a limit above the most", "/v1/chats?limit=101", 400, "invalid_value", "limit"),
    _get(
        "a limit that is none", "/v1/chats/{chat}/messages?limit=x", 400, "invalid_value", "limit"
    ),
)

ROUTES: Final = (
    _get("no such route", "/v1/nothing", 404, "route_not_found"),
    _get("a route with a slash too many", "/v1/chats/", 404, "route_not_found"),
    HttpCase(
        name="a method that a route does not take",
        method="PUT",
        path="/v1/chats",
        status=405,
        code="method_not_allowed",
    ),
    HttpCase(
        name="regenerate, which is not there yet",
        path="/v1/chats/{chat}/messages/msg_x/regenerate",
        status=404,
        code="route_not_found",
    ),
)

TOKENS: Final = tuple(
    HttpCase(
        name=f"a token that is {token}",
        method=method,
        path=path,
        body=b'{"content":"x"}' if method == "POST" else None,
        token=token,
        status=401,
        code=code,
    )
    for method, path in (("POST", "/v1/chats/{chat}/messages"), ("GET", "/v1/quota"))
    for token, code in (
        ("missing", "missing_token"),
        ("no bearer", "invalid_token"),
        ("empty", "invalid_token"),
        ("nonsense", "invalid_token"),
        ("forged", "invalid_token"),
        ("unsigned", "invalid_token"),
        ("expired", "expired_token"),
        ("without a tier", "invalid_token"),
        ("of an unknown tier", "invalid_token"),
        ("for somebody else's service", "invalid_token"),
        ("without an end", "invalid_token"),
        ("tampered with", "invalid_token"),
    )
)

ALL: Final = (*BODIES, *IDS, *LISTINGS, *ROUTES, *TOKENS)
