"""Reading one branch of a chat: the store's messages, and over them what only the log has yet.

A read that follows an answer's end includes it (I15): it waits a moment for the projection. What the store still lacks then is told
from the log itself: answers from the runs that this edge holds, the questions before them from the admissions not yet projected.
"""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import orjson

from edge.catch_up import CatchUpFull, RunUnknown
from edge.chat_routes import current_leaf
from edge.decisions.problems import Refused, invalid, not_found, unavailable
from edge.runs import LiveRun
from edge.state import EdgeState, wait_for_store
from edge.views import answer_of, laid_over, question_of
from infra.history import BadCursor, Chat, Message, Page
from infra.log.records import LogRecord
from infra.log.span_reader import SpanFailed
from infra.log.tail import OffsetsGone
from schemas.events.admissions import PromptAdmitted
from schemas.ids import partition_for_key
from schemas.topics import ADMISSIONS
from schemas.vocabulary import Role, RunStatus

UNPROJECTED_RECORDS_MAX: Final = 20_000
CURSOR_CHARS_MAX: Final = 600
CHAIN_MAX: Final = 64
"""Runs of one branch that the store may lack at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a listing goes on: in the branch that ends in `leaf`, at the store's own cursor."""

    leaf: str
    after: str


async def read_branch(
    edge: EdgeState, chat: Chat, *, leaf: str | None, cursor: str | None, limit: int
) -> Page[Message]:
    """A page of the branch, oldest first. Raises Refused: 404 for a leaf of no message here, 400 for a bad cursor."""
    place = _read_cursor(cursor) if cursor is not None else None
    if place is not None and leaf is not None and place.leaf != leaf:
        raise _bad_cursor()
    await edge.catch_up.bring_up_to_date()
    given = leaf if leaf is not None else place.leaf if place is not None else None
    target = given if given is not None else await current_leaf(edge, chat)
    if target is None:
        return Page(rows=[], next_cursor=None)
    runs: Sequence[LiveRun] = edge.runs.runs_of_chat(chat.chat_id)
    await wait_for_store(lambda: _in_store(edge, runs))
    missing, stored_leaf = await _missing(edge, chat, runs, target)
    if stored_leaf is None and not missing:
        raise not_found("message")
    page: Page[Message] = Page(rows=[], next_cursor=None)
    if stored_leaf is not None:
        try:
            page = await edge.history.branch(
                chat.chat_id, stored_leaf, cursor=place.after if place else None, limit=limit
            )
        except BadCursor:
            raise _bad_cursor() from None
        page, runs = await _with_log(edge, page, runs)
    if page.next_cursor is not None:
        return Page(
            rows=laid_over(page.rows, runs), next_cursor=_write_cursor(target, page.next_cursor)
        )
    # At most a question and an answer for each run that the store lacks: they ride on the last page.
    return Page(rows=[*laid_over(page.rows, runs), *missing], next_cursor=None)


async def _with_log(
    edge: EdgeState, page: Page[Message], runs: Sequence[LiveRun]
) -> tuple[Page[Message], Sequence[LiveRun]]:
    """The page and the runs, with those of its answers that the store does not have whole and this edge does not hold.

    An edge that has just started holds none of the runs that its predecessor has shown (I15).
    """
    held = {run.run_id for run in runs}
    rows, found = list(page.rows), list(runs)
    for at, message in enumerate(rows):
        unfinished = message.role is Role.ASSISTANT and message.status is RunStatus.QUEUED
        if not unfinished or message.run_id in held:
            continue
        try:
            run = await edge.catch_up.find(message.run_id)
        except (RunUnknown, CatchUpFull, SpanFailed):
            continue  # Nothing better is known.
        if isinstance(run, LiveRun):
            found.append(run)
        else:
            rows[at] = await edge.history.message(message.message_id) or message
    if len(found) > len(runs):
        await edge.catch_up.bring_up_to_date()
    return Page(rows=rows, next_cursor=page.next_cursor), found


async def _in_store(edge: EdgeState, runs: Sequence[LiveRun]) -> bool | None:
    """Whether the store has these runs' messages, and the answers of those that have ended."""
    for run in reversed(runs):
        if run.stored:
            continue
        stored = await edge.history.run(run.run_id)
        concluded = stored is not None and stored.end_offset is not None
        if stored is None or (run.transcript.state.ended and not concluded):
            return None
        run.stored = concluded
    return True


async def _missing(
    edge: EdgeState, chat: Chat, runs: Sequence[LiveRun], target: str
) -> tuple[list[Message], str | None]:
    """The end of the branch that the store lacks, oldest first, and the leaf of the part that it has (None: it has nothing)."""
    if await _stored(edge, chat, target):
        return [], target
    by_message = {}
    for run in runs:
        queued = run.transcript.state.queued
        if queued is not None:
            by_message[queued.assistant_message_id] = by_message[queued.user_message_id] = run
    if target not in by_message:
        return [], None
    questions = await _questions(edge, chat, runs)
    found: list[Message] = []
    at: str | None = target
    for _ in range(CHAIN_MAX):
        source = by_message.get(at) if at is not None else None
        if source is None:
            break
        queued = source.transcript.state.queued
        assert queued is not None, "only such are in the table"
        question = questions.get(queued.user_message_id)
        if question is None:
            raise unavailable(
                "The store is behind and the log does not answer.", code="history_behind"
            )
        if at == queued.assistant_message_id:
            # Both have the time of the admission, as the store will say it too.
            found.append(replace(answer_of(source), created_ms=question.created_ms))
        found.append(question)
        at = queued.parent_id
        if at is None or await _stored(edge, chat, at):
            break
    return found[::-1], at


async def _stored(edge: EdgeState, chat: Chat, message_id: str) -> bool:
    message = await edge.history.message(message_id)
    return message is not None and message.chat_id == chat.chat_id


async def _questions(edge: EdgeState, chat: Chat, runs: Sequence[LiveRun]) -> dict[str, Message]:
    """The users' messages of these runs, from the admissions that the store has not projected yet."""
    wanted = {run.run_id for run in runs}
    partition = partition_for_key(chat.chat_id, edge.partitions)
    found: dict[str, Message] = {}
    try:
        bounds = (await edge.reader.bounds(ADMISSIONS, [partition]))[partition]
        start = max(await edge.history.projected(ADMISSIONS.name, partition), bounds.first)
        if bounds.end - start > UNPROJECTED_RECORDS_MAX:
            return {}
        async for batch in edge.reader.span(ADMISSIONS, partition, start, bounds.end):
            for record in batch:
                if isinstance(record, LogRecord) and isinstance(record.event, PromptAdmitted):
                    admitted = record.event
                    if admitted.run_id in wanted:
                        found[admitted.user_message_id] = question_of(admitted, record.appended_ms)
    except (SpanFailed, OffsetsGone):
        return {}
    return found


def _write_cursor(leaf: str, after: str) -> str:
    return urlsafe_b64encode(orjson.dumps([leaf, after])).rstrip(b"=").decode()


def _read_cursor(text: str) -> _Place:
    if len(text) > CURSOR_CHARS_MAX or not text.isascii():
        raise _bad_cursor()
    try:
        found = orjson.loads(urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (binascii.Error, ValueError):
        raise _bad_cursor() from None
    match found:
        case [str(leaf), str(after)]:
            return _Place(leaf=leaf, after=after)
        case _:
            raise _bad_cursor()


def _bad_cursor() -> Refused:
    return invalid("cursor is not one of this listing.", param="cursor", code="invalid_cursor")
