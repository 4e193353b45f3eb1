"""What only the embedded engine has: a cache to keep apart, a port to guard, ids to recover."""

from __future__ import annotations

from dataclasses import replace

from inference_workers.decisions.held_text import Piece
from inference_workers.engine import EndReason, Engine, EngineUsage
from inference_workers.engine_llama import LlamaEngine, LlamaSettings
from inference_workers.loopback_http import LoopbackPort
from infra.models import model_spec
from infra.models.tokenizer import token_bytes
from schemas.events.accounts import Sampling
from tests.contracts.engines_under_test import (
    PATIENCE_S,
    ask,
    ids_of,
    model,
    read,
    running,
    text_of,
)

LONG = "Please tell me about rivers and bridges and stones. " * 20


def is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


async def usage_of(engine: Engine, question: str, scope: str) -> EngineUsage:
    request = replace(ask("r", question, tokens=2), cache_scope=scope)
    _, finish = await read(engine.submit(request))
    return finish.usage


async def test_a_prefix_is_reused_within_a_scope_and_never_across() -> None:
    """I10. One slot, so that every request displaces the one before."""
    async with running("llama", slots=1) as engine:
        first = await usage_of(engine, LONG, "one")
        assert first.cached == 0
        again = await usage_of(engine, LONG, "one")
        assert again.cached > again.prompt // 2
        other = await usage_of(engine, LONG, "another")
        assert other.cached == 0
        await usage_of(engine, "Something short", "one")
        # What another scope asked was displaced by now; it must not come back from elsewhere.
        back = await usage_of(engine, LONG, "one")
        assert back.cached < back.prompt // 2


async def test_a_request_that_never_ran_does_not_inherit_what_its_slot_holds() -> None:
    """I10. The slot still holds the other scope's prompt."""
    async with running("llama", slots=1) as engine:
        await usage_of(engine, LONG, "one")
        stream = engine.submit(replace(ask("r", LONG), cache_scope="another"))
        engine.cancel("r")
        await stream.wait_freed()
        assert (await usage_of(engine, LONG, "another")).cached == 0


async def test_the_ids_of_a_character_over_several_tokens_are_recovered_and_resume() -> None:
    async with running("llama") as engine:
        question = "Say hello with an emoji"
        whole, _ = await read(engine.submit(ask("whole", question, tokens=12)))
        assert any(delta.count > 1 and delta.ids is not None for delta in whole)
        table, ids = token_bytes(model().vocabulary), ids_of(whole)
        assert b"".join(table[i] for i in ids).decode() == text_of(whole)
        # Behind whole characters. The deltas do not say where: of a busy machine several tokens come in one.
        said = [b"".join(table[i] for i in ids[:cut]) for cut in range(12)]
        cut = next(cut for cut in range(2, 12) if is_text(said[cut]))
        resumed = replace(
            ask("rest", question, tokens=12 - cut),
            attempt=2,
            emitted_ids=ids[:cut],
            emitted_text=said[cut].decode(),
            emitted_count=cut,
        )
        rest, _ = await read(engine.submit(resumed))
        assert said[cut].decode() + text_of(rest) == text_of(whole)


async def test_a_seed_repeats_a_warm_choice() -> None:
    async with running("llama", slots=1) as engine:
        answers = []
        for number in range(2):
            request = ask(f"{number}", "Tell a story", tokens=12, temperature=1.5, seed=7)
            deltas, _ = await read(engine.submit(replace(request, cache_scope=f"{number}")))
            answers.append(text_of(deltas))
        assert answers[0] == answers[1]


async def test_a_request_that_names_no_sampling_gets_the_models_own_and_zero_stays_greedy() -> None:
    async def answer(engine: Engine, name: str, sampling: Sampling) -> str:
        request = replace(ask(name, "Tell a story", tokens=12), sampling=sampling)
        deltas, _ = await read(engine.submit(replace(request, cache_scope=name)))
        return text_of(deltas)

    spec = model_spec("smollm2-135m")
    own = Sampling(temperature=spec.temperature_default, top_p=spec.top_p_default, seed=3)
    async with running("llama", slots=1) as engine:
        assert await answer(engine, "a", Sampling(seed=3)) == await answer(engine, "b", own)
        greedy = {
            await answer(engine, f"{seed}", Sampling(temperature=0, seed=seed)) for seed in (1, 2)
        }
        assert len(greedy) == 1


async def test_ids_that_the_model_does_not_have_are_an_error_that_no_retry_cures() -> None:
    async with running("llama", slots=1) as engine:
        stream = engine.submit(replace(ask("r"), prompt_ids=(1, 99_999_999)))
        deltas, finish = await read(stream)
        assert deltas == []
        assert finish.reason is EndReason.ERROR
        assert not finish.retryable
        await stream.wait_freed()
        _, finish = await read(engine.submit(ask("next", tokens=2)))
        assert finish.reason is EndReason.LENGTH


async def test_the_engines_port_wants_its_key() -> None:
    settings = LlamaSettings(slots=1, slot_window_tokens=256)
    async with LlamaEngine(settings, model()) as engine:
        status, _ = await engine.port.ask("/slots", timeout_s=PATIENCE_S)
        assert status == 200
        stranger = LoopbackPort(host=engine.port.host, port=engine.port.port, key="guess")
        for path, body in (("/slots", b""), ("/completion", b'{"prompt":[1],"n_predict":1}')):
            status, _ = await stranger.ask(path, body, timeout_s=PATIENCE_S)
            assert status == 401


def test_a_piece_is_what_the_engine_said_and_nothing_of_it_is_hidden() -> None:
    """Each token that says something says bytes; those of a whole text are the text's."""
    text = "Hello, na\u00efve \U0001f600 world"
    table = token_bytes(model().vocabulary)
    pieces = [Piece(data=table[i], ids=(i,), count=1) for i in model().encode_text(text)]
    assert b"".join(piece.data for piece in pieces).decode() == text
