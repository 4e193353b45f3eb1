"""Chats, messages and runs as clients read them; and what a live run knows laid over what the store has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edge.decisions.refusals import rfc3339
from edge.runs import LiveRun
from infra.history import Chat, Message, Run
from schemas.events.admissions import PromptAdmitted
from schemas.run_fold import RunState
from schemas.vocabulary import Role, RunStatus

Json = dict[str, object]


def chat_json(chat: Chat, *, current_leaf: str | None) -> Json:
    """A chat."""
    return {
        "id": chat.chat_id,
        "title": chat.title,
        "model": chat.model,
        "created_at": rfc3339(chat.created_ms),
        "updated_at": rfc3339(chat.updated_ms),
        "current_leaf": current_leaf,
    }


def message_json(message: Message) -> Json:
    """A message."""
    return {
        "id": message.message_id,
        "chat_id": message.chat_id,
        "parent_id": message.parent_id,
        "role": message.role.value,
        "content": message.content,
        "status": message.status.value,
        "finish_reason": message.finish_reason.value if message.finish_reason else None,
        "run_id": message.run_id,
        "token_count": message.token_count,
        "created_at": rfc3339(message.created_ms),
    }


def live_run_json(run: LiveRun, chat_id: str) -> Json:
    """A run as the token log has it so far."""
    state = run.transcript.state
    queued = state.queued
    return {
        "id": run.run_id,
        "chat_id": chat_id,
        "message_id": queued.assistant_message_id if queued else None,
        "status": state.status.value,
        "finish_reason": state.finish_reason.value if state.finish_reason else None,
        "model": queued.model if queued else None,
        "attempt": state.attempt,
        "usage": usage_json(state),
        "text": state.text,
    }


def past_run_json(run: Run) -> Json:
    """A run as history has it."""
    refused = run.status is RunStatus.REFUSED
    return {
        "id": run.run_id,
        "chat_id": run.chat_id,
        "message_id": None if refused else run.assistant_message_id,
        "status": run.status.value,
        "finish_reason": run.finish_reason.value if run.finish_reason else None,
        "model": run.model or None,
        "attempt": run.attempts,
        "usage": {"input_tokens": run.input_tokens, "output_tokens": run.output_tokens},
        "text": run.text,
    }


def usage_json(state: RunState) -> Json:
    """Tokens so far."""
    return {"input_tokens": state.input_tokens or 0, "output_tokens": state.n}


def with_live_answer(message: Message, run: LiveRun) -> Message:
    """The answer of a run as the token log has it so far: never behind what its viewers were shown."""
    state = run.transcript.state
    return replace(
        message,
        content=state.text,
        status=state.status,
        finish_reason=state.finish_reason,
        token_count=state.n,
    )


def answer_of(run: LiveRun) -> Message:
    """The answer of a run that the store does not have yet."""
    queued = run.transcript.state.queued
    assert queued is not None, "only an admitted run has an answer"
    blank = Message(
        message_id=queued.assistant_message_id,
        chat_id=queued.chat_id,
        account_id=queued.account_id,
        parent_id=queued.user_message_id,
        role=Role.ASSISTANT,
        content="",
        status=RunStatus.QUEUED,
        finish_reason=None,
        run_id=run.run_id,
        token_count=None,
        created_ms=run.transcript.queued_ms,
    )
    return with_live_answer(blank, run)


def question_of(admitted: PromptAdmitted, appended_ms: int) -> Message:
    """The user's message of a run that the store does not have yet."""
    return Message(
        message_id=admitted.user_message_id,
        chat_id=admitted.chat_id,
        account_id=admitted.account_id,
        parent_id=admitted.parent_id,
        role=Role.USER,
        content=admitted.content,
        status=RunStatus.DONE,
        finish_reason=None,
        run_id=admitted.run_id,
        token_count=None,
        created_ms=appended_ms,
    )


def laid_over(messages: Sequence[Message], runs: Sequence[LiveRun]) -> list[Message]:
    """The store's messages, with the answers of these runs as the token log has them."""
    by_answer = {
        run.transcript.state.queued.assistant_message_id: run
        for run in runs
        if run.transcript.state.queued is not None
    }
    return [
        with_live_answer(message, by_answer[message.message_id])
        if message.message_id in by_answer
        else message
        for message in messages
    ]
