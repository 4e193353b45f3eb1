"""The engines that the conformance suite runs over, and what it asks of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Final, Literal

from inference_workers.decisions.script import Script, answer
from inference_workers.engine import Delta, Engine, EngineStream, Finish, GenRequest
from inference_workers.engine_llama import LlamaEngine, LlamaSettings
from inference_workers.engine_scripted import ScriptedEngine, ScriptedSettings
from infra.models import ChatMessage, PromptModel, load_model
from infra.models.tokenizer import token_bytes
from schemas.events.accounts import Sampling
from schemas.vocabulary import Role

Kind = Literal["scripted", "llama"]
KINDS: Final[tuple[Kind, ...]] = ("scripted", "llama")
SYSTEM: Final = ChatMessage(role=Role.SYSTEM, content="You are a helpful assistant.")
# Far above what any step of the tests takes, on a machine that others share.
PATIENCE_S: Final = 60.0


@cache
def model() -> PromptModel:
    return load_model("smollm2-135m")


@asynccontextmanager
async def running(
    kind: Kind,
    *,
    slots: int = 2,
    window: int = 1024,
    stalled_after_s: float = 30.0,
    unicode: bool = False,
    prefill_delay_s: float = 0.02,
) -> AsyncIterator[Engine]:
    """An engine of the kind. A scripted one takes some milliseconds a token, so that a test can act
    in mid-answer, and `prefill_delay_s` before the first."""
    engine: Engine
    if kind == "llama":
        settings = LlamaSettings(
            slots=slots, slot_window_tokens=window, stalled_after_s=stalled_after_s
        )
        engine = LlamaEngine(settings, model())
    else:
        engine = ScriptedEngine(
            ScriptedSettings(
                slots=slots,
                context_window=window,
                tokens_per_answer=200,
                token_delay_s=0.002,
                prefill_delay_s=prefill_delay_s,
                stalled_after_s=stalled_after_s,
                script=Script.UNICODE if unicode else Script.WORDS,
                exact_ids=not unicode,
            )
        )
    async with engine:
        yield engine


def ask(
    request_id: str,
    question: str = "Name three primary colours.",
    *,
    tokens: int = 40,
    stop: tuple[str, ...] = (),
    temperature: float = 0.0,
    seed: int | None = None,
) -> GenRequest:
    """A greedy request for an answer to the question."""
    return GenRequest(
        request_id=request_id,
        prompt_ids=model().prompt_ids([SYSTEM, ChatMessage(role=Role.USER, content=question)]),
        max_new_tokens=tokens,
        sampling=Sampling(temperature=temperature, seed=seed),
        stop=stop,
        cache_scope="test",
    )


async def read(stream: EngineStream) -> tuple[list[Delta], Finish]:
    """The whole stream; fails unless it is deltas and then one Finish."""
    deltas: list[Delta] = []
    finish: Finish | None = None
    async with asyncio.timeout(PATIENCE_S):
        async for step in stream:
            assert finish is None, "something came after the end"
            if isinstance(step, Finish):
                finish = step
            else:
                deltas.append(step)
    assert finish is not None, "the stream ended without a Finish"
    return deltas, finish


async def next_delta(stream: EngineStream) -> Delta:
    async with asyncio.timeout(PATIENCE_S):
        step = await anext(stream)
    assert isinstance(step, Delta), step
    return step


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def pieces_of(kind: Kind, request: GenRequest, deltas: list[Delta]) -> list[str]:
    """What each token of a greedy answer says. Its deltas do not tell: where the machine is busy several tokens come in one."""
    if kind == "llama":
        table = token_bytes(model().vocabulary)
        said = [table[token_id] for token_id in ids_of(deltas)]
    else:
        script = answer(script=Script.WORDS, prompt_ids=request.prompt_ids, tokens=200)
        said = [token.says for _, token in zip(ids_of(deltas), script, strict=False)]
    pieces = [each.decode() for each in said]
    assert "".join(pieces) == text_of(deltas)
    return pieces


def ids_of(deltas: list[Delta]) -> tuple[int, ...]:
    found: list[int] = []
    for delta in deltas:
        assert delta.ids is not None
        found.extend(delta.ids)
    return tuple(found)
