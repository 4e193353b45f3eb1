"""What a request body may say. Every refusal names the field; nothing is ignored silently.

B1  Unknown fields are refused, and so are known ones of later versions (`tools`, images, …), by name.
B2  A field that is absent or null has its default. No type is converted into another.
B3  Limits hold before anything is appended.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from edge.decisions.problems import Refused, invalid, unprocessable
from schemas.events.accounts import Sampling
from schemas.vocabulary import OnBusy, ServiceTier

BODY_BYTES_MAX: Final = 256 * 1024
CONTENT_CHARS_MAX: Final = 128_000
TITLE_CHARS_MAX: Final = 200
SYSTEM_PROMPT_CHARS_MAX: Final = 32_000
MODEL_CHARS_MAX: Final = 100
STOPS_MAX: Final = 4
STOP_CHARS_MAX: Final = 64
OUTPUT_TOKENS_MAX: Final = 1_000_000
TEMPERATURE_MAX: Final = 2.0
SEED_MAX: Final = 2**63 - 1
IDEMPOTENCY_KEY_CHARS_MAX: Final = 255
PAGE_MAX: Final = 100
PAGE_DEFAULT: Final = 20

NOT_YET: Final = (
    "tools",
    "tool_choice",
    "response_format",
    "images",
    "attachments",
    "functions",
)
_POST_FIELDS: Final = frozenset(
    {
        "content",
        "parent_id",
        "model",
        "max_output_tokens",
        "temperature",
        "top_p",
        "stop",
        "seed",
        "on_disconnect",
        "on_busy",
        "service_tier",
        "stream",
        "background",
    }
)
WordT = TypeVar("WordT", OnBusy, ServiceTier)

_NOT_IN_FINGERPRINT: Final = ("stream", "background", "on_disconnect")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewChat:
    """POST /v1/chats"""

    title: str
    system_prompt: str
    model: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMessage:
    """POST /v1/chats/{chat_id}/messages. `parent_id` None: the chat's current leaf."""

    content: str
    parent_id: str | None
    model: str | None
    max_output_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    on_busy: OnBusy
    service_tier: ServiceTier
    stream: bool
    background: bool


def read_new_chat(body: object) -> NewChat:
    """Raises Refused."""
    fields = _object(body, frozenset({"title", "system_prompt", "model"}))
    return NewChat(
        title=_text(fields, "title", TITLE_CHARS_MAX) or "",
        system_prompt=_text(fields, "system_prompt", SYSTEM_PROMPT_CHARS_MAX) or "",
        model=_text(fields, "model", MODEL_CHARS_MAX),
    )


def read_title(body: object) -> str:
    """The new title of PATCH /v1/chats/{chat_id}. Raises Refused."""
    fields = _object(body, frozenset({"title"}))
    if fields.get("title") is None:
        raise invalid("title is missing.", param="title", code="missing_field")
    return _text(fields, "title", TITLE_CHARS_MAX) or ""


def read_new_message(body: object) -> NewMessage:
    """Raises Refused."""
    fields = _object(body, _POST_FIELDS)
    _only_default(fields, "on_disconnect", "continue")
    stream, background = _flag(fields, "stream"), _flag(fields, "background")
    if stream and background:
        raise invalid("stream and background exclude each other.", param="background")
    return NewMessage(
        content=_content(fields),
        parent_id=_text(fields, "parent_id", 64),
        model=_text(fields, "model", MODEL_CHARS_MAX),
        max_output_tokens=_whole(fields, "max_output_tokens", 1, OUTPUT_TOKENS_MAX),
        sampling=Sampling(
            temperature=_number(fields, "temperature", 0.0, TEMPERATURE_MAX),
            top_p=_top_p(fields),
            seed=_whole(fields, "seed", 0, SEED_MAX),
        ),
        stop=_stops(fields),
        on_busy=_word(fields, "on_busy", OnBusy.REJECT),
        service_tier=_word(fields, "service_tier", ServiceTier.DEFAULT),
        stream=not background and stream is not False,
        background=bool(background),
    )


def read_limit(text: str | None) -> int:
    """`limit` of a listing. Raises Refused."""
    if text is None:
        return PAGE_DEFAULT
    if not (text.isascii() and text.isdecimal() and len(text) <= 6 and 1 <= int(text) <= PAGE_MAX):
        raise invalid(f"limit must be 1 to {PAGE_MAX}.", param="limit", code="invalid_value")
    return int(text)


def read_idempotency_key(text: str | None) -> str | None:
    """Printable ASCII. Raises Refused."""
    if text is None:
        return None
    if not (1 <= len(text) <= IDEMPOTENCY_KEY_CHARS_MAX and text.isascii() and text.isprintable()):
        raise invalid(
            f"Idempotency-Key must be 1 to {IDEMPOTENCY_KEY_CHARS_MAX} printable ASCII characters.",
            param="Idempotency-Key",
            code="invalid_value",
        )
    return text


def fingerprint(path: str, body: object) -> str:
    """What makes two requests the same under one Idempotency-Key: path and body, but not how the answer is delivered."""
    assert isinstance(body, dict), "checked before"
    kept = {name: value for name, value in body.items() if name not in _NOT_IN_FINGERPRINT}
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(f"{path}\n{canonical}".encode(), digest_size=16).hexdigest()


def _object(body: object, known: frozenset[str]) -> Mapping[str, object]:
    if not isinstance(body, dict):
        raise invalid("The body must be a JSON object.", code="invalid_body")
    for name in body:
        if name in NOT_YET:
            raise invalid(f"{name} is not supported yet.", param=name, code="not_supported")
        if name not in known:
            shown = name if len(name) <= 64 else name[:64]
            raise invalid("This field is not known here.", param=shown, code="unknown_field")
    return body


def _wrong(name: str, expected: str) -> Refused:
    return invalid(f"{name} must be {expected}.", param=name, code="invalid_value")


def _text(fields: Mapping[str, object], name: str, chars_max: int) -> str | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise _wrong(name, "a string")
    if len(value) > chars_max:
        raise _wrong(name, f"at most {chars_max} characters")
    return value


def _content(fields: Mapping[str, object]) -> str:
    value = fields.get("content")
    if isinstance(value, list):
        raise invalid(
            "content must be a string; parts and images are not supported yet.",
            param="content",
            code="not_supported",
        )
    if value is None:
        raise invalid("content is missing.", param="content", code="missing_field")
    if not isinstance(value, str):
        raise _wrong("content", "a string")
    if not 1 <= len(value) <= CONTENT_CHARS_MAX:
        raise unprocessable(
            f"content must be 1 to {CONTENT_CHARS_MAX} characters.",
            param="content",
            code="content_length",
        )
    return value


def _flag(fields: Mapping[str, object], name: str) -> bool | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, "true or false")
    return value


def _whole(fields: Mapping[str, object], name: str, low: int, high: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _wrong(name, f"a whole number, {low} to {high}")
    return value


def _number(fields: Mapping[str, object], name: str, low: float, high: float) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(name, f"a number, {low:g} to {high:g}")
    if not math.isfinite(value) or not low <= value <= high:
        raise _wrong(name, f"a number, {low:g} to {high:g}")
    return float(value)


def _top_p(fields: Mapping[str, object]) -> float | None:
    value = _number(fields, "top_p", 0.0, 1.0)
    if value == 0.0:
        raise _wrong("top_p", "a number above 0, at most 1")
    return value


def _stops(fields: Mapping[str, object]) -> tuple[str, ...]:
    value = fields.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    expected = f"a string or at most {STOPS_MAX} strings, each of 1 to {STOP_CHARS_MAX} characters"
    if not isinstance(stops, list) or len(stops) > STOPS_MAX:
        raise _wrong("stop", expected)
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= STOP_CHARS_MAX:
            raise _wrong("stop", expected)
    return tuple(stops)


def _word(fields: Mapping[str, object], name: str, default: WordT) -> WordT:
    value = fields.get(name)
    if value is None:
        return default
    words = type(default)
    if not isinstance(value, str) or value not in set(words):
        raise _wrong(name, "one of " + ", ".join(words))
    return words(value)


def _only_default(fields: Mapping[str, object], name: str, default: str) -> None:
    value = fields.get(name)
    if value is None or value == default:
        return
    timed = isinstance(value, dict) and set(value) == {"cancel_after_s"}
    if name == "on_disconnect" and (value == "cancel" or timed):
        raise invalid(f"{name}: only {default} is supported yet.", param=name, code="not_supported")
    raise _wrong(name, default)
