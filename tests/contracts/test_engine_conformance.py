"""What every engine promises (inference_workers/engine.py, E1 to E6), over all of them, the real
model included. No throughput is asserted anywhere."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from inference_workers.engine import (
    Dead,
    EndReason,
    EngineHealth,
    Finish,
    Invalid,
    Saturated,
    TooLong,
)
from schemas.events.accounts import Sampling
from tests.contracts.engines_under_test import (
    KINDS,
    PATIENCE_S,
    Kind,
    ask,
    ids_of,
    model,
    next_delta,
    pieces_of,
    read,
    running,
    text_of,
)

CANCEL_WITHIN_S = 0.05

pytestmark = pytest.mark.parametrize("kind", KINDS)


async def test_a_stream_is_dense_deltas_and_then_one_finish(kind: Kind) -> None:
    """E1 and E3."""
    async with running(kind) as engine:
        stream = engine.submit(ask("r"))
        deltas, finish = await read(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        place = 0
        for delta in deltas:
            assert delta.index == place
            assert delta.count >= 1
            assert delta.ids is None or len(delta.ids) == delta.count
            place = delta.end
        assert finish.reason is EndReason.LENGTH
        assert finish.usage.delivered == place == 40
        assert finish.usage.generated == 40
        assert finish.usage.prompt == len(ask("r").prompt_ids)
        assert finish.stop_match is None


async def test_a_cancel_in_mid_answer_ends_the_stream_and_then_the_slot(kind: Kind) -> None:
    """E1: within 50 ms, while the slot stays busy until the engine confirms."""
    async with running(kind, slots=1) as engine:
        stream = engine.submit(ask("r", tokens=150))
        await next_delta(stream)
        assert engine.cancel("r")
        busy_after_cancel = engine.load()
        async with asyncio.timeout(CANCEL_WITHIN_S):
            finish = await anext(stream)
        assert isinstance(finish, Finish)
        assert finish.reason is EndReason.CANCELLED
        assert (busy_after_cancel.busy, busy_after_cancel.releasing) == (1, 1)
        assert not engine.cancel("r"), "repeating it is harmless"
        async with asyncio.timeout(PATIENCE_S):
            freed = await stream.wait_freed()
        assert freed.request_id == "r"
        assert freed.delay_ms >= 0
        assert engine.load().busy == 0
        assert await stream.wait_freed() == freed, "it can be asked at any time"
        _, finish = await read(engine.submit(ask("next", tokens=3)))
        assert finish.reason is EndReason.LENGTH


async def test_a_cancel_before_the_first_token_ends_the_stream(kind: Kind) -> None:
    async with running(kind, slots=1) as engine:
        stream = engine.submit(ask("r", "word " * 600))
        assert engine.cancel("r")
        with pytest.raises(Saturated):
            engine.submit(ask("too early"))
        async with asyncio.timeout(CANCEL_WITHIN_S):
            finish = await anext(stream)
        assert isinstance(finish, Finish)
        assert finish.reason is EndReason.CANCELLED
        assert finish.usage.delivered == 0
        async with asyncio.timeout(PATIENCE_S):
            await stream.wait_freed()
        assert engine.load().free == 1


async def test_a_cancel_during_the_prompt_ends_the_stream(kind: Kind) -> None:
    async with running(kind, slots=1) as engine:
        stream = engine.submit(ask("r", "word " * 600))
        await asyncio.sleep(0)  # the engine has the request, and no token is out
        engine.cancel("r")
        _, finish = await read(stream)
        assert finish.reason is EndReason.CANCELLED
        async with asyncio.timeout(PATIENCE_S):
            await stream.wait_freed()


async def test_cancelling_what_never_was_or_has_ended_is_harmless(kind: Kind) -> None:
    async with running(kind) as engine:
        assert not engine.cancel("nobody")
        await read(engine.submit(ask("r", tokens=2)))
        assert not engine.cancel("r")


async def test_an_answer_resumed_by_ids_is_the_same_answer(kind: Kind) -> None:
    """E4, greedy, at several cuts."""
    async with running(kind) as engine:
        whole, _ = await read(engine.submit(ask("whole")))
        ids, pieces = ids_of(whole), pieces_of(kind, ask("whole"), whole)
        for cut in (1, 7, 20, 33, 39):
            said = "".join(pieces[:cut])
            resumed = replace(
                ask(f"cut at {cut}"),
                attempt=2,
                emitted_ids=ids[:cut],
                emitted_text=said,
                emitted_count=cut,
                max_new_tokens=40 - cut,
            )
            rest, finish = await read(engine.submit(resumed))
            assert rest[0].index == cut
            assert said + text_of(rest) == text_of(whole)
            assert ids[:cut] + ids_of(rest) == ids
            assert finish.usage.delivered == 40 - cut


async def test_an_answer_resumed_by_text_goes_on_after_it(kind: Kind) -> None:
    """E4: where ids are not exact nothing promises the same words, only that it goes on."""
    async with running(kind) as engine:
        whole, _ = await read(engine.submit(ask("whole", tokens=20)))
        said = whole[:8]
        resumed = replace(
            ask("rest", tokens=12),
            attempt=2,
            emitted_ids=None,
            emitted_text=text_of(said),
            emitted_count=said[-1].end,
        )
        rest, _ = await read(engine.submit(resumed))
        assert rest[0].index == said[-1].end
        assert all(delta.ids is None for delta in rest), "once inexact, always inexact"


async def test_no_part_of_a_stop_string_is_ever_said(kind: Kind) -> None:
    """E2: strings inside a token, across two, and over the whole of one."""
    async with running(kind) as engine:
        whole, _ = await read(engine.submit(ask("whole")))
        text, pieces = text_of(whole), pieces_of(kind, ask("whole"), whole)
        for at in (3, 9, 17):
            before, after = pieces[at], pieces[at + 1]
            for stop in (before[-1] + after[:2], before + after, after[-2:]):
                cut = text.find(stop)
                deltas, finish = await read(engine.submit(ask(f"{at}{stop}", stop=(stop,))))
                assert text_of(deltas) == text[:cut], repr(stop)
                assert finish.reason is EndReason.STOP
                assert finish.stop_match == stop
                assert sum(delta.count for delta in deltas) == finish.usage.delivered
                assert all(delta.text for delta in deltas)


async def test_text_held_for_a_stop_string_is_said_when_it_does_not_come(kind: Kind) -> None:
    async with running(kind) as engine:
        whole, _ = await read(engine.submit(ask("whole", tokens=20)))
        text = text_of(whole)
        near_miss = text[-3:] + "\x01never"
        deltas, finish = await read(engine.submit(ask("r", tokens=20, stop=(near_miss,))))
        assert text_of(deltas) == text
        assert finish.reason is EndReason.LENGTH
        assert finish.usage.delivered == 20


async def test_characters_are_whole_in_every_delta(kind: Kind) -> None:
    """E2. The real model is asked for what takes several tokens a character."""
    async with running(kind, unicode=True) as engine:
        stream = engine.submit(ask("r", "Say hello with an emoji", tokens=60))
        deltas, finish = await read(stream)
        assert any(delta.count > 1 for delta in deltas), "no character was spread over tokens"
        for delta in deltas:
            assert "\ufffd" not in delta.text
            delta.text.encode()
        assert sum(delta.count for delta in deltas) == finish.usage.delivered


async def test_a_full_window_is_not_called_length(kind: Kind) -> None:
    async with running(kind, slots=1, window=256) as engine:
        window = engine.caps.context_window
        # One token that says a word, over and over: the prompt's content does not matter here.
        request = replace(
            ask("r", tokens=100), prompt_ids=(model().encode_text(" a") * (window - 4))
        )
        _, finish = await read(engine.submit(request))
        assert finish.reason is EndReason.CONTEXT_FULL
        assert finish.usage.delivered <= 5


async def test_what_cannot_be_done_is_refused_at_once(kind: Kind) -> None:
    async with running(kind, slots=1) as engine:
        good = ask("r", tokens=3)
        for bad in (
            replace(good, prompt_ids=()),
            replace(good, request_id=""),
            replace(good, max_new_tokens=0),
            replace(good, emitted_count=3),
            replace(good, stop=("",)),
            replace(good, stop=("a",) * 5),
            replace(good, stop=("a" * 65,)),
            replace(good, sampling=Sampling(temperature=-1.0)),
            replace(good, sampling=Sampling(temperature=float("nan"))),
            replace(good, sampling=Sampling(top_p=0.0)),
        ):
            with pytest.raises(Invalid):
                engine.submit(bad)
        with pytest.raises(TooLong):
            engine.submit(replace(good, prompt_ids=(5,) * engine.caps.context_window))
        assert engine.load().busy == 0, "a refusal holds no slot"
        stream = engine.submit(good)
        with pytest.raises(Saturated):
            engine.submit(ask("second"))
        await read(stream)


async def test_never_more_requests_than_slots_and_each_slot_serves_again(kind: Kind) -> None:
    """E5."""
    async with running(kind, slots=2) as engine:
        for turn in range(2):
            streams = [engine.submit(ask(f"{turn}.{slot}", tokens=5)) for slot in range(2)]
            assert engine.load().free == 0
            for deltas, finish in await asyncio.gather(*map(read, streams)):
                assert finish.usage.delivered == sum(delta.count for delta in deltas) == 5
            await asyncio.gather(*(stream.wait_freed() for stream in streams))
            assert engine.load().busy == 0


async def test_a_reader_who_comes_late_misses_nothing(kind: Kind) -> None:
    async with running(kind) as engine:
        at_once, _ = await read(engine.submit(ask("at once", tokens=15)))
        stream = engine.submit(ask("late", tokens=15))
        async with asyncio.timeout(PATIENCE_S):
            await stream.wait_freed()
        late, finish = await read(stream)
        assert text_of(late) == text_of(at_once)
        assert len(late) == 1, "what waits is joined"
        assert finish.usage.delivered == 15


async def test_draining_lets_answers_end_and_takes_no_new_ones(kind: Kind) -> None:
    async with running(kind) as engine:
        stream = engine.submit(ask("r", tokens=10))
        await engine.close(drain_s=PATIENCE_S)
        _, finish = await read(stream)
        assert finish.reason is EndReason.LENGTH
        assert engine.health() is EngineHealth.CLOSED
        with pytest.raises(Dead):
            engine.submit(ask("late"))
        await engine.close(drain_s=0)


async def test_closing_without_a_drain_cancels_what_runs(kind: Kind) -> None:
    async with running(kind) as engine:
        stream = engine.submit(ask("r", tokens=150))
        await next_delta(stream)
        await engine.close(drain_s=0)
        _, finish = await read(stream)
        assert finish.reason is EndReason.CANCELLED


async def test_an_engine_that_says_nothing_is_stalled_for_good(kind: Kind) -> None:
    """E6: a limit far below the time that a long prompt takes."""
    async with running(kind, slots=1, stalled_after_s=0.01, prefill_delay_s=PATIENCE_S) as engine:
        stream = engine.submit(ask("r", "word " * 600))
        async with asyncio.timeout(PATIENCE_S):
            assert await engine.wait_failed() is EngineHealth.STALLED
        _, finish = await read(stream)
        assert finish.reason is EndReason.ERROR
        assert finish.retryable
        with pytest.raises(Dead):
            await stream.wait_freed()
        with pytest.raises(Dead):
            engine.submit(ask("another"))
