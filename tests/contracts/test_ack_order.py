"""Acknowledging in order, whatever the order in which work ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processors.ack_order import AckOrder, TooManyAside


@dataclass(frozen=True)
class Message:
    partition: int
    offset: int


@given(st.permutations(range(8)), st.sets(st.integers(0, 7)))
async def test_a_record_waits_for_those_before_it_in_its_partition(
    ends: list[int], done_at_once: set[int]
) -> None:
    acknowledged: list[Message] = []
    order = AckOrder(acknowledged.append)
    loop = asyncio.get_running_loop()
    messages = [Message(partition=n % 2, offset=n) for n in range(8)]
    work = {n: loop.create_future() for n in range(8) if n not in done_at_once}
    for n, message in enumerate(messages):
        order.add(message, work.get(n))
    finished = set(done_at_once)
    for n in ends:
        if n in work:
            work[n].set_result(None)
            finished.add(n)
            await asyncio.wait([work[n]])
            await asyncio.wait([loop.create_task(_turn())])
        for partition in (0, 1):
            mine = [m.offset for m in acknowledged if m.partition == partition]
            expected = []
            for offset in range(partition, 8, 2):
                if offset not in finished:
                    break
                expected.append(offset)
            assert mine == expected


async def _turn() -> None:
    """One turn of the loop: callbacks of what ended before have run after it."""


async def test_nothing_of_a_partition_that_was_taken_away_is_acknowledged_and_its_work_stops() -> (
    None
):
    acknowledged: list[Message] = []
    order = AckOrder(acknowledged.append, in_flight_max=2)
    loop = asyncio.get_running_loop()
    lost, kept = loop.create_future(), loop.create_future()
    order.add(Message(0, 0), lost)
    order.add(Message(1, 0), kept)
    waiting = loop.create_task(order.room())
    await asyncio.wait([waiting], timeout=0.01)
    assert not waiting.done()
    order.forget([0])
    await asyncio.wait_for(waiting, 30)
    assert lost.cancelled()
    kept.set_result(None)
    await asyncio.wait([loop.create_task(_turn())])
    assert acknowledged == [Message(1, 0)]


async def test_work_that_only_waits_leaves_its_place_to_others_within_a_bound() -> None:
    order = AckOrder(lambda _: None, in_flight_max=1, set_aside_max=1)
    waits, other = asyncio.get_running_loop().create_future(), asyncio.Event()
    order.add(Message(0, 0), waits)
    with order.set_aside():
        await asyncio.wait_for(order.room(), 30)
        with pytest.raises(TooManyAside), order.set_aside():
            other.set()
        assert not other.is_set()
    waiting = asyncio.get_running_loop().create_task(order.room())
    await asyncio.wait([waiting], timeout=0.01)
    assert not waiting.done()
    waits.set_result(None)
    await asyncio.wait_for(waiting, 30)


async def test_what_is_done_behind_work_that_waits_is_held_back_within_a_bound() -> None:
    acknowledged: list[Message] = []
    order = AckOrder(acknowledged.append, held_max=2)
    waits = asyncio.get_running_loop().create_future()
    for offset in range(3):
        order.add(Message(0, offset), waits if offset == 0 else None)
    waiting = asyncio.get_running_loop().create_task(order.room())
    await asyncio.wait([waiting], timeout=0.01)
    assert not waiting.done()
    waits.set_result(None)
    await asyncio.wait_for(waiting, 30)
    assert len(acknowledged) == 3
