"""Open streams of this process, and what a stream's writer promises.

The writer is a seam. `queue_writer.py` works over any ASGI server; `direct_writer.py` writes to the transport. Both bound what a
viewer that does not read may cost (I16): beyond VIEWER_BYTES_MAX its connection is closed, and its client resumes by event id.
"""

from __future__ import annotations

from typing import Final, Protocol

from edge.sse import KEEPALIVE, KEEPALIVE_EVERY_S

VIEWER_BYTES_MAX: Final = 65_536
ARREARS_WAIT_S_MAX: Final = 20.0
"""A viewer that takes no piece of its arrears for so long is dropped."""


class ViewerGone(Exception):
    """The viewer's connection is closed or too slow."""


class StreamWriter(Protocol):
    """One response body. `offer` and `end` are a FrameSink's; `written_at` is when something was last written."""

    written_at: float

    async def write(self, data: bytes) -> None:
        """Write and wait until the viewer has room again. Raises ViewerGone."""

    def offer(self, data: bytes) -> None:
        """Write without waiting; close the connection when the viewer has too much outstanding."""

    def end(self) -> None:
        """Nothing follows."""

    async def closed(self) -> None:
        """Wait until `end` was called and all is written, or the viewer is gone; then complete the response."""


class Streams:
    """All open streams of this process."""

    def __init__(self) -> None:
        self.open: set[StreamWriter] = set()
        self.draining = False
        self.dropped = 0
        """Viewers that were closed because they did not read."""

    def keep_alive(self, now: float) -> None:
        """Write a comment to every stream that was quiet for KEEPALIVE_EVERY_S. Call it about once a second."""
        for writer in tuple(self.open):
            if now - writer.written_at >= KEEPALIVE_EVERY_S:
                writer.offer(KEEPALIVE)

    def drain(self) -> None:
        """End every stream after the event it has written last; clients resume elsewhere."""
        self.draining = True
        for writer in tuple(self.open):
            writer.end()
