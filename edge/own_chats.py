"""What this edge has changed in chats itself, laid over the store until the store has it: a client sees its own writes (I15).

Soft and bounded: an edge that starts anew has none of it, and the projection brings the same.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Final

from infra.history import Chat, History
from producers.log_writer import Appended
from schemas.topics import CHATS

OWN_CHATS_MAX: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """The chat as this edge's newest change left it, and where that lies on the log."""

    chat: Chat
    at: Appended


class OwnChats:
    """Chats as the store has them, and over them the changes of this edge."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._changes: OrderedDict[str, _Change] = OrderedDict()

    def changed(self, chat: Chat, at: Appended) -> None:
        """This edge made, renamed or deleted the chat."""
        chat = replace(chat, updated_ms=max(chat.updated_ms, at.appended_ms))
        self._changes[chat.chat_id] = _Change(chat=chat, at=at)
        self._changes.move_to_end(chat.chat_id)
        if len(self._changes) > OWN_CHATS_MAX:
            self._changes.popitem(last=False)

    async def read(self, chat_id: str) -> Chat | None:
        """The chat, also a deleted one. Raises HistoryUnavailable."""
        change = await self._unprojected(
            chat_id
        )  # Before the store is read: what it lacks then may come meanwhile.
        stored = await self._history.chat(chat_id)
        return _laid_over(stored, change) if change is not None else stored

    async def lay_over(self, stored: Chat) -> Chat:
        """A chat that was read from the store just now, with what this edge knows better."""
        change = await self._unprojected(stored.chat_id)
        return _laid_over(stored, change) if change is not None else stored

    async def unlisted(self, account_id: str) -> list[Chat]:
        """The account's chats that the store does not have at all yet."""
        found = []
        for change in list(self._changes.values()):
            chat = change.chat
            if chat.account_id == account_id and not chat.deleted:
                if await self._unprojected(chat.chat_id) is None:
                    continue
                if await self._history.chat(chat.chat_id) is None:
                    found.append(chat)
        return found

    async def _unprojected(self, chat_id: str) -> _Change | None:
        change = self._changes.get(chat_id)
        if change is None:
            return None
        if await self._history.projected(CHATS.name, change.at.partition) <= change.at.offset:
            return change
        if self._changes.get(chat_id) is change:
            del self._changes[chat_id]
        return None


def _laid_over(stored: Chat | None, change: _Change) -> Chat:
    if stored is None:
        return change.chat
    return replace(
        stored,
        title=change.chat.title,
        updated_ms=max(stored.updated_ms, change.chat.updated_ms),
        deleted=stored.deleted or change.chat.deleted,
    )
