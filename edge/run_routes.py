"""Runs: reading one, following its events from any cursor, cancelling it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from edge.answers import json_answer
from edge.auth import Caller
from edge.catch_up import FIRST_RECORD_WAIT_S_MAX, CatchUpFull, PastRun, RunUnknown
from edge.decisions.problems import Refused, invalid, log_behind, not_found, unavailable
from edge.decisions.token_cursor import (
    START,
    BadCursor,
    cursor_offset,
    end_position,
    event_position,
    read_cursor,
)
from edge.decisions.viewer import EndedShown, SnapshotShown
from edge.event_stream import EventStream, FinishedStream
from edge.runs import LiveRun
from edge.state import EdgeState, caller_of, overloaded, random_id, state_of
from edge.views import live_run_json, past_run_json
from infra.history import Run
from infra.log.span_reader import SpanFailed
from producers.log_writer import AppendFailed
from schemas.events.tokens import RunCancelled
from schemas.ids import BadId, derived_event_id, run_address
from schemas.run_fold import Ending
from schemas.topics import TOKENS
from schemas.vocabulary import CancelReason, RunStatus

CANCEL_APPEND_WAIT_MS_MAX: Final = 5_000
CANCEL_SEEN_WAIT_S_MAX: Final = 1.0
TAIL_BEHIND_WAIT_S_MAX: Final = 2.0
"""How long a cursor may lie ahead of this edge's tail: another edge may have read further."""
REDIRECTS_MAX: Final = 4


def run_location(chat_id: str, run_id: str) -> str:
    """The path of a run."""
    return f"/v1/chats/{chat_id}/runs/{run_id}"


async def read_run(request: Request) -> Response:
    """GET /v1/chats/{chat_id}/runs/{run_id}"""
    edge, caller = state_of(request), caller_of(request)
    chat_id, run_id = _ids(edge, caller, request)
    run = await _find(edge, caller, chat_id, run_id)
    if isinstance(run, LiveRun):
        await edge.catch_up.bring_up_to_date()
    return json_answer(
        live_run_json(run, chat_id) if isinstance(run, LiveRun) else past_run_json(run.run)
    )


async def follow_run(request: Request) -> Response:
    """GET /v1/chats/{chat_id}/runs/{run_id}/events"""
    edge, caller = state_of(request), caller_of(request)
    chat_id, run_id = _ids(edge, caller, request)
    run = await _find(edge, caller, chat_id, run_id)
    followed = run.run_id if isinstance(run, LiveRun) else run.run.run_id
    cursor, given_as = _cursor(request, followed)
    if isinstance(run, LiveRun) and not await _reached(run, cursor):
        raise await _never_reached(edge, run, cursor, given_as)
    edge.refuse_when_late()
    headers = {"turnlog-run-id": followed, "location": run_location(chat_id, followed)}
    return stream_of(edge, run, cursor, headers)


def stream_of(
    edge: EdgeState, run: LiveRun | PastRun, cursor: int, headers: Mapping[str, str]
) -> Response:
    """The events after `cursor`; 204 where the client has them all."""
    if isinstance(run, PastRun):
        return _past_stream(run.run, cursor, headers)
    transcript = run.transcript
    if transcript.state.ended and cursor >= transcript.end:
        return Response(status_code=204, headers=dict(headers))
    return EventStream(run=run, cursor=cursor, streams=edge.streams, headers=headers)


def _past_stream(run: Run, cursor: int, headers: Mapping[str, str]) -> Response:
    """A run that history alone knows: the whole text, and its end."""
    end_offset = run.end_offset if run.end_offset is not None else 0
    if cursor >= end_position(end_offset):
        return Response(status_code=204, headers=dict(headers))
    ended = EndedShown(
        position=end_position(end_offset),
        status=run.status,
        finish_reason=run.finish_reason,
        input_tokens=run.input_tokens,
        output_tokens=run.output_tokens,
        message_id=None if run.status is RunStatus.REFUSED else run.assistant_message_id,
    )
    if cursor >= event_position(end_offset) or run.status is RunStatus.REFUSED:
        return FinishedStream(run.run_id, (ended,), headers)
    snapshot = SnapshotShown(
        position=event_position(end_offset), text=run.text, count=run.output_tokens
    )
    return FinishedStream(run.run_id, (snapshot, ended), headers)


async def cancel_run(request: Request) -> Response:
    """POST /v1/chats/{chat_id}/runs/{run_id}/cancel"""
    edge, caller = state_of(request), caller_of(request)
    chat_id, run_id = _ids(edge, caller, request)
    try:
        found = await _find(edge, caller, chat_id, run_id, wait_s=0)
    except Refused as refused:
        # No record yet: the cancel is remembered by the run's own stream, whatever comes first.
        if refused.problem.status != 404 or not edge.runs.knows(run_address(run_id)):
            raise
        found = edge.runs.expect(run_id)
        if found.transcript.last_offset >= 0:
            raise  # It has some: it is not of this chat.
    if isinstance(found, PastRun):
        return _cancelled(found.run.run_id, found.run.status)
    if not found.transcript.state.ended:
        await _append_cancel(edge, found)
    return _cancelled(found.run_id, found.transcript.state.status)


def _cancelled(run_id: str, status: RunStatus) -> Response:
    return json_answer({"run_id": run_id, "status": status.value}, status=202)


async def _append_cancel(edge: EdgeState, run: LiveRun) -> None:
    """Append the cancel and wait a moment for it to come back. Raises Refused (503)."""
    try:
        await edge.appends.append(
            TOKENS,
            RunCancelled(run_id=run.run_id, reason=CancelReason.USER),
            event_id=derived_event_id(random_id().hex(), "RunCancelled"),
            wait_ms_max=CANCEL_APPEND_WAIT_MS_MAX,
        )
    except AppendFailed:
        raise unavailable(
            "The log did not take the cancel in time; ask again.", code="log_unavailable"
        ) from None

    def seen() -> bool:
        state = run.transcript.state
        return state.ended or state.cancelled_early is not None

    try:
        async with asyncio.timeout(CANCEL_SEEN_WAIT_S_MAX):
            while not seen():
                await run.changed()
    except TimeoutError:
        pass  # It is on the log: this edge's tail is a little behind.


def _ids(edge: EdgeState, caller: Caller, request: Request) -> tuple[str, str]:
    """The ids in the path. Raises Refused (404), before any input or output, for what is not the caller's."""
    chat_id, run_id = request.path_params["chat_id"], request.path_params["run_id"]
    if not edge.owns_chat(chat_id, caller):
        raise not_found("chat")
    if not edge.owns_run(run_id, caller):
        raise not_found("run")
    return chat_id, run_id


async def _find(
    edge: EdgeState,
    caller: Caller,
    chat_id: str,
    run_id: str,
    *,
    wait_s: float = FIRST_RECORD_WAIT_S_MAX,
) -> LiveRun | PastRun:
    """The run, or the one that it was redirected to. Raises Refused."""
    chat = await edge.chats.read(chat_id)
    if chat is not None and (chat.deleted or chat.account_id != caller.account_id):
        raise not_found("chat")
    for _ in range(REDIRECTS_MAX):
        try:
            run = await edge.catch_up.find(run_id, wait_s=wait_s)
        except (RunUnknown, BadId):
            raise not_found("run") from None
        except CatchUpFull:
            raise overloaded("Too many runs are being read back at once.") from None
        except SpanFailed:
            raise unavailable("The log does not answer.", code="log_unavailable") from None
        if isinstance(run, PastRun):
            in_chat = run.run.chat_id
        else:
            state = run.transcript.state
            if state.ending is Ending.REDIRECTED and state.redirected_to is not None:
                run_id = state.redirected_to
                if not edge.owns_run(run_id, caller):
                    raise not_found("run")
                continue
            in_chat = state.queued.chat_id if state.queued is not None else chat_id
        if in_chat != chat_id:
            raise not_found("run")
        return run
    raise not_found("run")


def _cursor(request: Request, run_id: str) -> tuple[int, str]:
    """Where the client resumes, and what said so: its Last-Event-ID, else `after`. Raises Refused (400)."""
    # An empty Last-Event-ID is how an EventSource says that it has none.
    for name, text in (
        ("Last-Event-ID", request.headers.get("last-event-id") or None),
        ("after", request.query_params.get("after")),
    ):
        if text is not None:
            try:
                return read_cursor(text, run_id), name
            except BadCursor:
                raise _bad_cursor(name) from None
    return START, ""


def _bad_cursor(name: str) -> Refused:
    return invalid(f"{name} is no event id of this run.", param=name, code="invalid_cursor")


async def _reached(run: LiveRun, cursor: int) -> bool:
    """Wait a moment until this edge has read up to the cursor, so that nothing is sent twice; whether it has."""
    try:
        async with asyncio.timeout(TAIL_BEHIND_WAIT_S_MAX):
            while cursor > run.transcript.end and not run.transcript.state.ended:
                await run.changed()
    except TimeoutError:
        return False
    return True


async def _never_reached(edge: EdgeState, run: LiveRun, cursor: int, given_as: str) -> Refused:
    """400 for a cursor of no event; 503 where it may be one that this edge has not read so far."""
    partition, offset = run.address.partition, cursor_offset(cursor)
    if offset < edge.runs.positions[partition]:
        return _bad_cursor(given_as)
    try:
        end = (await edge.reader.bounds(TOKENS, [partition]))[partition].end
    except SpanFailed:
        end = offset + 1  # Nobody knows.
    if offset >= end:
        return _bad_cursor(given_as)
    return log_behind()
