"""A process that stood still, stopped or on a machine that slept, does not take that time for somebody's silence."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest
from aiokafka.errors import KafkaError

from processors.account_ledger import OVERDUE_SAVES, _InFlight
from processors.decisions.account_partition import Decided
from producers.log_writer import STOOD_STILL_S, Appended, AppendFailed, acknowledged

APPENDED = Appended(partition=0, offset=7, appended_ms=1)
WAIT_MS = 1_000
"""The second time it has to last for some turns of the loop, also on a machine that is busy."""


async def test_an_acknowledgement_that_came_while_the_process_stood_still_is_seen() -> None:
    sent: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()

    async def read() -> None:
        """As a client library does: what lies in the socket takes some turns of the loop until it is known."""
        threading.Event().wait(STOOD_STILL_S + 2 * WAIT_MS / 1000)
        for _ in range(10):
            await asyncio.sleep(0)
        sent.set_result(APPENDED)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(read())
        assert await acknowledged(sent, wait_ms_max=WAIT_MS) == APPENDED


async def test_an_acknowledgement_that_does_not_come_is_not_waited_for_any_longer() -> None:
    sent: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
    with pytest.raises(AppendFailed) as given_up:
        await acknowledged(sent, wait_ms_max=WAIT_MS)
    assert isinstance(given_up.value.__cause__, TimeoutError), "what an edge tells its log"
    assert not sent.done(), "it is left to whoever else waits for it"


async def test_an_append_that_fails_after_it_was_given_up_is_no_news() -> None:
    told: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context))
    sent: asyncio.Future[Appended] = loop.create_future()
    with pytest.raises(AppendFailed):
        await acknowledged(sent, wait_ms_max=1)
    sent.set_exception(KafkaError())
    await asyncio.sleep(0)
    del sent
    gc.collect()
    assert told == []


async def test_an_output_is_overdue_after_so_many_saves_and_not_before() -> None:
    sent: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
    decided = _InFlight(None, Decided(offset=0), (sent,), 3)
    assert not decided.delivered(3 + OVERDUE_SAVES)
    with pytest.raises(AppendFailed):
        decided.delivered(4 + OVERDUE_SAVES)
    sent.set_result(APPENDED)
    assert decided.delivered(4 + OVERDUE_SAVES)
