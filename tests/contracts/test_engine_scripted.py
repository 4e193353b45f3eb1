"""What only the scripted engine can do: faults on request."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from inference_workers.decisions.script import Script
from inference_workers.engine import Dead, EndReason, EngineHealth, Invalid
from inference_workers.engine_scripted import ScriptedEngine, ScriptedFaults, ScriptedSettings
from tests.contracts.engines_under_test import (
    PATIENCE_S,
    ask,
    next_delta,
    read,
    text_of,
)


async def test_the_turn_ends_after_as_many_tokens_as_the_script_has() -> None:
    async with ScriptedEngine(ScriptedSettings(tokens_per_answer=11)) as engine:
        deltas, finish = await read(engine.submit(ask("r", tokens=500)))
        assert finish.reason is EndReason.STOP
        assert finish.usage.delivered == 11
        again, _ = await read(engine.submit(ask("again", tokens=500)))
        other, _ = await read(engine.submit(ask("other", "Another question", tokens=500)))
        assert text_of(again) == text_of(deltas) != text_of(other)


async def test_a_dead_engine_ends_every_stream_so_that_another_attempt_goes_on() -> None:
    faults = ScriptedFaults(die_after_tokens=3)
    settings = ScriptedSettings(faults=faults, token_delay_s=0.001)
    async with ScriptedEngine(settings) as engine:
        streams = [engine.submit(ask(f"{i}")) for i in range(3)]
        for _, finish in await asyncio.gather(*map(read, streams)):
            assert finish.reason is EndReason.ERROR
            assert finish.retryable
        assert engine.health() is EngineHealth.DEAD
        with pytest.raises(Dead):
            engine.submit(ask("late"))


async def test_a_fault_of_the_first_attempt_spares_the_second() -> None:
    faults = ScriptedFaults(error_after_tokens=5)
    async with ScriptedEngine(ScriptedSettings(faults=faults)) as engine:
        deltas, finish = await read(engine.submit(ask("r")))
        assert (finish.reason, finish.retryable) == (EndReason.ERROR, True)
        said = text_of(deltas)
        second = replace(ask("r"), attempt=2, emitted_ids=None, emitted_text=said, emitted_count=5)
        rest, finish = await read(engine.submit(second))
        assert finish.reason is EndReason.LENGTH
        async with ScriptedEngine(ScriptedSettings()) as healthy:
            whole, _ = await read(healthy.submit(ask("r", tokens=45)))
        assert said + text_of(rest) == text_of(whole)


async def test_a_stream_that_falls_mute_is_found_while_others_go_on() -> None:
    faults = ScriptedFaults(mute_after_tokens=2)
    settings = ScriptedSettings(
        faults=faults, token_delay_s=0.005, tokens_per_answer=2000, stalled_after_s=1.0
    )
    async with ScriptedEngine(settings) as engine:
        mute = engine.submit(ask("mute", tokens=500))
        lively = engine.submit(replace(ask("lively", tokens=2000), attempt=2))
        async with asyncio.timeout(PATIENCE_S):
            assert await engine.wait_failed() is EngineHealth.STALLED
        deltas, finish = await read(mute)
        assert sum(delta.count for delta in deltas) == 2
        assert finish.retryable
        await read(lively)


async def test_a_cancelled_slot_that_is_never_confirmed_is_a_stalled_engine() -> None:
    faults = ScriptedFaults(mute_after_tokens=1)
    settings = ScriptedSettings(
        faults=faults, token_delay_s=0.005, tokens_per_answer=2000, stalled_after_s=1.0
    )
    async with ScriptedEngine(settings) as engine:
        mute = engine.submit(ask("mute"))
        engine.submit(replace(ask("lively", tokens=2000), attempt=2))
        await next_delta(mute)
        engine.cancel("mute")
        _, finish = await read(mute)
        assert finish.reason is EndReason.CANCELLED
        with pytest.raises(Dead):
            await mute.wait_freed()
        assert engine.health() is EngineHealth.STALLED


async def test_no_engine_is_blamed_while_its_whole_process_stands_still() -> None:
    """A stopped process, a suspended machine: what the engine does meanwhile cannot be seen."""
    settings = ScriptedSettings(token_delay_s=0.03, tokens_per_answer=20, stalled_after_s=1.0)
    async with ScriptedEngine(settings) as engine:
        stream = engine.submit(ask("r"))
        for _ in range(3):
            await next_delta(stream)
            threading.Event().wait(1.5)  # The loop and all that is in it.
        _, finish = await read(stream)
        assert finish.reason is EndReason.STOP
        assert engine.health() is EngineHealth.READY


async def test_a_slow_confirmation_keeps_the_slot_and_its_delay_is_told() -> None:
    faults = ScriptedFaults(confirm_delay_s=0.1)
    settings = ScriptedSettings(faults=faults, slots=1, token_delay_s=0.005)
    async with ScriptedEngine(settings) as engine:
        stream = engine.submit(ask("r"))
        await next_delta(stream)
        engine.cancel("r")
        await read(stream)
        assert engine.load().releasing == 1
        assert (await stream.wait_freed()).delay_ms >= 100
        assert engine.load().busy == 0


async def test_a_later_attempt_may_start_while_the_earlier_slot_is_not_confirmed() -> None:
    faults = ScriptedFaults(confirm_delay_s=0.1)
    settings = ScriptedSettings(faults=faults, token_delay_s=0.005)
    async with ScriptedEngine(settings) as engine:
        first = engine.submit(ask("r"))
        with pytest.raises(Invalid):
            engine.submit(ask("r"))
        engine.cancel("r")
        second = engine.submit(replace(ask("r"), attempt=2))
        assert engine.load().busy == 2
        assert engine.cancel("r"), "it means the open one"
        for stream in (first, second):
            _, finish = await read(stream)
            assert finish.reason is EndReason.CANCELLED


async def test_continuing_with_other_tokens_than_the_script_has_is_refused() -> None:
    async with ScriptedEngine(ScriptedSettings()) as engine:
        first = engine.submit(ask("first", tokens=5))
        deltas, _ = await read(first)
        await first.wait_freed()
        count, text = deltas[-1].end, text_of(deltas)
        for bad in (
            replace(ask("r"), emitted_ids=None, emitted_text=text + "x", emitted_count=count),
            replace(ask("r"), emitted_ids=None, emitted_text=text, emitted_count=count - 1),
            replace(ask("r"), emitted_ids=(1,) * count, emitted_text=text, emitted_count=count),
            replace(ask("r"), emitted_ids=None, emitted_text=text, emitted_count=1000),
        ):
            with pytest.raises(Invalid):
                engine.submit(bad)
        assert engine.load().busy == 0


async def test_without_a_delay_others_still_have_the_loop() -> None:
    settings = ScriptedSettings(slots=4, tokens_per_answer=2000)
    async with ScriptedEngine(settings) as engine:
        streams = [engine.submit(ask(f"{i}", tokens=2000)) for i in range(4)]
        turns = 0
        while engine.load().busy:
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 200
        for stream in streams:
            _, finish = await read(stream)
            assert finish.usage.delivered == 2000


@pytest.mark.parametrize("exact_ids", [True, False])
async def test_every_cut_of_an_awkward_text_is_continued_exactly(exact_ids: bool) -> None:
    settings = ScriptedSettings(
        script=Script.UNICODE, tokens_per_answer=40, exact_ids=exact_ids, token_delay_s=0.0001
    )
    async with ScriptedEngine(settings) as engine:
        whole, finish = await read(engine.submit(ask("whole", tokens=200)))
        assert finish.usage.delivered == 40
        for cut in range(1, len(whole)):
            said = whole[:cut]
            ids = [delta.ids for delta in said]
            exact = all(each is not None for each in ids)
            resumed = replace(
                ask(f"{cut}", tokens=200),
                attempt=2,
                emitted_ids=tuple(i for each in ids for i in each or ()) if exact else None,
                emitted_text=text_of(said),
                emitted_count=said[-1].end,
            )
            rest, _ = await read(engine.submit(resumed))
            assert text_of(said) + text_of(rest) == text_of(whole)
            assert rest[-1].end == 40
