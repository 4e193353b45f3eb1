"""Chats: create, list, read, rename, delete. A change is an event; the answer waits a moment until the store has it."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from edge.allowances import rate_limit_headers, take_change
from edge.answers import json_answer
from edge.auth import Caller
from edge.bodies import read_json
from edge.decisions.problems import Refused, invalid, not_found, unavailable, unprocessable
from edge.decisions.refusals import CONTEXT_TOO_LONG
from edge.decisions.requests import NewChat, read_limit, read_new_chat, read_title
from edge.state import EdgeState, caller_of, random_id, state_of, wait_for_store
from edge.token_counts import count_prompt
from edge.views import chat_json
from infra.history import BadCursor, Chat
from infra.log.span_reader import SpanFailed
from producers.log_writer import Appended, AppendFailed
from schemas.events.chats import ChatCreated, ChatDeleted, ChatEvent, ChatRenamed
from schemas.events.tokens import RunCancelled
from schemas.ids import derived_event_id, mint_chat_id, partition_for_key
from schemas.topics import CHATS, TOKENS
from schemas.vocabulary import CancelReason, Role

APPEND_WAIT_MS_MAX = 5_000


async def create_chat(request: Request) -> Response:
    """POST /v1/chats"""
    edge, caller = state_of(request), caller_of(request)
    wanted = read_new_chat(await read_json(request))
    take_change(edge, caller)
    await _check_new(edge, caller, wanted)
    edge.refuse_when_full()
    chat_id = mint_chat_id(
        key=edge.secrets.id_key, account_id=caller.account_id, random=random_id()
    )
    created = ChatCreated(
        chat_id=chat_id,
        account_id=caller.account_id,
        title=wanted.title,
        system_prompt=wanted.system_prompt,
        model=wanted.model,
    )
    appended = await _append(edge, created, derived_event_id(chat_id, "ChatCreated"))
    chat = await wait_for_store(lambda: edge.history.chat(chat_id))
    if chat is None:
        chat = Chat(
            chat_id=chat_id,
            account_id=caller.account_id,
            title=wanted.title,
            system_prompt=wanted.system_prompt,
            model=wanted.model,
            created_ms=appended.appended_ms,
            updated_ms=appended.appended_ms,
            current_leaf=None,
            deleted=False,
        )
        edge.chats.changed(chat, appended)
    return json_answer(
        chat_json(chat, current_leaf=chat.current_leaf),
        status=201,
        headers={"location": f"/v1/chats/{chat_id}", **rate_limit_headers(edge, caller)},
    )


async def list_chats(request: Request) -> Response:
    """GET /v1/chats"""
    edge, caller = state_of(request), caller_of(request)
    limit = read_limit(request.query_params.get("limit"))
    cursor = request.query_params.get("cursor")
    try:
        page = await edge.history.chats(caller.account_id, cursor=cursor, limit=limit)
    except BadCursor:
        raise invalid(
            "cursor is not one of this listing.", param="cursor", code="invalid_cursor"
        ) from None
    await edge.catch_up.bring_up_to_date()
    chats = [await edge.chats.lay_over(chat) for chat in page.rows]
    if cursor is None and page.next_cursor is None:
        # What the store lacks rides on a listing of one page; a longer one has it once the store has.
        chats = [*chats, *await edge.chats.unlisted(caller.account_id)]
        chats = sorted(chats, key=lambda chat: (chat.updated_ms, chat.chat_id), reverse=True)[
            :limit
        ]
    data = [
        chat_json(chat, current_leaf=await current_leaf(edge, chat))
        for chat in chats
        if not chat.deleted
    ]
    return json_answer({"data": data, "next_cursor": page.next_cursor})


async def read_chat(request: Request) -> Response:
    """GET /v1/chats/{chat_id}"""
    edge, caller = state_of(request), caller_of(request)
    chat = await chat_of(edge, caller, request.path_params["chat_id"])
    await edge.catch_up.bring_up_to_date()
    return json_answer(chat_json(chat, current_leaf=await current_leaf(edge, chat)))


async def rename_chat(request: Request) -> Response:
    """PATCH /v1/chats/{chat_id}"""
    edge, caller = state_of(request), caller_of(request)
    take_change(edge, caller)
    chat = await chat_of(edge, caller, request.path_params["chat_id"])
    title = read_title(await read_json(request))
    edge.refuse_when_full()
    await edge.catch_up.bring_up_to_date()
    renamed = ChatRenamed(chat_id=chat.chat_id, account_id=caller.account_id, title=title)
    event_id = derived_event_id(random_id().hex(), "ChatRenamed")
    await _shown(edge, replace(chat, title=title), await _append(edge, renamed, event_id))
    chat = await edge.chats.read(chat.chat_id) or chat
    return json_answer(chat_json(chat, current_leaf=await current_leaf(edge, chat)))


async def delete_chat(request: Request) -> Response:
    """DELETE /v1/chats/{chat_id}. What is still being answered in it is cancelled."""
    edge, caller = state_of(request), caller_of(request)
    take_change(edge, caller)
    chat = await chat_of(edge, caller, request.path_params["chat_id"])
    # First of all: where the log does not take a cancel, the chat is still there and the request can be repeated.
    for run_id in await _open_runs(edge, chat):
        try:
            await edge.appends.hand_over(
                TOKENS,
                RunCancelled(run_id=run_id, reason=CancelReason.USER),
                event_id=derived_event_id(run_id, "RunCancelled chat deleted"),
            )
        except AppendFailed:
            raise _not_taken() from None
    deleted = ChatDeleted(chat_id=chat.chat_id, account_id=caller.account_id)
    appended = await _append(edge, deleted, derived_event_id(chat.chat_id, "ChatDeleted"))
    await _shown(edge, replace(chat, deleted=True), appended)
    return Response(status_code=204)


async def _open_runs(edge: EdgeState, chat: Chat) -> set[str]:
    """The chat's runs that have not ended: those that this edge holds, and the newest one, which it may not have seen begin.

    Raises Refused (503) where the store does not yet have what was admitted before this edge's start, or LogBehind.
    """
    # Another edge may have shown a run of which neither this one nor the store has read anything yet.
    await edge.catch_up.bring_up_to_date()
    leaf_id = await current_leaf(edge, chat)
    held = edge.runs.runs_of_chat(chat.chat_id)
    found = {run.run_id for run in held if run.transcript.state.open}
    leaf = await edge.history.message(leaf_id) if leaf_id else None
    if leaf is not None and leaf.role is Role.ASSISTANT and leaf.finish_reason is None:
        run = edge.runs.get(leaf.run_id)
        if run is None or not run.transcript.state.ended:
            found.add(leaf.run_id)
    return found


async def chat_of(edge: EdgeState, caller: Caller, chat_id: str) -> Chat:
    """The caller's chat; waits a moment for one whose creation the store does not have yet.

    Raises Refused: 404, or 503 where the store has not read so far that it could know.
    """
    if not edge.owns_chat(chat_id, caller):
        raise not_found("chat")
    chat = await edge.chats.read(chat_id) or await _awaited(edge, chat_id)
    if chat is None or chat.deleted or chat.account_id != caller.account_id:
        raise not_found("chat")
    return chat


async def _awaited(edge: EdgeState, chat_id: str) -> Chat | None:
    """A chat whose id is ours and that the store does not know: another edge may have made it just now. Raises Refused (503)."""
    partition = partition_for_key(chat_id, edge.partitions)
    try:
        end = (await edge.reader.bounds(CHATS, [partition]))[partition].end
    except SpanFailed:
        raise history_behind() from None

    async def look() -> Chat | bool | None:
        through = await edge.history.projected(CHATS.name, partition) >= end
        return await edge.history.chat(chat_id) or through or None

    found = await wait_for_store(look)
    if found is None:
        raise history_behind()
    return found if isinstance(found, Chat) else None


def history_behind() -> Refused:
    """503: what is asked for may be on the log, and the store does not have it yet."""
    return unavailable("The store is behind; come back in a moment.", code="history_behind")


async def current_leaf(edge: EdgeState, chat: Chat) -> str | None:
    """The newest leaf that anybody was shown: the store's, or that of a run which the store does not have yet (I15).

    Raises Refused (503) where the store does not yet have what was admitted before this edge's start.
    """
    partition = partition_for_key(chat.chat_id, edge.partitions)
    if not await edge.gap.closed(partition):
        if not await wait_for_store(lambda: _closed(edge, partition)):
            raise history_behind()
        chat = await edge.chats.read(chat.chat_id) or chat
    runs = edge.runs.runs_of_chat(chat.chat_id)
    queued = runs[-1].transcript.state.queued if runs else None
    if queued is None or queued.assistant_message_id == chat.current_leaf:
        return chat.current_leaf
    if await edge.history.message(queued.assistant_message_id) is None:
        return queued.assistant_message_id
    # The store has that run, so its leaf is at least as new; but `chat` may have been read before.
    again = await edge.history.chat(chat.chat_id)
    return again.current_leaf if again is not None else chat.current_leaf


async def _closed(edge: EdgeState, partition: int) -> bool | None:
    return await edge.gap.closed(partition) or None


async def _check_new(edge: EdgeState, caller: Caller, wanted: NewChat) -> None:
    if wanted.model is not None:
        check_model(edge, caller, wanted.model)
    if wanted.system_prompt:
        counts = await count_prompt(edge, caller, wanted.system_prompt, "", model=wanted.model)
        if not counts:
            raise Refused(replace(CONTEXT_TOO_LONG, param="system_prompt"))


def check_model(edge: EdgeState, caller: Caller, model: str) -> None:
    """Raises Refused for a model that does not exist (400), or that the account's tier does not have (422)."""
    if model not in edge.models:
        raise invalid("There is no such model.", param="model", code="unknown_model")
    if model not in edge.models_of(caller.tier):
        raise unprocessable(
            "This account may not use that model.", param="model", code="model_not_allowed"
        )


async def _append(edge: EdgeState, event: ChatEvent, event_id: str) -> Appended:
    try:
        return await edge.appends.append(
            CHATS, event, event_id=event_id, wait_ms_max=APPEND_WAIT_MS_MAX
        )
    except AppendFailed:
        raise _not_taken() from None


def _not_taken() -> Refused:
    return unavailable(
        "The log did not take this in time; it may or may not have happened.",
        code="log_unavailable",
    )


async def _shown(edge: EdgeState, chat: Chat, appended: Appended) -> None:
    """Wait a moment until the store has the change, else keep it here: a client sees its own writes."""

    async def look() -> bool | None:
        reached = await edge.history.projected(CHATS.name, appended.partition)
        return True if reached > appended.offset else None

    if not await wait_for_store(look):
        edge.chats.changed(chat, appended)
