"""Setting aside what cannot be decoded: into the topic's `.dead`, with the reason and where it stood (invariant I19).

The parked record's id comes from its source position, so a record that two readers park, or one parks twice, is one record.
"""

from __future__ import annotations

from typing import Final

from infra.log.records import BadRecord
from producers.log_writer import LogWriter, acknowledged
from schemas.topics import Topic

H_REASON: Final = "reason"
H_SOURCE: Final = "source"
HAD: Final = "had-"
"""Before the name of each header that the record had: whoever mends it needs its type and schema number."""
PARKED_BYTES_MAX: Final = 900_000
PARKED_HEADERS_MAX: Final = 16
HEADER_BYTES_MAX: Final = 1_000


async def park(writer: LogWriter, topic: Topic, bad: BadRecord) -> None:
    """Append the record to `topic.dead` and wait for it. Raises AppendFailed: then the source must not be committed.

    What is over the limits above is cut; the source position still says where the whole of it is.
    """
    source = f"{topic.name}/{bad.partition}/{bad.offset}".encode()
    headers = [(H_REASON, bad.reason.encode()[:HEADER_BYTES_MAX]), (H_SOURCE, source)]
    for name, content in bad.headers[:PARKED_HEADERS_MAX]:
        headers.append((HAD + name[:HEADER_BYTES_MAX], (content or b"")[:HEADER_BYTES_MAX]))
    future = await writer.send_raw(
        topic.dead,
        (bad.value or b"")[:PARKED_BYTES_MAX],
        key=bad.key[:HEADER_BYTES_MAX] if bad.key else source,
        partition=bad.partition,
        headers=headers,
    )
    await acknowledged(future)
