"""Reading runs back is bounded: a broker that does not answer, or everybody who comes back at once, cannot pile up waiters.

And what comes by on the tail while something else is waited for is not missed.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge.catch_up import RUNS_ASKED_MAX, CatchUp, CatchUpFull, LogBehind, PastRun
from edge.runs import LiveRun, RunTable
from infra.history import Run
from infra.history.sqlite import SqliteHistory, open_history
from infra.history.sqlite_writer import HistoryWriter
from infra.log.records import BadRecord, LogRecord
from infra.log.span_reader import SpanFailed, SpanReader
from schemas.codec import Envelope
from schemas.events.outcomes import RunConcluded
from schemas.events.tokens import RunCancelled
from schemas.ids import RANDOM_BYTES, RunAddress, mint_run_id
from schemas.topics import Topic
from schemas.vocabulary import CancelReason
from tests.contracts.event_samples import SAMPLES
from tests.contracts.test_span_reader import mute_broker

DEADLINE_S = 60.0
CONCLUDED = next(event for _, event in SAMPLES if isinstance(event, RunConcluded))
EPOCH = 7


def _run_id(number: int) -> str:
    """A run from before this edge's start."""
    address = RunAddress(epoch=EPOCH, partition=0, mint_offset=0)
    return mint_run_id(
        key=b"k", account_id="a", address=address, random=number.to_bytes(RANDOM_BYTES, "big")
    )


async def test_more_runs_than_can_be_read_back_soon_are_refused_and_the_same_run_is_not(
    tmp_path: Path,
) -> None:
    async with (
        mute_broker() as (bootstrap, _),
        open_history(tmp_path / "history.db") as history,
        asyncio.timeout(DEADLINE_S),
    ):
        catch_up = CatchUp(
            runs=RunTable(epoch=EPOCH, starts={0: 10}, now=asyncio.get_running_loop().time),
            reader=SpanReader(bootstrap=bootstrap, client_id="test"),
            history=history,
        )
        asked = [asyncio.create_task(catch_up.find(_run_id(n))) for n in range(RUNS_ASKED_MAX + 1)]
        done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert [type(task.exception()) for task in done] == [CatchUpFull]
        assert len(waiting) == RUNS_ASKED_MAX

        again = asyncio.create_task(catch_up.find(_run_id(0)))
        for task in (*waiting, again):
            task.cancel()
        await asyncio.wait((*waiting, again))
        assert again.cancelled()
        with pytest.raises(TimeoutError):  # There is room again: it waits for the broker.
            async with asyncio.timeout(0.2):
                await catch_up.find(_run_id(RUNS_ASKED_MAX + 1))


def _first_record(run_id: str) -> LogRecord:
    event = RunCancelled(run_id=run_id, reason=CancelReason.USER)
    envelope = Envelope(event=event, event_id="e", cause_id="", trace="")
    return LogRecord(0, 10, 1_000, envelope)


def _fresh_run_id() -> str:
    """A run that this edge sees from its beginning."""
    address = RunAddress(epoch=EPOCH, partition=0, mint_offset=10)
    return mint_run_id(key=b"k", account_id="a", address=address, random=bytes(RANDOM_BYTES))


class SlowHistory(SqliteHistory):
    """While it is asked for a run, the run's first record comes by on the tail."""

    runs: RunTable

    async def run(self, run_id: str) -> Run | None:
        found = await super().run(run_id)
        self.runs.apply([_first_record(run_id)])
        return found


class FarLog(SpanReader):
    """A log that ends where this edge has not read so far."""

    asked = 0

    async def ends(self, topic: Topic, partitions: list[int]) -> dict[int, int]:
        self.asked += 1
        await asyncio.sleep(0)
        return dict.fromkeys(partitions, 12)


async def test_a_run_whose_first_record_comes_while_history_is_asked_is_found(
    tmp_path: Path,
) -> None:
    await open_history(tmp_path / "history.db").close()
    async with SlowHistory(tmp_path / "history.db") as history, asyncio.timeout(DEADLINE_S):
        table = RunTable(epoch=EPOCH, starts={0: 10}, now=asyncio.get_running_loop().time)
        history.runs = table
        reader = SpanReader(bootstrap="127.0.0.1:1", client_id="test")
        catch_up = CatchUp(runs=table, reader=reader, history=history)
        run_id = _fresh_run_id()
        found = await catch_up.find(run_id, wait_s=0)
        assert isinstance(found, LiveRun)
        assert found.run_id == run_id


async def test_what_this_edge_has_not_read_so_far_is_not_told_as_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge.catch_up.TAIL_WAIT_S_MAX", 0.05)
    async with open_history(tmp_path / "history.db") as history, asyncio.timeout(DEADLINE_S):
        table = RunTable(epoch=EPOCH, starts={0: 10}, now=asyncio.get_running_loop().time)
        reader = FarLog(bootstrap="127.0.0.1:1", client_id="test")
        catch_up = CatchUp(runs=table, reader=reader, history=history)
        run_id = _fresh_run_id()
        with pytest.raises(LogBehind):  # Though it holds no run that it could be behind with.
            await catch_up.bring_up_to_date()
        table.apply([_first_record(run_id)])
        with pytest.raises(LogBehind):  # One record of two.
            await catch_up.bring_up_to_date()
        table.apply([BadRecord(0, 11, 1_000, None, None, (), "the second")])
        await catch_up.bring_up_to_date()


async def test_many_who_have_to_be_up_to_date_at_once_ask_the_log_twice_at_most(
    tmp_path: Path,
) -> None:
    async with open_history(tmp_path / "history.db") as history, asyncio.timeout(DEADLINE_S):
        table = RunTable(epoch=EPOCH, starts={0: 12}, now=asyncio.get_running_loop().time)
        reader = FarLog(bootstrap="127.0.0.1:1", client_id="test")
        catch_up = CatchUp(runs=table, reader=reader, history=history)
        await asyncio.gather(*(catch_up.bring_up_to_date() for _ in range(50)))
        assert 1 <= reader.asked <= 2
        await catch_up.bring_up_to_date()
        assert 2 <= reader.asked <= 3, "what was asked before does not count"


class SilentLog(SpanReader):
    """A log that tells nothing until it is there."""

    def __init__(self) -> None:
        super().__init__(bootstrap="127.0.0.1:1", client_id="test")
        self.there = asyncio.Event()

    async def ends(self, topic: Topic, partitions: list[int]) -> dict[int, int]:
        await self.there.wait()
        return dict.fromkeys(partitions, 12)


async def test_only_the_first_one_waits_long_for_a_broker_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge.catch_up.SILENT_WAIT_S_MAX", 0.01)
    monkeypatch.setattr("edge.catch_up.TAIL_WAIT_S_MAX", 0.01)
    async with open_history(tmp_path / "history.db") as history, asyncio.timeout(DEADLINE_S):
        table = RunTable(epoch=EPOCH, starts={0: 10}, now=asyncio.get_running_loop().time)
        reader = SilentLog()
        catch_up = CatchUp(runs=table, reader=reader, history=history)
        monkeypatch.setattr("edge.catch_up.UP_TO_DATE_WAIT_S_MAX", 0.01)
        await catch_up.bring_up_to_date()
        monkeypatch.setattr("edge.catch_up.UP_TO_DATE_WAIT_S_MAX", 2 * DEADLINE_S)
        await catch_up.bring_up_to_date()
        reader.there.set()
        with pytest.raises(LogBehind):
            await catch_up.bring_up_to_date()
        # It is there again, so it has its time.
        reader.there.clear()
        waiting = asyncio.ensure_future(catch_up.bring_up_to_date())
        await asyncio.wait([waiting], timeout=0.1)
        assert not waiting.done()
        reader.there.set()
        with pytest.raises(LogBehind):
            await waiting


async def test_who_asks_for_an_unknown_run_waits_no_longer_for_a_broker_that_is_away_than_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SILENT_WAIT_S_MAX", "UP_TO_DATE_WAIT_S_MAX"):
        monkeypatch.setattr(f"edge.catch_up.{name}", 0.01)
    run_id = _fresh_run_id()
    async with open_history(tmp_path / "history.db") as history, asyncio.timeout(DEADLINE_S):
        table = RunTable(epoch=EPOCH, starts={0: 10}, now=asyncio.get_running_loop().time)
        catch_up = CatchUp(runs=table, reader=SilentLog(), history=history)
        with pytest.raises(SpanFailed):
            await catch_up.find(run_id, wait_s=0.01)
        writer = HistoryWriter(tmp_path / "history.db")
        envelope = Envelope(
            event=replace(CONCLUDED, run_id=run_id), event_id="e", cause_id="", trace=""
        )
        writer.apply([LogRecord(0, 1, 1_000, envelope)], {})
        writer.close()
        found = await catch_up.find(run_id, wait_s=0.01)
        assert isinstance(found, PastRun)
        assert found.run.run_id == run_id
