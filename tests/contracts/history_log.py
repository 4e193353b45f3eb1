"""A small log of chats, admissions and outcomes, as the brokers would have stamped it, for tests of history stores."""

from __future__ import annotations

from dataclasses import dataclass, field

from infra.log.records import LogRecord
from schemas.codec import Envelope
from schemas.events import Event
from schemas.events.admissions import PromptAdmitted, PromptRefused
from schemas.events.chats import ChatCreated, ChatDeleted, ChatRenamed, LeafChosen
from schemas.events.outcomes import RunConcluded
from schemas.topics import ADMISSIONS, CHATS, OUTCOMES, Topic
from schemas.vocabulary import FinishReason, Lane, RefusalReason, Tier

ACCOUNT = "acc-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamped:
    """A record with the topic it lies on; one partition each."""

    topic: Topic
    record: LogRecord


@dataclass(slots=True)
class HistoryLog:
    """Appends with rising times (10 ms apart) and offsets of each topic's own."""

    records: list[Stamped] = field(default_factory=list)
    now_ms: int = 1_000
    ends: dict[str, int] = field(default_factory=dict)

    def append(self, topic: Topic, event: Event) -> Stamped:
        offset = self.ends.get(topic.name, 0)
        self.ends[topic.name] = offset + 1
        self.now_ms += 10
        envelope = Envelope(event=event, event_id=f"{topic.name}/{offset}", cause_id="", trace="")
        stamped = Stamped(topic=topic, record=LogRecord(0, offset, self.now_ms, envelope))
        self.records.append(stamped)
        return stamped

    def created(self, chat: str, *, title: str = "", system_prompt: str = "") -> Stamped:
        return self.append(
            CHATS,
            ChatCreated(chat_id=chat, account_id=ACCOUNT, title=title, system_prompt=system_prompt),
        )

    def renamed(self, chat: str, title: str) -> Stamped:
        return self.append(CHATS, ChatRenamed(chat_id=chat, account_id=ACCOUNT, title=title))

    def deleted(self, chat: str) -> Stamped:
        return self.append(CHATS, ChatDeleted(chat_id=chat, account_id=ACCOUNT))

    def leaf(self, chat: str, message: str) -> Stamped:
        return self.append(CHATS, LeafChosen(chat_id=chat, account_id=ACCOUNT, message_id=message))

    def admitted(
        self, chat: str, turn: str, *, parent: str | None = None, content: str = "hello"
    ) -> Stamped:
        """The prompt of `turn`: messages `<turn>.user` and `<turn>.answer`, run `<turn>.run`."""
        return self.append(
            ADMISSIONS,
            PromptAdmitted(
                run_id=f"{turn}.run",
                account_id=ACCOUNT,
                chat_id=chat,
                tier=Tier.FREE,
                lane=Lane.FREE,
                model="m",
                user_message_id=f"{turn}.user",
                assistant_message_id=f"{turn}.answer",
                parent_id=f"{parent}.answer" if parent else None,
                content=content,
                input_budget_tokens=100,
                granted_output_tokens=100,
                deadline_ms=1_000,
            ),
        )

    def refused(self, chat: str, turn: str) -> Stamped:
        return self.append(
            ADMISSIONS,
            PromptRefused(
                run_id=f"{turn}.run",
                account_id=ACCOUNT,
                chat_id=chat,
                user_message_id=f"{turn}.user",
                assistant_message_id=f"{turn}.answer",
                reason=RefusalReason.TOO_MANY_RUNS,
            ),
        )

    def concluded(
        self,
        chat: str,
        turn: str,
        *,
        text: str = "an answer",
        finish: FinishReason = FinishReason.STOP,
        end_offset: int = 9,
    ) -> Stamped:
        return self.append(
            OUTCOMES,
            RunConcluded(
                run_id=f"{turn}.run",
                account_id=ACCOUNT,
                chat_id=chat,
                user_message_id=f"{turn}.user",
                assistant_message_id=f"{turn}.answer",
                tier=Tier.FREE,
                model="m",
                text=text,
                input_tokens=7,
                output_tokens=3,
                finish_reason=finish,
                attempts=1,
                end_offset=end_offset,
            ),
        )
