"""Reading runs back is bounded: a broker that does not answer, or everybody who comes back at once, cannot pile up waiters."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from edge.catch_up import RUNS_ASKED_MAX, CatchUp, CatchUpFull
from edge.runs import RunTable
from infra.history.sqlite import open_history
from infra.log.span_reader import SpanReader
from schemas.ids import RANDOM_BYTES, RunAddress, mint_run_id
from tests.contracts.test_span_reader import mute_broker

DEADLINE_S = 60.0
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
