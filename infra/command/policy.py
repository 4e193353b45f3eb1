"""The policy file becomes an event where it differs from what the log says, once for each partition of the account log.

Admission decides each account by its own partition alone, so the limits have to lie in every one of them.
"""

from __future__ import annotations

import secrets

import msgspec
from aiokafka.errors import KafkaError

from infra.log.committed import CommittedUnknown, committed_offsets
from infra.log.records import LogRecord
from infra.log.span_reader import Bounds, SpanFailed, SpanReader
from infra.log.tail import OffsetsGone
from processors.decisions.account_partition import outranked
from processors.groups import ADMISSION_GROUP
from producers.log_writer import Appended, AppendFailed, LogWriter
from schemas.events.account_snapshots import LimitsKept
from schemas.events.accounts import LimitsChanged
from schemas.topics import ACCOUNT_SNAPSHOTS, ACCOUNTS, POLICY_ORDER_PARTITION


class PolicyNotRead(Exception):
    """The cluster did not tell. The message is one line."""


class PolicyNotWritten(Exception):
    """The cluster did not take the policy. The message is one line."""


async def sync_policy(bootstrap: str, limits: LimitsChanged) -> int:
    """Append `limits` to every partition, unless they are the newest in all; gives to how many. Raises PolicyNotWritten.

    Of two at the same time the one counts everywhere whose record in POLICY_ORDER_PARTITION is the later one.
    """
    try:
        async with (
            LogWriter(bootstrap=bootstrap, client_id="turnlog-policy") as writer,
            SpanReader(bootstrap=bootstrap, client_id="turnlog-policy") as reader,
        ):
            newest = await _newest_limits(bootstrap, reader)
            if all(known and known.version == limits.version for known in newest.values()):
                return 0
            first = await _write(writer, limits, POLICY_ORDER_PARTITION)
            ordered = msgspec.structs.replace(limits, order=first.offset)
            for partition in newest:
                if partition != POLICY_ORDER_PARTITION:
                    await _write(writer, ordered, partition)
            return len(newest)
    except (
        AppendFailed,
        SpanFailed,
        OffsetsGone,
        CommittedUnknown,
        KafkaError,
        TimeoutError,
    ) as error:
        raise PolicyNotWritten(f"the policy was not written: {type(error).__name__}") from error


async def _write(writer: LogWriter, limits: LimitsChanged, partition: int) -> Appended:
    return await writer.append(
        ACCOUNTS, limits, event_id=secrets.token_hex(16), partition=partition
    )


async def read_policy(bootstrap: str) -> dict[int, LimitsChanged | None]:
    """The newest limits on the log, by partition of the account log. Raises PolicyNotRead."""
    try:
        async with SpanReader(bootstrap=bootstrap, client_id="turnlog-policy") as reader:
            return await _newest_limits(bootstrap, reader)
    except (SpanFailed, OffsetsGone, CommittedUnknown, KafkaError, TimeoutError) as error:
        raise PolicyNotRead(f"the policy was not read: {type(error).__name__}") from error


async def _newest_limits(bootstrap: str, reader: SpanReader) -> dict[int, LimitsChanged | None]:
    partitions = await reader.partitions(ACCOUNTS)
    kept = await reader.bounds(ACCOUNT_SNAPSHOTS, partitions)
    records = await reader.bounds(ACCOUNTS, partitions)
    decided = await committed_offsets(bootstrap, ADMISSION_GROUP, ACCOUNTS, partitions)
    newest: dict[int, LimitsChanged | None] = {}
    for partition in partitions:
        limits = await _kept_limits(reader, partition, kept[partition])
        # What lies below the committed offset has left its row behind; above it, the records themselves tell.
        start = max(records[partition].first, decided.get(partition, 0))
        async for batch in reader.span(ACCOUNTS, partition, start, records[partition].end):
            for record in batch:
                event = record.event if isinstance(record, LogRecord) else None
                if isinstance(event, LimitsChanged) and not (limits and outranked(event, limits)):
                    limits = event
        newest[partition] = limits
    return newest


async def _kept_limits(reader: SpanReader, partition: int, kept: Bounds) -> LimitsChanged | None:
    limits, newest = None, -1
    async for batch in reader.span(ACCOUNT_SNAPSHOTS, partition, kept.first, kept.end):
        for record in batch:
            event = record.event if isinstance(record, LogRecord) else None
            if isinstance(event, LimitsKept) and event.source_offset >= newest:
                limits, newest = event.versions[-1].limits, event.source_offset
    return limits
