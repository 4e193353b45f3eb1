"""Server-sent events: one frame an event, encoded once and shared by every viewer of the run.

JSON escapes every control character, so no text can break a frame: the only line feeds are ours. Line separators like U+2028 are no
line ends in this protocol.
"""

from __future__ import annotations

from typing import Final, assert_never

import orjson

from edge.decisions.token_cursor import write_cursor
from edge.decisions.viewer import (
    DeltaShown,
    EndedShown,
    QueuedShown,
    Shown,
    SnapshotShown,
    StartedShown,
)

KEEPALIVE: Final = b": keepalive\n\n"
KEEPALIVE_EVERY_S: Final = 15.0

HEADERS: Final = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache, no-transform"),
    ("x-accel-buffering", "no"),
)


def frame(run_id: str, digest: str, shown: Shown) -> bytes:
    """The event as it goes over the wire, up to and including its blank line."""
    cursor = write_cursor(digest, shown.position).encode()
    match shown:
        case DeltaShown():
            # Nearly all events: no intermediate names.
            return b"event: message.delta\nid: %b\ndata: %b\n\n" % (
                cursor,
                orjson.dumps({"text": shown.text, "index": shown.index, "count": shown.count}),
            )
        case QueuedShown(queued=queued):
            name = b"run.queued"
            data: dict[str, object] = {
                "run_id": run_id,
                "chat_id": queued.chat_id,
                "message_id": queued.assistant_message_id,
                "model": queued.model,
                "wait_ms": queued.wait_ms,
                "granted_output_tokens": queued.granted_output_tokens,
            }
        case StartedShown():
            name, data = b"run.started", {"attempt": shown.attempt, "model": shown.model}
        case SnapshotShown():
            name, data = b"run.snapshot", {"text": shown.text, "count": shown.count}
        case EndedShown():
            name = b"run.ended"
            data = {
                "status": shown.status.value,
                "finish_reason": shown.finish_reason.value if shown.finish_reason else None,
                "usage": {
                    "input_tokens": shown.input_tokens,
                    "output_tokens": shown.output_tokens,
                },
                "message_id": shown.message_id,
            }
        case _:
            assert_never(shown)
    return b"event: %b\nid: %b\ndata: %b\n\n" % (name, cursor, orjson.dumps(data))
