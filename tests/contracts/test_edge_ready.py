"""When an edge tells its supervisor that it is ready: `turnlog up` passes it on to a person, for whom every route has to work then."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from edge.server import say_ready
from edge.soft_views import Accounts, BrokerClock
from schemas.events.account_snapshots import LimitsKept
from schemas.vocabulary import Tier
from tests.contracts.event_samples import SAMPLES

TURNS = 20
LIMITS_KEPT = next(event for _, event in SAMPLES if isinstance(event, LimitsKept))


async def test_an_edge_is_ready_when_it_listens_and_knows_the_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = tmp_path / "edge-0.ready"
    monkeypatch.setenv("TURNLOG_READY_FILE", str(ready))
    accounts = Accounts(BrokerClock(monotonic=lambda: 0.0, wall=lambda: 0.0))
    listening = asyncio.Event()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        saying = tasks.create_task(say_ready(listening, accounts))
        listening.set()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        assert not saying.done()
        assert not ready.exists()
        assert accounts.quota("a", Tier.FREE) is None, "which would answer 503, limits_unknown"
        accounts.note(LIMITS_KEPT, 0)
        await saying
    assert ready.exists()
    assert accounts.quota("a", Tier.FREE) is not None
