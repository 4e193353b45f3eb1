"""A run's events as a response: first what the viewer is in arrears, in pieces that it takes, then live."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edge.decisions.token_cursor import run_digest
from edge.decisions.viewer import Shown
from edge.direct_writer import opener_of
from edge.queue_writer import QueueWriter
from edge.runs import LiveRun
from edge.sse import HEADERS, frame
from edge.streams import Streams, StreamWriter, ViewerGone


class EventStream(Response):
    """The events of `run` after `cursor`."""

    def __init__(
        self,
        *,
        run: LiveRun,
        cursor: int,
        streams: Streams,
        headers: Mapping[str, str],
    ) -> None:
        self.status_code = 200
        self.background = None
        self._run = run
        self._cursor = cursor
        self._streams = streams
        self.init_headers({**dict(HEADERS), **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the run ends, the viewer goes, or this edge drains."""
        opener = opener_of(scope)
        if opener is not None:
            opener.before_start()
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        direct = opener.open(self._streams, send) if opener is not None else None
        writer: StreamWriter = direct or QueueWriter(self._streams, receive, send)
        self._streams.open.add(writer)
        try:
            await self._feed(writer)
            await writer.closed()
        except ViewerGone:
            pass
        finally:
            self._streams.open.discard(writer)
            self._run.sinks.discard(writer)

    async def _feed(self, writer: StreamWriter) -> None:
        """Bring the viewer up to date, then join it to the live run at that exact position."""
        run, cursor = self._run, self._cursor
        while not self._streams.draining:
            if run.transcript.end > cursor:
                shown: tuple[Shown, ...] = (
                    run.transcript.after(cursor)
                    if run.transcript.tells(cursor)
                    else (run.transcript.snapshot(),)
                )
                cursor = shown[-1].position
                await writer.write(run.frames(shown))
            elif run.transcript.state.ended:
                break
            else:
                # Nothing waited since it was up to date: what is accepted from here on comes by the sink, and nothing twice.
                run.sinks.add(writer)
                return
        writer.end()


class FinishedStream(Response):
    """The events of a run that nothing more is added to, as one body."""

    def __init__(self, run_id: str, shown: tuple[Shown, ...], headers: Mapping[str, str]) -> None:
        digest = run_digest(run_id)
        super().__init__(
            b"".join(frame(run_id, digest, one) for one in shown),
            headers={**dict(HEADERS), **headers},
        )
