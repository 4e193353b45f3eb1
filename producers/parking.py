"""Setting aside what cannot be decoded: into the topic's `.dead`, with the reason and where it stood (invariant I19).

The parked record's id comes from its source position, so a record that two readers park, or one parks twice, is one record.
"""

from __future__ import annotations

from typing import Final

from producers.log_writer import AppendFailed, LogWriter, RecordTooLarge, acknowledged
from schemas.topics import Topic

H_REASON: Final = "reason"
H_SOURCE: Final = "source"
PARKED_BYTES_MAX: Final = 900_000


async def park(
    writer: LogWriter,
    topic: Topic,
    *,
    partition: int,
    offset: int,
    key: bytes | None,
    value: bytes | None,
    reason: str,
) -> None:
    """Append the record to `topic.dead` and wait for it. Raises AppendFailed: then the source must not be committed.

    A value over PARKED_BYTES_MAX is cut; the source position still says where the whole of it is.
    """
    cut = value if value is None or len(value) <= PARKED_BYTES_MAX else value[:PARKED_BYTES_MAX]
    source = f"{topic.name}/{partition}/{offset}".encode()
    headers = [(H_REASON, reason.encode()[:1_000]), (H_SOURCE, source)]
    future = await writer.send_raw(
        topic.dead,
        cut if cut is not None else b"",
        key=key[:1_000] if key else source,
        partition=partition,
        headers=headers,
    )
    await acknowledged(future)


__all__ = ["H_REASON", "H_SOURCE", "AppendFailed", "RecordTooLarge", "park"]
