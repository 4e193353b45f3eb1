"""Messages: posting one, which starts a run, and listing the branch that ends in a leaf."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from edge.allowances import rate_limit_headers, take_prompt
from edge.answers import json_answer
from edge.auth import Caller
from edge.bodies import read_json
from edge.branch_reads import read_branch
from edge.catch_up import PastRun
from edge.chat_routes import chat_of, check_model, current_leaf
from edge.decisions.problems import DRAINING, SERVER, Problem, Refused, not_found
from edge.decisions.refusals import CONTEXT_TOO_LONG, IDEMPOTENCY_CONFLICT
from edge.decisions.requests import (
    NewMessage,
    fingerprint,
    read_idempotency_key,
    read_limit,
    read_new_message,
)
from edge.decisions.token_cursor import START
from edge.run_routes import run_location, stream_of
from edge.runs import LiveRun
from edge.state import EdgeState, caller_of, state_of, wait_for_store
from edge.submission import Submission, redirected, submit
from edge.token_counts import count_prompt
from edge.views import answer_of, live_run_json, message_json, past_run_json, with_live_answer
from infra.history import Chat, Message
from schemas.vocabulary import RunStatus


async def post_message(request: Request) -> Response:
    """POST /v1/chats/{chat_id}/messages"""
    edge, caller = state_of(request), caller_of(request)
    chat_id = request.path_params["chat_id"]
    if not edge.owns_chat(chat_id, caller):
        raise not_found("chat")
    body = await read_json(request)
    message = read_new_message(body)
    key = read_idempotency_key(request.headers.get("idempotency-key"))
    if message.model is not None:
        check_model(edge, caller, message.model)
    edge.refuse_when_late()
    edge.refuse_when_full()
    marks = fingerprint(request.url.path, body)
    try:
        take_prompt(edge, caller)
    except Refused:
        run = await _bound_run(edge, caller, chat_id, key, marks)
        if run is None:
            raise
        return await _answer(edge, caller, chat_id, message, run)
    chat = await chat_of(edge, caller, chat_id)
    # The chat's own model may have been taken from the tier since: then admission says so.
    model = message.model or (chat.model if chat.model in edge.models else None)
    counts = await count_prompt(edge, caller, chat.system_prompt, message.content, model=model)
    if not counts:
        raise Refused(CONTEXT_TOO_LONG)
    # A run that another edge has shown to end must not make this message refused as one too many, and is what it follows.
    await edge.catch_up.bring_up_to_date()
    submission = Submission(
        caller=caller,
        chat_id=chat_id,
        parent_id=await _parent(edge, caller, chat, message),
        model=model,
        message=message,
        prompt_tokens=counts,
        idempotency_key=key,
        fingerprint=marks,
    )
    try:
        run = await submit(edge, submission)
    except Refused as refused:
        problem = refused.problem
        headers = {**rate_limit_headers(edge, caller), **problem.headers}
        raise Refused(replace(problem, headers=headers)) from None
    return await _answer(edge, caller, chat_id, message, run)


async def _bound_run(
    edge: EdgeState, caller: Caller, chat_id: str, key: str | None, marks: str
) -> LiveRun | PastRun | None:
    """The run of a key that this edge has read to be bound: a repeat attaches to it also amid a flood, and needs no record for that.

    None where it knows of no such key. Raises Refused: 422 for another request with this key, 404 where the chat is gone, 503.
    """
    bound = edge.accounts.bound(caller.account_id, key) if key is not None else None
    if bound is None:
        return None
    if bound.fingerprint != marks:
        raise Refused(IDEMPOTENCY_CONFLICT)
    await chat_of(edge, caller, chat_id)  # It may have been deleted since.
    return await redirected(edge, bound.run_id)


async def _answer(
    edge: EdgeState, caller: Caller, chat_id: str, message: NewMessage, run: LiveRun | PastRun
) -> Response:
    run_id = run.run_id if isinstance(run, LiveRun) else run.run.run_id
    headers = {
        "turnlog-run-id": run_id,
        "location": run_location(chat_id, run_id),
        **rate_limit_headers(edge, caller),
    }
    if message.background:
        body = live_run_json(run, chat_id) if isinstance(run, LiveRun) else past_run_json(run.run)
        return json_answer(body, status=202, headers=headers)
    if message.stream:
        return stream_of(edge, run, START, headers)
    return json_answer(message_json(await _finished(edge, run)), headers=headers)


async def _finished(edge: EdgeState, run: LiveRun | PastRun) -> Message:
    """The answer, once the run has ended. Raises Refused: 500 when it failed, 503 when this edge drains first."""
    if isinstance(run, PastRun):
        stored = await edge.history.message(run.run.assistant_message_id)
        if stored is None:
            raise not_found("message")
        _refuse_failed(stored.status, run.run.run_id)
        return stored
    while not run.transcript.state.ended:
        if edge.streams.draining:
            raise Refused(replace(DRAINING, extra={"run_id": run.run_id}))  # The run goes on.
        await run.changed()
    state = run.transcript.state
    _refuse_failed(state.status, run.run_id)
    assert state.queued is not None, "admitted"
    message_id = state.queued.assistant_message_id
    # The store's row, where it comes in a moment, so that every read tells the same time of creation.
    stored = await wait_for_store(lambda: edge.history.message(message_id))
    return with_live_answer(stored, run) if stored is not None else answer_of(run)


def _refuse_failed(status: RunStatus, run_id: str) -> None:
    if status is RunStatus.FAILED:
        raise Refused(
            Problem(
                status=500,
                type=SERVER,
                code="generation_failed",
                message="The answer could not be completed.",
                headers={"turnlog-run-id": run_id},
                extra={"run_id": run_id},
            )
        )


async def _parent(edge: EdgeState, caller: Caller, chat: Chat, message: NewMessage) -> str | None:
    """The message that this one follows. Raises Refused (404) where the one given is none of this chat."""
    parent_id = message.parent_id
    if parent_id is None:
        return await current_leaf(edge, chat)
    if not edge.owns_message(parent_id, caller):
        raise not_found("message")
    for run in edge.runs.runs_of_chat(chat.chat_id):
        queued = run.transcript.state.queued
        if queued and parent_id in (queued.assistant_message_id, queued.user_message_id):
            return parent_id
    stored = await wait_for_store(lambda: edge.history.message(parent_id))
    if stored is None or stored.chat_id != chat.chat_id:
        raise not_found("message")
    return parent_id


async def list_messages(request: Request) -> Response:
    """GET /v1/chats/{chat_id}/messages"""
    edge, caller = state_of(request), caller_of(request)
    limit = read_limit(request.query_params.get("limit"))
    chat = await chat_of(edge, caller, request.path_params["chat_id"])
    leaf = request.query_params.get("leaf")
    if leaf is not None and not edge.owns_message(leaf, caller):
        raise not_found("message")
    page = await read_branch(
        edge, chat, leaf=leaf, cursor=request.query_params.get("cursor"), limit=limit
    )
    return json_answer(
        {"data": [message_json(message) for message in page.rows], "next_cursor": page.next_cursor}
    )
