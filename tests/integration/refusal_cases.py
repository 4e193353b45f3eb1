"""Every refusal of the HTTP contract as data: what earns it, and the status, headers and body of its answer.

`PROMPTS` are judged by admission, or by an edge that knows its answer already; `RIM` never come so far.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from schemas.vocabulary import Tier

MODEL: Final = "smollm2-135m"
# It is known to every system, and this one does not serve it.
OTHER_MODEL: Final = "gemma3-270m"
OUTPUT_TOKENS: Final = 400
TIER: Final[Mapping[str, Any]] = {
    "tokens_per_window": 10_000_000,
    "window": "month",
    "open_runs_max": 500,
    "models": [MODEL],
    "input_tokens_max": 200,
    "output_tokens_max": OUTPUT_TOKENS,
    "run_deadline_ms": 600_000,
    "queue_wait_ms_max": 7_000_000,
}
SECONDS: Final = r"[1-9]\d*"
NEVER: Final[Mapping[str, str]] = {"x-should-retry": "false"}
COME_BACK: Final[Mapping[str, str]] = {"retry-after": SECONDS, "retry-after-ms": SECONDS + "000"}
SIGN_IN: Final[Mapping[str, str]] = {
    "www-authenticate": 'Bearer realm="turnlog", error="invalid_token"'
}
WINDOW_END: Final = r"\d{4}-\d\d-01T00:00:00\.000Z"


def policy_file(phrases: tuple[str, ...] = (), **changes: Any) -> str:
    """A file in which every tier has the same limits."""
    fields = "\n".join(
        f"{name} = {json.dumps(value)}" for name, value in {**TIER, **changes}.items()
    )
    tiers = "\n".join(f"[tiers.{tier}]\n{fields}" for tier in Tier)
    return f"{tiers}\n[content]\nblocked_phrases = {json.dumps(phrases)}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A refusal as the client reads it.

    `members` of the error beside the four that every error has, and `headers`: patterns of their whole values; no other of these is
    there. `allowance`: it tells what is left of the rates and the quota.
    """

    status: int
    type: str
    code: str
    param: str | None = None
    members: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    allowance: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """A message, of a seat, into one of the case's chats."""

    chat: str = "one"
    seat: str = "a"
    key: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCase:
    """The messages of a new account under these limits. All before the last are admitted; the last is sent up to `tries` times until it is
    not. `chat` are the fields with which chats are created, under limits that forbid nothing.
    """

    name: str
    limits: Mapping[str, Any] = field(default_factory=dict)
    chat: Mapping[str, Any] = field(default_factory=dict)
    before: tuple[Post, ...] = ()
    last: Post
    tries: int = 1
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class RimCase:
    """One request. `{chat}` is a chat of the caller, `{foreign_chat}` is somebody else's."""

    name: str
    method: str = "POST"
    path: str = "/v1/chats/{chat}/messages"
    token: str = "valid"
    body: bytes = b'{"content": "x"}'
    answer: Answer


def _invalid(status: int, code: str, param: str | None = None) -> Answer:
    return Answer(
        status=status, type="invalid_request_error", code=code, param=param, headers=NEVER
    )


def _limited(code: str, limit: str) -> Answer:
    return Answer(
        status=429,
        type="rate_limit_error",
        code=code,
        members={"limit": limit},
        headers=COME_BACK,
    )


def _exhausted(limit: str) -> Answer:
    return Answer(
        status=429,
        type="rate_limit_error",
        code="quota_exhausted",
        members={"limit": limit, "window_ends_at": WINDOW_END},
        headers=NEVER,
    )


FLOODED: Final = _limited("rate_limited", "flood")
"""What the edge answers before the log to who sends far more than it may."""
FIRST: Final = (Post(),)
ELSEWHERE: Final = Post(chat="two")

PROMPTS: Final = (
    PromptCase(
        name="a second message while the first is answered",
        before=FIRST,
        last=Post(),
        answer=_invalid(409, "run_in_progress"),
    ),
    PromptCase(
        name="more messages behind an answer than may wait",
        limits={"enqueued_runs_max": 0},
        before=FIRST,
        last=Post(fields={"on_busy": "enqueue"}),
        answer=_limited("too_many_runs", "enqueued_runs_max"),
    ),
    PromptCase(
        name="more answers at once than the account may have",
        limits={"open_runs_max": 1},
        before=FIRST,
        last=ELSEWHERE,
        answer=_limited("too_many_runs", "open_runs_max"),
    ),
    PromptCase(
        name="more answers at once than the seat may have",
        limits={"seat_open_runs_max": 1},
        before=(Post(), Post(chat="three", seat="b")),
        last=ELSEWHERE,
        answer=_limited("too_many_runs", "seat_open_runs_max"),
    ),
    PromptCase(
        name="more messages a minute",
        limits={"requests_per_minute": 1, "requests_burst": 1},
        before=FIRST,
        last=ELSEWHERE,
        answer=_limited("rate_limited", "requests_per_minute"),
    ),
    PromptCase(
        name="more tokens a minute",
        limits={"tokens_per_minute": 1, "tokens_burst": 201},
        before=FIRST,
        last=ELSEWHERE,
        answer=_limited("rate_limited", "tokens_per_minute"),
    ),
    PromptCase(
        name="more tokens than are left in the window",
        limits={"tokens_per_window": 5},
        last=Post(),
        answer=_exhausted("tokens_per_window"),
    ),
    PromptCase(
        name="more tokens than are left for the seat",
        limits={"seat_tokens_per_window": 230},
        before=(Post(), Post(chat="three", seat="b")),
        last=ELSEWHERE,
        answer=_exhausted("seat_tokens_per_window"),
    ),
    PromptCase(
        name="more seats than the account may have",
        limits={"seats_max": 1},
        before=FIRST,
        last=Post(chat="two", seat="b"),
        answer=_exhausted("seats_max"),
    ),
    PromptCase(
        name="a wait beyond what the tier waits",
        limits={"queue_wait_ms_max": 0},
        last=Post(chat="another each time"),
        tries=40,
        answer=Answer(
            status=503,
            type="server_error",
            code="overloaded",
            members={"limit": "queue_wait_ms_max", "wait_ms": SECONDS},
            headers=COME_BACK,
        ),
    ),
    PromptCase(
        name="a blocked phrase",
        limits={"phrases": ("bad word",)},
        last=Post(fields={"content": "Say the BAD\n word!"}),
        answer=_invalid(400, "content_blocked", "content"),
    ),
    PromptCase(
        name="a chat whose model the tier has no more",
        limits={"models": [OTHER_MODEL]},
        chat={"model": MODEL},
        last=Post(),
        answer=_invalid(422, "model_not_allowed", "model"),
    ),
    PromptCase(
        name="a message beyond the input limit",
        last=Post(fields={"content": "word " * 400}),
        answer=Answer(
            status=422,
            type="invalid_request_error",
            code="context_too_long",
            param="content",
            headers=NEVER,
            allowance=False,
        ),
    ),
    PromptCase(
        name="an idempotency key with another message",
        before=(Post(key="k"),),
        last=Post(key="k", fields={"content": "Something else."}),
        answer=_invalid(422, "idempotency_conflict", "Idempotency-Key"),
    ),
)


def _rim(
    status: int,
    code: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    headers: Mapping[str, str] = NEVER,
) -> Answer:
    return Answer(
        status=status, type=kind, code=code, param=param, headers=headers, allowance=False
    )


RIM: Final = (
    *(
        RimCase(
            name=f"a token that is {token}",
            token=token,
            answer=_rim(401, code, kind="authentication_error", headers=SIGN_IN),
        )
        for token, code in (
            ("missing", "missing_token"),
            ("forged", "invalid_token"),
            ("expired", "expired_token"),
        )
    ),
    RimCase(
        name="somebody else's chat",
        path="/v1/chats/{foreign_chat}/messages",
        answer=_rim(404, "not_found", kind="not_found_error", headers={}),
    ),
    RimCase(
        name="a route that is not there",
        path="/v1/nothing",
        answer=_rim(404, "route_not_found", kind="not_found_error", headers={}),
    ),
    RimCase(
        name="a body above 256 KiB",
        body=b'{"content": "x"}' + b" " * 256 * 1024,
        answer=_rim(413, "body_too_large"),
    ),
    RimCase(
        name="more characters than content may have",
        body=b'{"content": "' + b"x" * 128_001 + b'"}',
        answer=_rim(422, "content_length", param="content"),
    ),
)
