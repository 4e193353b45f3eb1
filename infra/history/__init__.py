"""What may be read of the past: chats, messages, concluded runs. A projection of the log: it can be deleted and rebuilt.

`History` is the promise that the edge and context assembly rely on; `sqlite` keeps it in one file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from schemas.vocabulary import FinishReason, Role, RunStatus

READ_WAIT_MS_MAX: Final = 2_000

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A chat. `updated_ms` is the append time of its newest activity. Deleted chats are kept as rows, so late events stay ignored."""

    chat_id: str
    account_id: str
    title: str
    system_prompt: str
    model: str | None
    created_ms: int
    updated_ms: int
    current_leaf: str | None
    deleted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A user's message or an answer. An answer's `content` is empty until its run has concluded."""

    message_id: str
    chat_id: str
    account_id: str
    parent_id: str | None
    role: Role
    content: str
    status: RunStatus
    finish_reason: FinishReason | None
    run_id: str
    token_count: int | None
    created_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as history knows it: admitted, and perhaps concluded. `end_offset` is the offset of its terminal on the token log."""

    run_id: str
    chat_id: str
    account_id: str
    user_message_id: str
    assistant_message_id: str
    model: str
    status: RunStatus
    finish_reason: FinishReason | None
    input_tokens: int
    output_tokens: int
    attempts: int
    text: str
    end_offset: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[Row]):
    """Rows and the opaque cursor of the next ones, None at the end."""

    rows: Sequence[Row]
    next_cursor: str | None


class BadCursor(ValueError):
    """The cursor was not made by this listing."""


class HistoryUnavailable(TimeoutError):
    """The store did not answer in time, or cannot. The message is one line and holds no row."""


class History(Protocol):
    """Reading. Every call answers within READ_WAIT_MS_MAX or raises TimeoutError; none crosses accounts by itself: callers check ids."""

    async def chat(self, chat_id: str) -> Chat | None:
        """The chat, also a deleted one, or None where nothing of it was projected."""
        ...

    async def chats(self, account_id: str, *, cursor: str | None, limit: int) -> Page[Chat]:
        """Chats that are not deleted, newest activity first. Raises BadCursor."""
        ...

    async def message(self, message_id: str) -> Message | None:
        """One message."""
        ...

    async def branch(
        self, chat_id: str, leaf: str, *, cursor: str | None, limit: int
    ) -> Page[Message]:
        """The messages from the root to `leaf`, oldest first. Raises BadCursor."""
        ...

    async def ancestors(self, message_id: str, *, limit: int) -> Sequence[Message]:
        """`message_id` and its parents, newest first, at most `limit`: what context assembly walks."""
        ...

    async def run(self, run_id: str) -> Run | None:
        """One run."""
        ...

    async def projected(self, topic: str, partition: int) -> int:
        """The offset up to which (exclusive) this partition is in the store; 0 for none."""
        ...
