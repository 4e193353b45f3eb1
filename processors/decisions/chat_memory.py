"""Recently active chats, as the log told of them: enough to walk from a message to the root of its chat.

Everything here is a copy of what the log or the history store holds, so forgetting any of it is harmless: it is read again.

Rules (cited by tests):
  M1  A message is known once its own text is: a user's with its admission, an answer's with the conclusion of its run. Order of
      arrival does not matter, and what is known never changes.
  M2  A message whose prompt was refused never comes: who waits for it is told at once.
  M3  A deleted chat stays deleted, whatever comes after.
  M4  Memory is bounded by chats and by characters, those of the names of refused messages too: the chat longest unused goes first.
  M5  Who was enqueued waits for the answers of all runs that were open in its chat before it, not of the newest alone: that one may be
      cancelled while those before it go on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from processors.decisions.context_window import Said
from schemas.events.admissions import PromptAdmitted, PromptRefused
from schemas.events.chats import ChatCreated, ChatDeleted
from schemas.events.outcomes import RunConcluded
from schemas.vocabulary import Role

CHATS_MAX: Final = 4_000
CHARS_MAX: Final = 32_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """A message and where it hangs."""

    said: Said
    parent_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFacts:
    """What a chat's own events say. `system_prompt` None: its creation is not known."""

    account_id: str
    system_prompt: str | None
    deleted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """The messages from the root to a leaf, oldest first."""

    messages: tuple[Said, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """The walk ends at a message that is not known (yet)."""

    message_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NeverComes:
    """The walk ends at a message that no run will ever make."""

    message_id: str


@dataclass(slots=True)
class _Chat:
    partition: int
    facts: ChatFacts | None = None
    messages: dict[str, Remembered] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    chars: int = 0


class ChatMemory:
    """The memory of one process. Partitions are those of the chat-keyed topics."""

    def __init__(self, *, chats_max: int = CHATS_MAX, chars_max: int = CHARS_MAX) -> None:
        self._chats: OrderedDict[str, _Chat] = OrderedDict()
        self._chats_max = chats_max
        self._chars_max = chars_max
        self._chars = 0

    def __len__(self) -> int:
        return len(self._chats)

    @property
    def chars(self) -> int:
        """Characters of text that are kept."""
        return self._chars

    def learn(
        self,
        event: ChatCreated | ChatDeleted | PromptAdmitted | PromptRefused | RunConcluded,
        partition: int,
    ) -> None:
        """Take in one event of the log, in any order and any number of times."""
        chat = self._touch(event.chat_id, partition)
        match event:
            case ChatCreated():
                deleted = chat.facts is not None and chat.facts.deleted
                self._state(chat, event.account_id, event.system_prompt, deleted=deleted)
            case ChatDeleted():
                prompt = chat.facts.system_prompt if chat.facts is not None else None
                self._state(chat, event.account_id, prompt, deleted=True)
            case PromptAdmitted():
                self._remember(
                    chat, event.user_message_id, Role.USER, event.content, event.parent_id
                )
            case PromptRefused():
                self._refuse(chat, event.user_message_id, event.assistant_message_id)
            case RunConcluded():
                self._remember(
                    chat,
                    event.assistant_message_id,
                    Role.ASSISTANT,
                    event.text,
                    event.user_message_id,
                )
        self._forget_oldest()

    def recall(
        self, chat_id: str, partition: int, facts: ChatFacts | None, messages: Iterable[Remembered]
    ) -> None:
        """Take in what the history store holds of a chat."""
        chat = self._touch(chat_id, partition)
        if facts is not None and facts.system_prompt is not None:
            deleted = facts.deleted or (chat.facts is not None and chat.facts.deleted)
            self._state(chat, facts.account_id, facts.system_prompt, deleted=deleted)
        for message in messages:
            said = message.said
            self._remember(chat, said.message_id, said.role, said.content, message.parent_id)
        self._forget_oldest()

    def facts(self, chat_id: str) -> ChatFacts | None:
        """What is known of the chat itself."""
        chat = self._chats.get(chat_id)
        return chat.facts if chat is not None else None

    def has(self, chat_id: str, message_id: str) -> bool:
        """Whether the message is known: an answer, once its run was concluded (M1)."""
        chat = self._chats.get(chat_id)
        return chat is not None and message_id in chat.messages

    def awaited(self, prompt: PromptAdmitted) -> str | None:
        """M5. An answer that the prompt waits for and that is not known, if any."""
        # Who was admitted before there was a list waits for the newest.
        newest = (prompt.after_message_id,) if prompt.after_message_id is not None else ()
        answers = (*prompt.behind_message_ids, *newest)
        return next((each for each in answers if not self.has(prompt.chat_id, each)), None)

    def branch(self, chat_id: str, leaf: str | None) -> Branch | Missing | NeverComes:
        """Walk from `leaf` to the root."""
        chat = self._chats.get(chat_id)
        walked: list[Said] = []
        at = leaf
        while at is not None:
            if chat is None:
                return Missing(message_id=at)
            message = chat.messages.get(at)
            if message is None:
                if at in chat.refused:
                    return NeverComes(message_id=at)
                return Missing(message_id=at)
            walked.append(message.said)
            if len(walked) > len(chat.messages):
                return NeverComes(message_id=at)  # A circle: no chat of ours makes one.
            at = message.parent_id
        if chat is not None:
            self._chats.move_to_end(chat_id)
        return Branch(messages=tuple(reversed(walked)))

    def forget_partitions(self, partitions: Iterable[int]) -> None:
        """Drop the chats of partitions that are no longer fed."""
        gone = set(partitions)
        for chat_id in [name for name, chat in self._chats.items() if chat.partition in gone]:
            self._drop(chat_id)

    def _touch(self, chat_id: str, partition: int) -> _Chat:
        chat = self._chats.get(chat_id)
        if chat is None:
            chat = self._chats[chat_id] = _Chat(partition=partition)
        self._chats.move_to_end(chat_id)
        return chat

    def _state(
        self, chat: _Chat, account_id: str, system_prompt: str | None, *, deleted: bool
    ) -> None:
        old = chat.facts.system_prompt if chat.facts is not None else None
        self._grow(chat, len(system_prompt or "") - len(old or ""))
        chat.facts = ChatFacts(account_id=account_id, system_prompt=system_prompt, deleted=deleted)

    def _remember(
        self, chat: _Chat, message_id: str, role: Role, content: str, parent_id: str | None
    ) -> None:
        if message_id not in chat.messages:
            said = Said(message_id=message_id, role=role, content=content)
            chat.messages[message_id] = Remembered(said=said, parent_id=parent_id)
            self._grow(chat, len(content))

    def _refuse(self, chat: _Chat, *message_ids: str) -> None:
        for message_id in message_ids:
            if message_id not in chat.refused:
                chat.refused.add(message_id)
                self._grow(chat, len(message_id))

    def _grow(self, chat: _Chat, chars: int) -> None:
        chat.chars += chars
        self._chars += chars

    def _forget_oldest(self) -> None:
        """M4. The chat just touched stays, however large."""
        while len(self._chats) > 1 and (
            len(self._chats) > self._chats_max or self._chars > self._chars_max
        ):
            self._drop(next(iter(self._chats)))

    def _drop(self, chat_id: str) -> None:
        self._chars -= self._chats.pop(chat_id).chars
