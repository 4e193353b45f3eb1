"""The policy file becomes an event where it differs from what the log says, once for each partition of the account log.

Admission decides each account by its own partition alone, so the limits have to lie in every one of them.
"""

from __future__ import annotations

import secrets

from infra.log.committed import CommittedUnknown, committed_offsets
from infra.log.records import LogRecord
from infra.log.span_reader import Bounds, SpanFailed, SpanReader
from infra.log.tail import OffsetsGone
from processors.groups import ADMISSION_GROUP
from producers.log_writer import AppendFailed, LogWriter
from schemas.events.account_snapshots import LimitsKept
from schemas.events.accounts import LimitsChanged
from schemas.topics import ACCOUNT_SNAPSHOTS, ACCOUNTS


class PolicyNotWritten(Exception):
    """The cluster did not take the policy. The message is one line."""


async def sync_policy(bootstrap: str, limits: LimitsChanged) -> int:
    """Append `limits` to every partition whose newest limits differ; gives how many. Raises PolicyNotWritten.

    Doing it twice, or twice at once, is harmless: the same version again changes nothing.
    """
    try:
        async with (
            LogWriter(bootstrap=bootstrap, client_id="turnlog-policy") as writer,
            SpanReader(bootstrap=bootstrap, client_id="turnlog-policy") as reader,
        ):
            versions = await _newest_versions(bootstrap, writer, reader)
            differing = [p for p, version in versions.items() if version != limits.version]
            for partition in differing:
                await writer.append(
                    ACCOUNTS, limits, event_id=secrets.token_hex(16), partition=partition
                )
            return len(differing)
    except (AppendFailed, SpanFailed, OffsetsGone, CommittedUnknown, TimeoutError) as error:
        raise PolicyNotWritten(f"the policy was not written: {type(error).__name__}") from error


async def _newest_versions(
    bootstrap: str, writer: LogWriter, reader: SpanReader
) -> dict[int, str | None]:
    partitions = list(range(await writer.partitions_of(ACCOUNTS)))
    kept = await reader.bounds(ACCOUNT_SNAPSHOTS, partitions)
    records = await reader.bounds(ACCOUNTS, partitions)
    decided = await committed_offsets(bootstrap, ADMISSION_GROUP, ACCOUNTS, partitions)
    versions: dict[int, str | None] = {}
    for partition in partitions:
        version = await _kept_version(reader, partition, kept[partition])
        # What lies below the committed offset has left its row behind; above it, the records themselves tell.
        start = max(records[partition].first, decided.get(partition, 0))
        async for batch in reader.span(ACCOUNTS, partition, start, records[partition].end):
            for record in batch:
                if isinstance(record, LogRecord) and isinstance(record.event, LimitsChanged):
                    version = record.event.version
        versions[partition] = version
    return versions


async def _kept_version(reader: SpanReader, partition: int, kept: Bounds) -> str | None:
    version, newest = None, -1
    async for batch in reader.span(ACCOUNT_SNAPSHOTS, partition, kept.first, kept.end):
        for record in batch:
            event = record.event if isinstance(record, LogRecord) else None
            if isinstance(event, LimitsKept) and event.source_offset >= newest:
                version, newest = event.versions[-1].limits.version, event.source_offset
    return version
