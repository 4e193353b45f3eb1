"""What a request body may say (rules B1 to B3)."""

from __future__ import annotations

from typing import Any

import pytest

from edge.decisions.problems import Refused
from edge.decisions.requests import (
    CONTENT_CHARS_MAX,
    fingerprint,
    read_idempotency_key,
    read_limit,
    read_new_chat,
    read_new_message,
    read_title,
)
from schemas.events.accounts import Sampling
from schemas.vocabulary import ServiceTier


def refused(body: object) -> tuple[int, str | None, str]:
    with pytest.raises(Refused) as caught:
        read_new_message(body)
    problem = caught.value.problem
    return problem.status, problem.param, problem.code


def test_a_message_of_content_alone_has_the_defaults() -> None:
    message = read_new_message({"content": "Hi"})
    assert message.stream
    assert not message.background
    assert message.sampling == Sampling()
    assert message.stop == ()
    assert message.parent_id is None
    assert message.service_tier is ServiceTier.DEFAULT


def test_all_fields_are_read() -> None:
    message = read_new_message(
        {
            "content": "Hi",
            "parent_id": "msg_x",
            "model": "m",
            "max_output_tokens": 5,
            "temperature": 1,
            "top_p": 0.5,
            "stop": ["a", "b"],
            "seed": 7,
            "on_busy": "reject",
            "service_tier": "flex",
            "on_disconnect": "continue",
            "stream": False,
        }
    )
    assert message.sampling == Sampling(temperature=1.0, top_p=0.5, seed=7)
    assert message.stop == ("a", "b")
    assert message.max_output_tokens == 5
    assert message.service_tier is ServiceTier.FLEX
    assert not message.stream


@pytest.mark.parametrize("body", [None, [], "text", 3, True])
def test_only_an_object_is_a_body(body: object) -> None:
    assert refused(body) == (400, None, "invalid_body")


@pytest.mark.parametrize("name", ["tools", "response_format", "images"])
def test_what_is_not_supported_yet_is_refused_by_name(name: str) -> None:
    assert refused({"content": "Hi", name: []}) == (400, name, "not_supported")


def test_an_unknown_field_is_named() -> None:
    assert refused({"content": "Hi", "contnet": 1}) == (400, "contnet", "unknown_field")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("on_disconnect", "cancel"),
        ("on_disconnect", {"cancel_after_s": 3}),
    ],
)
def test_a_policy_that_does_not_exist_yet_is_refused_by_name(name: str, value: object) -> None:
    assert refused({"content": "Hi", name: value}) == (400, name, "not_supported")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("content", 5),
        ("content", {"text": "x"}),
        ("parent_id", 5),
        ("model", ["m"]),
        ("max_output_tokens", 0),
        ("max_output_tokens", 1.5),
        ("max_output_tokens", True),
        ("max_output_tokens", "5"),
        ("temperature", -0.1),
        ("temperature", 2.01),
        ("temperature", "warm"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.0),
        ("stop", ["a"] * 5),
        ("stop", ["a" * 65]),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stream", "yes"),
        ("stream", 1),
        ("background", 0),
        ("on_busy", "wait"),
        ("on_busy", 1),
        ("on_busy", ["enqueue"]),
        ("service_tier", "auto"),
        ("service_tier", ""),
        ("service_tier", True),
        ("service_tier", ["flex"]),
        ("on_disconnect", "explode"),
        ("on_disconnect", 5),
    ],
)
def test_a_wrong_type_or_value_is_named_and_never_converted(name: str, value: Any) -> None:
    status, param, code = refused({"content": "Hi", name: value})
    assert (status, param, code) == (400, name, "invalid_value")


def test_a_list_of_parts_says_that_parts_are_not_supported() -> None:
    assert refused({"content": [{"type": "text"}]}) == (400, "content", "not_supported")


def test_content_is_there_and_within_its_length() -> None:
    assert refused({}) == (400, "content", "missing_field")
    assert refused({"content": None}) == (400, "content", "missing_field")
    assert refused({"content": ""}) == (422, "content", "content_length")
    assert refused({"content": "x" * (CONTENT_CHARS_MAX + 1)}) == (422, "content", "content_length")
    assert len(read_new_message({"content": "x" * CONTENT_CHARS_MAX}).content) == CONTENT_CHARS_MAX
    assert read_new_message({"content": "x"}).content == "x"


def test_limits_of_stops_and_seeds_themselves_are_taken() -> None:
    message = read_new_message({"content": "x", "stop": ["a" * 64] * 4, "seed": 2**63 - 1})
    assert len(message.stop) == 4
    assert read_new_message({"content": "x", "stop": "one"}).stop == ("one",)


def test_null_is_absent() -> None:
    body = dict.fromkeys(
        (
            *("parent_id", "model", "max_output_tokens", "temperature", "stop", "stream"),
            *("on_busy", "service_tier"),
        )
    )
    assert read_new_message({"content": "Hi", **body}) == read_new_message({"content": "Hi"})


def test_stream_and_background_exclude_each_other() -> None:
    assert refused({"content": "x", "stream": True, "background": True})[:2] == (400, "background")
    assert not read_new_message({"content": "x", "background": True}).stream


def test_the_fingerprint_covers_path_and_body_but_not_the_delivery() -> None:
    body = {"content": "Hi", "temperature": 0.5}
    same = {
        "temperature": 0.5,
        "stream": False,
        "background": True,
        "on_disconnect": "continue",
        "content": "Hi",
    }
    assert fingerprint("/a", body) == fingerprint("/a", same)
    assert fingerprint("/a", body) != fingerprint("/b", body)
    assert fingerprint("/a", body) != fingerprint("/a", {**body, "content": "Ho"})
    assert fingerprint("/a", body) != fingerprint("/a", {**body, "service_tier": "flex"})


@pytest.mark.parametrize("text", ["", "0", "101", "-1", "1.5", "x", "٣", "1e3", "0000000001"])
def test_a_limit_is_one_to_a_hundred(text: str) -> None:
    with pytest.raises(Refused) as caught:
        read_limit(text)
    assert caught.value.problem.param == "limit"


def test_a_limit_has_a_default() -> None:
    assert (read_limit(None), read_limit("1"), read_limit("100")) == (20, 1, 100)


@pytest.mark.parametrize("text", ["", "é", "a\x00", "x" * 256])
def test_an_idempotency_key_is_short_printable_ascii(text: str) -> None:
    with pytest.raises(Refused) as caught:
        read_idempotency_key(text)
    assert caught.value.problem.param == "Idempotency-Key"


def test_a_chat_may_be_empty_and_a_title_may_not_be_missing() -> None:
    chat = read_new_chat({})
    assert (chat.title, chat.system_prompt, chat.model) == ("", "", None)
    assert read_title({"title": ""}) == ""
    with pytest.raises(Refused):
        read_title({})
