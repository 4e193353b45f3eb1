"""chat.chats: what a person did to a chat, keyed by chat."""

from __future__ import annotations

from schemas.events import Event


class ChatCreated(Event, frozen=True, kw_only=True):
    """A chat exists. `model` is the chat's default, None for the tier's default."""

    chat_id: str
    account_id: str
    title: str = ""
    system_prompt: str = ""
    model: str | None = None


class ChatRenamed(Event, frozen=True, kw_only=True):
    """The chat has another title."""

    chat_id: str
    account_id: str
    title: str


class ChatDeleted(Event, frozen=True, kw_only=True):
    """The chat is gone for every reader; later prompts on it fail."""

    chat_id: str
    account_id: str


class LeafChosen(Event, frozen=True, kw_only=True):
    """The chat's current leaf is this message."""

    chat_id: str
    account_id: str
    message_id: str


ChatEvent = ChatCreated | ChatRenamed | ChatDeleted | LeafChosen
