"""What both Faust processes promise of their end: a stop that was cut off takes no record any more, and is no defect."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faust

from infra.log.records import BadRecord, LogRecord
from processors.faust_process import FaustSettings, build_app, consume
from schemas.topics import CHATS


def app_of(home: Path) -> faust.App:
    return build_app(FaustSettings(group="g", bootstrap="127.0.0.1:1", session_ms=6_000, home=home))


class Stream:
    """What Faust hands to an agent."""

    def __init__(self, count: int) -> None:
        self._count = count

    def noack(self) -> Stream:
        return self

    async def events(self) -> AsyncIterator[Any]:
        for offset in range(self._count):
            message = SimpleNamespace(
                partition=0, offset=offset, timestamp=1.0, key=b"k", value=b"{", headers=[]
            )
            yield SimpleNamespace(message=message)


async def run_agent(app: faust.App, stream: Stream) -> None:
    (agent,) = app.agents.values()
    await agent.fun(stream)


async def test_records_that_come_after_the_stop_are_left_to_the_next(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    taken: list[int] = []

    async def take(message: Any, record: LogRecord | BadRecord) -> None:
        assert isinstance(record, BadRecord)
        taken.append(message.offset)
        if message.offset == 1:
            app._stopped_set()

    consume(app, CHATS, take)
    await run_agent(app, Stream(5))
    assert taken == [0, 1]


async def test_a_record_that_a_stop_interrupts_does_not_make_the_end_a_defect(
    tmp_path: Path,
) -> None:
    """A defect would end this very process."""
    app = app_of(tmp_path)

    async def take(message: Any, record: LogRecord | BadRecord) -> None:
        app._stopped_set()
        raise RuntimeError("the task group is finished")

    consume(app, CHATS, take)
    await run_agent(app, Stream(2))
