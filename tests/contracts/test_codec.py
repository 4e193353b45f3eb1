"""Bytes on the log: what was published stays readable, and what is no event is refused with a reason that holds no content."""

from __future__ import annotations

import msgspec
import pytest

from schemas.codec import SCHEMA_OF, TYPE_OF_NAME, Undecodable, decode, encode
from schemas.events import Event
from schemas.topics import FIXED, TOKENS, Topic, generations
from schemas.vocabulary import Lane
from tests.contracts.event_samples import HARD_TEXT, MODEL, SAMPLES
from tests.contracts.golden_bytes import Golden, current, published

TOPICS = {topic.name: topic for topic in (*FIXED, *(generations(MODEL, lane) for lane in Lane))}


def test_every_event_has_a_sample() -> None:
    assert {type(event) for _, event in SAMPLES} == set(SCHEMA_OF)


def test_todays_code_writes_the_newest_published_bytes_of_each_event() -> None:
    newest = {entry.type: entry for entry in published()}
    assert {entry.type: entry for entry in current()} == newest


@pytest.mark.parametrize("entry", published(), ids=lambda entry: f"{entry.type}.{entry.schema}")
def test_published_bytes_decode(entry: Golden) -> None:
    headers, body = entry.wire()
    envelope = decode(TOPICS[entry.topic], headers, body)
    assert type(envelope.event) is TYPE_OF_NAME[entry.type]
    assert (envelope.event_id, envelope.cause_id, envelope.trace) == ("e-1", "c-1", "t-1")


@pytest.mark.parametrize(("topic", "event"), SAMPLES, ids=lambda value: type(value).__name__)
def test_an_event_survives_the_way_to_the_log_and_back(topic: Topic, event: Event) -> None:
    body, headers = encode(event, event_id="e-1")
    assert decode(topic, headers, body).event == event


def test_readers_ignore_fields_that_they_do_not_know() -> None:
    for entry in published():
        headers, body = entry.wire()
        wider = msgspec.json.decode(body) | {"field_of_tomorrow": [1]}
        decode(TOPICS[entry.topic], headers, msgspec.json.encode(wider))


def _golden(name: str) -> tuple[list[tuple[str, bytes]], bytes]:
    return next(entry for entry in published() if entry.type == name).wire()


GOOD_HEADERS, GOOD_BODY = _golden("TokensGenerated")


@pytest.mark.parametrize(
    ("headers", "body", "reason"),
    [
        ([], GOOD_BODY, "no known event type"),
        ([("t", b"NoSuchEvent"), *GOOD_HEADERS[1:]], GOOD_BODY, "no known event type"),
        ([("t", b"ChatCreated"), *GOOD_HEADERS[1:]], GOOD_BODY, "no known event type"),
        ([GOOD_HEADERS[0], ("v", b"99"), *GOOD_HEADERS[2:]], GOOD_BODY, "schema number"),
        (GOOD_HEADERS[:2], GOOD_BODY, "no event id"),
        ([("t", b"\xff"), *GOOD_HEADERS[1:]], GOOD_BODY, "not text"),
        ([("t", None), *GOOD_HEADERS[1:]], GOOD_BODY, "not text"),
        (GOOD_HEADERS, None, "no body"),
        (GOOD_HEADERS, b"", "TokensGenerated"),
        (GOOD_HEADERS, b"\x00\xff", "TokensGenerated"),
        (GOOD_HEADERS, b"[]", "TokensGenerated"),
        (GOOD_HEADERS, GOOD_BODY.replace(b'"index":0', b'"index":"zero"'), "index"),
        (GOOD_HEADERS, GOOD_BODY.replace(b'"count":2,', b""), "count"),
        (*_golden("RunCancelled")[:1], b'{"run_id":"r","reason":"zero"}', "unknown word.*reason"),
    ],
)
def test_what_is_no_event_is_refused_with_a_reason(
    headers: list[tuple[str, bytes]], body: bytes | None, reason: str
) -> None:
    with pytest.raises(Undecodable, match=reason) as refused:
        decode(TOKENS, headers, body)
    assert HARD_TEXT[-3:] not in str(refused.value)
    assert "zero" not in str(refused.value)
