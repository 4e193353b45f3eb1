"""A consumer is let go whatever it was doing."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.consumer.subscription_state import SubscriptionState

from inference_workers.membership import Membership
from infra.log.stopping import stop_consumer


async def paused() -> None:
    """Stands for a fetch that the broker has not answered: its client library waits a moment before the next one."""
    await asyncio.sleep(3_600)


@pytest.fixture
async def consumer() -> AIOKafkaConsumer:
    """One with a fetch that has failed just now, as it is while a broker is slow or away."""
    made = AIOKafkaConsumer(bootstrap_servers="127.0.0.1:1")
    made._fetcher = Fetcher(made._client, SubscriptionState())
    await asyncio.sleep(0)
    made._fetcher._pending_tasks = {asyncio.create_task(paused())}
    await asyncio.sleep(0)
    return made


async def test_a_fetch_that_has_just_failed_does_not_cancel_who_stops_its_consumer(
    consumer: AIOKafkaConsumer,
) -> None:
    await stop_consumer(consumer)
    assert consumer._fetcher._fetch_task.done()
    assert not consumer._client._conns


async def test_a_worker_leaves_its_group_whatever_its_consumer_was_doing(
    consumer: AIOKafkaConsumer,
) -> None:
    membership = Membership(
        bootstrap="127.0.0.1:1",
        client_id="test",
        model="m",
        session_ms=6_000,
        on_revoked=lambda: None,
        on_assigned=lambda _: None,
    )
    membership._consumer = consumer
    leaving = asyncio.create_task(membership.leave())
    await asyncio.wait([leaving])
    assert not leaving.cancelled()
    leaving.result()
    assert not consumer._client._conns


async def test_who_is_cancelled_while_it_stops_a_consumer_is_cancelled(
    consumer: AIOKafkaConsumer,
) -> None:
    stopping = asyncio.create_task(stop_consumer(consumer))
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
