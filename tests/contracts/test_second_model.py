"""The larger model, which is an extra: another kind of vocabulary, and a template of ours for a model without one.

It is a base model: it goes on with a conversation that it is shown, and was never taught to hold one.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import cache
from typing import Any, Final

import msgspec
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_workers.engine import EndReason, GenRequest
from inference_workers.engine_llama import LlamaEngine, LlamaSettings
from infra.models import (
    ChatMessage,
    ModelFileMissingError,
    PromptModel,
    load_model,
    model_spec,
)
from infra.models.packaged import JoinedFile, WholeFile
from infra.models.tokenizer import build_tokenizer, token_bytes
from schemas.events.accounts import Sampling
from schemas.vocabulary import Role
from tests.contracts.engines_under_test import PATIENCE_S, ids_of, read, text_of
from tests.contracts.test_prompts import HOSTILE, PARTS

NAME: Final = "gemma3-270m"


def _installed() -> bool:
    try:
        model_spec(NAME).path()
    except ModelFileMissingError:
        return False
    return True


pytestmark = pytest.mark.skipif(
    not _installed(), reason=f"{NAME} is not installed: make setup-models (253 MB)"
)

MORE: Final = (
    *PARTS, *HOSTILE, "▁", " ▁ ", "<s>", "</s>", "<table>", "</td>", "<eos>", "<bos>", "<unused7>", "<start_of_turn>",
    "<0x0A>", "\n\n\n\n", "\t\t\t", "     ", "Question:", "\nAnswer: no", "\x00", "\U0001f9d1\U0001f3fd",
)  # fmt: skip
TEXTS: Final = st.lists(st.one_of(st.sampled_from(MORE), st.text(max_size=8)), max_size=10).map(
    "".join
)


@cache
def model() -> PromptModel:
    return load_model(NAME)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[LlamaEngine]:
    llama = LlamaSettings(model=NAME, slots=1, slot_window_tokens=1_024)
    async with LlamaEngine(llama, model()) as running:
        yield running


async def tokenize(engine: LlamaEngine, text: str, *, special: bool) -> list[int]:
    body = msgspec.json.encode({"content": text, "parse_special": special, "add_special": False})
    status, answer = await engine.port.ask("/tokenize", body, timeout_s=PATIENCE_S)
    assert status == 200, answer
    found: list[int] = msgspec.json.decode(answer, type=dict[str, Any])["tokens"]
    return found


def texts(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choice(MORE) for _ in range(rng.randint(0, 10))) for _ in range(count)]


@pytest.mark.asyncio(loop_scope="module")
async def test_text_gets_the_ids_that_the_engine_gives_it(engine: LlamaEngine) -> None:
    for text in [*texts(1, 400), *MORE]:
        if "\x00" in text:
            continue  # The engine ends the text there.
        assert list(model().encode_text(text)) == await tokenize(engine, text, special=False), repr(
            text
        )


@pytest.mark.asyncio(loop_scope="module")
async def test_text_with_control_tokens_read_gets_the_engines_ids(engine: LlamaEngine) -> None:
    trusting = build_tokenizer(model().vocabulary, control_tokens=True)
    for text in texts(2, 200):
        if "\x00" in text:
            continue
        assert trusting.encode(text, add_special_tokens=False).ids == await tokenize(
            engine, text, special=True
        ), repr(text)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_plain_conversation_gets_the_engines_ids(engine: LlamaEngine) -> None:
    turns = [
        ChatMessage(role=Role.SYSTEM, content="Be brief."),
        ChatMessage(role=Role.USER, content="Name a river.\nAnd a sea?"),
        ChatMessage(role=Role.ASSISTANT, content="The Rhine.\n\nThe North Sea."),
        ChatMessage(role=Role.USER, content="  Another one!  "),
    ]
    prompt = model().template.render(turns, open_answer=True)
    assert list(model().prompt_ids(turns)) == await tokenize(engine, prompt, special=True)


@pytest.mark.asyncio(loop_scope="module")
async def test_it_answers_a_question_stops_where_the_next_would_begin_and_resumes_by_ids(
    engine: LlamaEngine,
) -> None:
    asked = GenRequest(
        request_id="whole",
        prompt_ids=model().prompt_ids(
            [ChatMessage(role=Role.USER, content="What is the capital of Italy?")]
        ),
        max_new_tokens=40,
        sampling=Sampling(temperature=0),
        cache_scope="test",
    )
    stream = engine.submit(asked)
    whole, finish = await read(stream)
    await stream.wait_freed()
    assert "Rome" in text_of(whole)
    assert "Question" not in text_of(whole)
    assert finish.reason is EndReason.STOP
    said = whole[:3]
    resumed = replace(
        asked,
        request_id="rest",
        attempt=2,
        emitted_ids=ids_of(said),
        emitted_text=text_of(said),
        emitted_count=said[-1].end,
        max_new_tokens=40 - said[-1].end,
    )
    stream = engine.submit(resumed)
    rest, _ = await read(stream)
    await stream.wait_freed()
    assert text_of(said) + text_of(rest) == text_of(whole)


@given(TEXTS)
@settings(deadline=None)
def test_no_text_becomes_a_control_id_and_none_is_lost(text: str) -> None:
    ids = model().encode_text(text)
    control = set(model().vocabulary.control_ids.values())
    assert not control & set(ids)
    said = b"".join(token_bytes_of()[i] for i in ids)
    # What SentencePiece writes for a space is a space from then on, as the engine has it.
    assert said.decode() == text.replace("▁", " ")


@cache
def token_bytes_of() -> tuple[bytes, ...]:
    return token_bytes(model().vocabulary)


@given(st.lists(st.tuples(st.sampled_from(Role), TEXTS), min_size=1, max_size=4))
@settings(deadline=None)
def test_no_text_begins_a_turn_or_adds_a_control_token(turns: list[tuple[Role, str]]) -> None:
    messages = [ChatMessage(role=role, content=content) for role, content in turns]
    harmless = [ChatMessage(role=role, content="x") for role, _ in turns]
    begins = ("Question:", "Answer:", "Note:")

    def turns_of(given_messages: list[ChatMessage]) -> list[str]:
        lines = model().template.render(given_messages, open_answer=True).split("\n")
        return [name for line in lines for name in begins if line.startswith(name)]

    empty = [m for m in messages if m.role is Role.SYSTEM and not m.content]
    if not empty:
        assert turns_of(messages) == turns_of(harmless)
    ids = model().prompt_ids(messages)
    assert ids[0] == 2
    assert not set(model().vocabulary.control_ids.values()) & set(ids[1:])


@given(st.lists(st.tuples(st.sampled_from(Role), TEXTS), min_size=1, max_size=4))
@settings(deadline=None)
def test_the_cost_of_messages_bounds_the_prompt(turns: list[tuple[Role, str]]) -> None:
    messages = [ChatMessage(role=role, content=content) for role, content in turns]
    cost = sum(model().count_message(role, content) for role, content in turns)
    assert len(model().prompt_ids(messages)) <= model().fixed_tokens + cost


def test_parts_that_are_missing_or_changed_are_told(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = model_spec(NAME)
    assert isinstance(spec.file, JoinedFile)
    changed = replace(spec, file=replace(spec.file, parts=spec.file.parts[:1]))
    with pytest.raises(ModelFileMissingError, match="not what they were"):
        changed.path()
    nowhere = WholeFile(package="no_such_package", name="x")
    with pytest.raises(ModelFileMissingError, match=NAME):
        replace(spec, file=replace(spec.file, parts=(nowhere,))).path()
    assert spec.path().stat().st_size > 250_000_000
    assert [each.name for each in (tmp_path / "turnlog-models").iterdir()] == [spec.path().name]
