"""The recorder over a real broker: what it writes, once by id, whatever happens to it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from infra.command.topics import apply_topics
from infra.log.records import LogRecord
from producers.log_writer import acknowledged
from schemas.events.accounts import UsageMeasured
from schemas.events.outcomes import RunConcluded
from schemas.events.tokens import RunCancelled, RunEnded
from schemas.ids import derived_event_id
from schemas.topics import ACCOUNTS, OUTCOMES, TOKENS
from schemas.vocabulary import CancelReason, EndCause, FinishReason
from tests.integration.recording import PARTITIONS, STEADY, Log, PartProcess
from tests.integration.running import RunningBroker
from tests.integration.waiting import eventually_async

RECORDER = "processors.recorder"


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker for this module: its recorders must meet no other test's runs."""
    running = RunningBroker(tmp_path_factory.mktemp("broker"))
    running.start()
    asyncio.run(apply_topics(running.bootstrap, models=("m",), partitions=PARTITIONS))
    yield running.bootstrap
    running.end()


@pytest.fixture
async def log(bootstrap: str) -> AsyncIterator[Log]:
    opened = await Log.open(bootstrap)
    yield opened
    await opened.close()


async def outcome(log: Log, run_id: str) -> RunConcluded:
    """What became of the run; both outputs are there, and every copy of one says the same."""

    async def written() -> tuple[RunConcluded, UsageMeasured] | None:
        outcomes = (await log.events(OUTCOMES)).get(derived_event_id(run_id, "RunConcluded"))
        usages = (await log.events(ACCOUNTS)).get(derived_event_id(run_id, "UsageMeasured"))
        if not outcomes or not usages:
            return None
        assert all(other == outcomes[0] for other in outcomes)
        assert all(other == usages[0] for other in usages)
        assert isinstance(outcomes[0], RunConcluded)
        assert isinstance(usages[0], UsageMeasured)
        return outcomes[0], usages[0]

    concluded, usage = await eventually_async(written, what=f"{run_id} is recorded")
    assert usage == UsageMeasured(
        run_id=run_id,
        account_id=concluded.account_id,
        input_tokens=concluded.input_tokens,
        output_tokens=concluded.output_tokens,
        finish_reason=concluded.finish_reason,
    )
    return concluded


async def until_begun(runs: list[str], *, count: int) -> None:
    async def begun() -> bool:
        return len(runs) >= count

    await eventually_async(begun, what=f"{count} runs have begun")


async def test_an_answer_is_recorded_whole_and_a_zombies_words_are_not(
    log: Log, bootstrap: str, tmp_path: Path
) -> None:
    with PartProcess(RECORDER, tmp_path, bootstrap=bootstrap) as recorder:
        recorder.wait_ready()
        run_id = await log.mint()
        await log.queue(run_id)
        await log.start(run_id)
        await log.say(run_id, "one ")
        await log.start(run_id, attempt=2)
        await log.say(run_id, "zombie ", index=1)
        await log.say(run_id, "two", index=1, attempt=2)
        await log.end(run_id, 2)
        end_offset = await log.end(run_id, 2, attempt=2)
        found = await outcome(log, run_id)
        assert (found.text, found.attempts, found.end_offset) == ("one two", 2, end_offset)
        assert (found.input_tokens, found.output_tokens) == (7, 2)
        assert recorder.stop() == 0, recorder.log()


async def test_a_killed_recorder_leaves_every_run_recorded_once_by_id(
    log: Log, bootstrap: str, tmp_path: Path
) -> None:
    """I13: kills at moments of their own while runs are written; early cancels straddle them."""
    runs: list[str] = []

    async def write(count: int) -> None:
        for number in range(count):
            run_id = await log.mint(number % PARTITIONS)
            runs.append(run_id)
            if number % 5 == 0:
                await log.append(TOKENS, RunCancelled(run_id=run_id, reason=CancelReason.USER))
            await log.answer(run_id, "a", "b")

    for _ in range(3):
        with PartProcess(RECORDER, tmp_path, bootstrap=bootstrap) as recorder:
            await write(10)
            recorder.wait_ready()
            await outcome(log, runs[-1])
            writing = asyncio.create_task(write(10))

            await until_begun(runs, count=len(runs) + 3)
            recorder.kill()
            await writing
    with PartProcess(RECORDER, tmp_path, bootstrap=bootstrap) as last:
        last.wait_ready()
        await outcome(log, runs[-1])
        ids = {derived_event_id(run_id, "RunConcluded"): run_id for run_id in runs}

        async def all_recorded() -> bool:
            return ids.keys() <= (await log.events(OUTCOMES)).keys()

        await eventually_async(all_recorded, what="all runs are recorded")
        for number, run_id in enumerate(runs):
            found = await outcome(log, run_id)
            early = number % 10 % 5 == 0
            assert found.finish_reason is (FinishReason.CANCELLED if early else FinishReason.STOP)
            assert found.text == ("" if early else "ab")


async def test_a_deadline_is_kept_with_every_other_process_dead(
    log: Log, bootstrap: str, tmp_path: Path
) -> None:
    """I1: nothing else writes, so only the recorder's ticks move the partition's time."""
    run_id = await log.mint()
    await log.queue(run_id, deadline_ms=2_000)
    await log.start(run_id)
    await log.say(run_id, "half an ans")
    with PartProcess(RECORDER, tmp_path, bootstrap=bootstrap, variables=STEADY):
        found = await outcome(log, run_id)
    assert found.finish_reason is FinishReason.DEADLINE
    assert (found.text, found.input_tokens, found.output_tokens) == ("half an ans", 7, 1)
    causes = [
        record.event.cause
        for record in await log.read(TOKENS)
        if isinstance(record, LogRecord)
        and isinstance(record.event, RunEnded)
        and record.event.run_id == run_id
    ]
    assert causes == [EndCause.DEADLINE]


async def test_malformed_records_are_parked_and_the_partition_goes_on(
    log: Log, bootstrap: str, tmp_path: Path
) -> None:
    """I19"""
    headers = [("t", b"RunCancelled"), ("v", b"1"), ("id", b"e")]
    poison: list[tuple[bytes | None, list[tuple[str, bytes]], str]] = [
        (b"{", headers, "RunCancelled"),
        (b"{}", [("t", b"RunExploded"), ("v", b"1"), ("id", b"e")], "no known event type"),
        (b"{}", [("t", b"RunConcluded"), ("v", b"1"), ("id", b"e")], "no known event type"),
        (b"\xff\xfe", [], "no known event type"),
        (None, headers, "no body"),
        (b'{"run_id":"run_x","reason":"user"}', headers, "no run id"),
    ]
    run_id = await log.mint()
    await log.queue(run_id)
    offsets = []
    for value, record_headers, _ in poison:
        sent = await log.writer.send_raw(
            TOKENS.name, value, key=b"k", partition=0, headers=record_headers
        )
        offsets.append((await acknowledged(sent)).offset)
    await log.start(run_id)
    await log.end(run_id, 0)
    before = {record.offset for record in await log.read_dead(TOKENS)}
    with PartProcess(RECORDER, tmp_path, bootstrap=bootstrap, variables=STEADY) as recorder:
        assert (await outcome(log, run_id)).finish_reason is FinishReason.STOP
        assert recorder.stop() == 0, recorder.log()
    parked = [r for r in await log.read_dead(TOKENS) if r.offset not in before]
    assert len(parked) == len(poison)
    for record, (value, _, reason), offset in zip(parked, poison, offsets, strict=True):
        assert record.value == (value or b"")
        assert f"{TOKENS.name}/0/{offset}" in recorder.log()
        assert reason in recorder.log()


async def test_a_paused_recorder_that_wakes_up_changes_nothing(
    log: Log, bootstrap: str, tmp_path: Path
) -> None:
    with PartProcess(RECORDER, tmp_path, bootstrap=bootstrap) as zombie:
        zombie.wait_ready()
        first = await log.mint()
        await log.answer(first, "x")
        await outcome(log, first)
        zombie.send(signal.SIGSTOP)
        with PartProcess(RECORDER, tmp_path, bootstrap=bootstrap) as heir:
            runs = []
            for number in range(6):
                run_id = await log.mint(number % PARTITIONS)
                await log.answer(run_id, "y", "z")
                runs.append(run_id)
            for run_id in runs:
                assert (await outcome(log, run_id)).text == "yz"
            zombie.send(signal.SIGCONT)
            after = await log.mint()
            await log.answer(after, "w")
            assert (await outcome(log, after)).text == "w"
            for run_id in runs:
                assert (await outcome(log, run_id)).text == "yz"
            assert heir.process.poll() is None, heir.log()
