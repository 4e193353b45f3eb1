"""The rim of the HTTP contract as data: a request, and the status, code and param of its answer. Nothing here reaches the log.

`{chat}` is a chat of the caller, `{run}` a run id of the caller without any record, `{answered_run}` one with an answer in
`{chat_with_leaf}`, `{foreign_chat}`, `{foreign_run}` and `{foreign_message}` are somebody else's. `ACCEPTED` are the other side of
the limits: they are answered.
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


def _wrong(name: str, field: str, value: bytes) -> HttpCase:
    """A field of a message whose value is none that it may have."""
    body = b'{"content":"x","%b":%b}' % (field.encode(), value)
    return _post(name, body, 400, "invalid_value", field)


def _of_bytes(size: int) -> bytes:
    """A body of exactly so many bytes, with as many characters as content may have."""
    body = '{"content":"' + "é" * 128_000 + '"}'
    return body.encode() + b" " * (size - len(body.encode()))


BODY_BYTES_MAX: Final = 256 * 1024

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
    _post("a body of 256 KiB", _of_bytes(BODY_BYTES_MAX), 422, "context_too_long", "content"),
    _post("a body above 256 KiB", _of_bytes(BODY_BYTES_MAX + 1), 413, "body_too_large"),
    _post("a chat as content", b'{"content":{"text":"x"}}', 400, "invalid_value", "content"),
    _post("null as content", b'{"content":null}', 400, "missing_field", "content"),
    _post(
        "content as long as may be",
        b'{"content":"' + b"x" * 128_000 + b'"}',
        422,
        "context_too_long",
        "content",
    ),
    *(
        _post(
            f"{name}, not there yet",
            b'{"content":"x","%b":null}' % name.encode(),
            400,
            "not_supported",
            name,
        )
        for name in (
            "tools",
            "tool_choice",
            "response_format",
            "images",
            "attachments",
            "functions",
        )
    ),
    _wrong("a number as a parent", "parent_id", b"7"),
    _wrong("a list as a model", "model", b'["smollm2-135m"]'),
    _wrong("no output tokens", "max_output_tokens", b"0"),
    _wrong("too many output tokens", "max_output_tokens", b"1000001"),
    _wrong("half an output token", "max_output_tokens", b"1.5"),
    _wrong("a cold temperature", "temperature", b"-0.1"),
    _wrong("a hot temperature", "temperature", b"2.1"),
    _wrong("true as a temperature", "temperature", b"true"),
    _wrong("no top_p", "top_p", b"0"),
    _wrong("too much top_p", "top_p", b"1.1"),
    _wrong("a text as top_p", "top_p", b'"0.5"'),
    _wrong("a negative seed", "seed", b"-1"),
    _wrong("half a seed", "seed", b"0.5"),
    _wrong("a seed of 64 bits", "seed", b"9223372036854775808"),
    _wrong("a number as stop", "stop", b"1"),
    _wrong("a number in stop", "stop", b'["a",1]'),
    _wrong("an empty stop", "stop", b'[""]'),
    _wrong("a long stop alone", "stop", b'"' + b"a" * 65 + b'"'),
    _wrong("a text as stream", "stream", b'"yes"'),
    _wrong("a number as background", "background", b"1"),
    _wrong("a number as on_busy", "on_busy", b"1"),
    _wrong("another on_busy", "on_busy", b'"wait"'),
    _wrong("true as service_tier", "service_tier", b"true"),
    _wrong("another service_tier", "service_tier", b'"priority"'),
    _wrong("another on_disconnect", "on_disconnect", b'"stay"'),
    _post(
        "stream and background",
        b'{"content":"x","stream":true,"background":true}',
        400,
        "invalid_request",
        "background",
    ),
    *(
        HttpCase(
            name=f"a {what} Idempotency-Key",
            body=b'{"content":"x"}',
            headers={"idempotency-key": key},
            status=400,
            code="invalid_value",
            param="Idempotency-Key",
        )
        for what, key in (("foreign", "schl\u00fcssel"), ("empty", ""))
    ),
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
    *(
        HttpCase(
            name=f"a chat with {what}",
            path="/v1/chats",
            body=body,
            status=400,
            code=code,
            param=param,
        )
        for what, body, code, param in (
            ("broken JSON", b'{"title":', "invalid_json", None),
            ("no JSON", b"", "invalid_json", None),
            ("an array", b"[]", "invalid_body", None),
            ("a number as title", b'{"title":1}', "invalid_value", "title"),
            ("a list as prompt", b'{"system_prompt":[]}', "invalid_value", "system_prompt"),
            ("an unknown model", b'{"model":"gpt"}', "unknown_model", "model"),
            ("a number as model", b'{"model":1}', "invalid_value", "model"),
            ("a tool", b'{"tools":[]}', "not_supported", "tools"),
            (
                "a system prompt that is too long",
                b'{"system_prompt":"' + b"x" * 32_001 + b'"}',
                "invalid_value",
                "system_prompt",
            ),
        )
    ),
    HttpCase(
        name="a chat above 256 KiB",
        path="/v1/chats",
        body=_of_bytes(BODY_BYTES_MAX + 1),
        status=413,
        code="body_too_large",
    ),
    *(
        HttpCase(
            name=f"renaming with {what}",
            method="PATCH",
            path="/v1/chats/{chat}",
            body=body,
            status=400,
            code=code,
            param=param,
        )
        for what, body, code, param in (
            ("broken JSON", b"{", "invalid_json", None),
            ("another field", b'{"model":"x"}', "unknown_field", "model"),
            ("a number", b'{"title":1}', "invalid_value", "title"),
            ("too long a title", b'{"title":"' + b"t" * 201 + b'"}', "invalid_value", "title"),
        )
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
    _get("an id with another tag", "/v1/chats/{forged_chat}", 404, "not_found"),
    _get("a message as a chat", "/v1/chats/{foreign_message}", 404, "not_found"),
    _get("a chat as a run", "/v1/chats/{chat}/runs/{chat}", 404, "not_found"),
    _get("a run id that is none", "/v1/chats/{chat}/runs/nonsense", 404, "not_found"),
    _get("events of no run", "/v1/chats/{chat}/runs/run_x/events", 404, "not_found"),
    _get("a run of another chat", "/v1/chats/{chat}/runs/{answered_run}", 404, "not_found"),
    _get(
        "events of a run of another chat",
        "/v1/chats/{chat}/runs/{answered_run}/events",
        404,
        "not_found",
    ),
    _get("a leaf that is none", "/v1/chats/{chat}/messages?leaf=x", 404, "not_found"),
    HttpCase(
        name="renaming a foreign chat",
        method="PATCH",
        path="/v1/chats/{foreign_chat}",
        body=b'{"title":"x"}',
        status=404,
        code="not_found",
    ),
    *(
        HttpCase(name=f"cancelling {what}", path=path, status=404, code="not_found")
        for what, path in (
            ("no run", "/v1/chats/{chat}/runs/run_x/cancel"),
            ("a run of another chat", "/v1/chats/{chat}/runs/{answered_run}/cancel"),
            ("in a foreign chat", "/v1/chats/{foreign_chat}/runs/{answered_run}/cancel"),
        )
    ),
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
    _get(
        "a cursor of messages for chats",
        "/v1/chats?cursor={messages_cursor}",
        400,
        "invalid_cursor",
        "cursor",
    ),
    _get(
        "a cursor of chats for messages",
        "/v1/chats/{chat_with_leaf}/messages?cursor={chats_cursor}",
        400,
        "invalid_cursor",
        "cursor",
    ),
    _get(
        "a cursor for another leaf",
        "/v1/chats/{chat_with_leaf}/messages?cursor={messages_cursor}&leaf={question}",
        400,
        "invalid_cursor",
        "cursor",
    ),
    _get("an endless cursor", "/v1/chats?cursor=" + "A" * 2_000, 400, "invalid_cursor", "cursor"),
    *(
        HttpCase(
            name=f"a Last-Event-ID {what}",
            method="GET",
            path="/v1/chats/{chat_with_leaf}/runs/{answered_run}/events",
            headers={"last-event-id": text},
            status=400,
            code="invalid_cursor",
            param="Last-Event-ID",
        )
        for what, text in (("that is none", "nonsense"), ("of another run", "5-deadbeef"))
    ),
    _get("a negative limit", "/v1/chats?limit=-1", 400, "invalid_value", "limit"),
    _get("half a limit", "/v1/chats?limit=1.5", 400, "invalid_value", "limit"),
    _get("an empty limit", "/v1/chats?limit=", 400, "invalid_value", "limit"),
    _get("a limit in other digits", "/v1/chats?limit=%D9%A3", 400, "invalid_value", "limit"),
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

# Every route that asks who is there.
_ASKING: Final = (
    ("POST", "/v1/chats"),
    ("GET", "/v1/chats"),
    ("GET", "/v1/chats/{chat}"),
    ("PATCH", "/v1/chats/{chat}"),
    ("DELETE", "/v1/chats/{chat}"),
    ("GET", "/v1/chats/{chat}/messages"),
    ("GET", "/v1/chats/{chat}/runs/{run}"),
    ("GET", "/v1/chats/{chat}/runs/{run}/events"),
    ("POST", "/v1/chats/{chat}/runs/{run}/cancel"),
    ("GET", "/v1/models"),
)
EVERYWHERE: Final = tuple(
    HttpCase(
        name=f"{method} {path} with a token that is {token}",
        method=method,
        path=path,
        token=token,
        status=401,
        code=code,
    )
    for method, path in _ASKING
    for token, code in (
        ("missing", "missing_token"),
        ("forged", "invalid_token"),
        ("expired", "expired_token"),
    )
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

ALL: Final = (*BODIES, *IDS, *LISTINGS, *ROUTES, *EVERYWHERE, *TOKENS)


def _taken(name: str, body: bytes, **headers: str) -> HttpCase:
    return HttpCase(name=name, body=body, headers=headers, status=202, code=None)


_LONGEST: Final = (
    b'{"content":"x","background":true,"model":"smollm2-135m","max_output_tokens":1000000,"temperature":2,"top_p":1,'
    b'"seed":9223372036854775807,"stop":["' + b'","'.join(bytes([c]) * 64 for c in b"abcd") + b'"],'
    b'"parent_id":null,"on_busy":"reject","service_tier":"flex","on_disconnect":"continue","stream":false}'
)

ACCEPTED: Final = (
    _taken("one character", b'{"content":" ","background":true}'),
    _taken("every field at its upper end", _LONGEST),
    _taken(
        "every field at its lower end",
        b'{"content":"x","background":true,"max_output_tokens":1,"temperature":0,"top_p":0.000001,"seed":0,"stop":"a"}',
    ),
    _taken("no stop at all", b'{"content":"x","background":true,"stop":[]}'),
    _taken("a body with room around it", b'{"content":"x","background":true}' + b" " * 262_111),
    _taken(
        "a key as long as may be",
        b'{"content":"x","background":true}',
        **{"idempotency-key": "k" * 255},
    ),
    _taken(
        "text of every kind",
        '{"content":"\u2028\U0001f600\u202e e\u0301 \\u0000\\r\\n","background":true}'.encode(),
    ),
    HttpCase(
        name="a chat with all it may have",
        path="/v1/chats",
        body=b'{"title":"' + b"t" * 200 + b'","system_prompt":"x","model":"smollm2-135m"}',
        status=201,
        code=None,
    ),
    HttpCase(
        name="the longest title",
        method="PATCH",
        path="/v1/chats/{chat}",
        body=b'{"title":"' + b"t" * 200 + b'"}',
        status=200,
        code=None,
    ),
    HttpCase(
        name="the longest page", method="GET", path="/v1/chats?limit=100", status=200, code=None
    ),
    HttpCase(
        name="the shortest page", method="GET", path="/v1/chats?limit=1", status=200, code=None
    ),
)

assert len(ACCEPTED[4].body or b"") == BODY_BYTES_MAX, "as large as may be"
