"""The lanes' shares as the policy has them now, from the rows that admission keeps.

Soft state: until a row was read the packaged shares hold, and no outcome of a run depends on them. Every partition of the topic has the
same versions, so one partition is followed: the least that a worker can read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final, NoReturn

from infra.log.records import LogRecord
from infra.log.span_reader import SpanFailed, SpanReader
from infra.log.tail import OffsetsGone, Tail
from schemas.events.account_snapshots import LimitsKept
from schemas.events.accounts import LaneLimits
from schemas.topics import ACCOUNT_SNAPSHOTS
from schemas.vocabulary import Lane

logger = logging.getLogger(__name__)

PARTITION: Final = 0
AGAIN_AFTER_S: Final = 1.0


async def follow_shares(
    *,
    bootstrap: str,
    client_id: str,
    spans: SpanReader,
    on_shares: Callable[[Mapping[Lane, LaneLimits]], None],
) -> NoReturn:
    """Call `on_shares` with the newest version, now and whenever there is another. Raises KafkaError."""
    while True:
        try:
            await _follow(bootstrap, client_id, spans, on_shares)
        except (OffsetsGone, SpanFailed) as error:
            logger.warning("policy_tail_again %s", type(error).__name__)
            await asyncio.sleep(AGAIN_AFTER_S)


async def _follow(
    bootstrap: str,
    client_id: str,
    spans: SpanReader,
    on_shares: Callable[[Mapping[Lane, LaneLimits]], None],
) -> NoReturn:
    start = (await spans.bounds(ACCOUNT_SNAPSHOTS, [PARTITION]))[PARTITION].first
    newest, version = -1, ""
    async with Tail(
        bootstrap=bootstrap, client_id=client_id, topic=ACCOUNT_SNAPSHOTS, starts={PARTITION: start}
    ) as tail:
        while True:
            for record in await tail.read():
                if not isinstance(record, LogRecord) or not isinstance(record.event, LimitsKept):
                    continue  # Edges park what is no row.
                row = record.event
                if not row.versions or row.source_offset < newest:
                    continue  # Not the row written last counts, but that of the highest offset.
                newest, limits = row.source_offset, row.versions[-1].limits
                if limits.lanes and limits.version != version:
                    version = limits.version
                    on_shares(limits.lanes)
                    logger.info("shares_changed version=%s", version)
