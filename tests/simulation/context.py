"""Context's shell in the simulator: admissions become requests, in any order, acknowledged in order.

What it writes may differ when it is written again: here the prompt's ids are drawn anew each time, and sometimes it fails where it
did not fail before (or the other way round).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, cast

from processors.decisions.chat_memory import (
    Branch,
    ChatMemory,
    Missing,
    NeverComes,
    Remembered,
)
from processors.decisions.context_window import Said
from schemas.events.admissions import PromptAdmitted, PromptRefused
from schemas.events.chats import ChatCreated
from schemas.events.generations import GenerationRequested
from schemas.events.outcomes import RunConcluded
from schemas.events.tokens import RunEnded
from schemas.ids import derived_event_id, run_address
from schemas.topics import ADMISSIONS, CHATS, OUTCOMES, TOKENS, Topic, generations
from schemas.vocabulary import EndCause, EndWriter, Role
from tests.simulation.log import Group, Record
from tests.simulation.process import Member
from tests.simulation.world import MODEL, Send, World

PARKED_MS_MAX: Final = 10_000


@dataclass(slots=True)
class _Work:
    """An admission in work. `sent` None: parked, its ancestors are not known yet."""

    offset: int
    prompt: PromptAdmitted | None
    event_id: str
    since_ms: int
    sent: Send | None = None
    parked: bool = False

    @property
    def done(self) -> bool:
        return self.prompt is None or (self.sent is not None and self.sent.acked)


@dataclass(slots=True)
class _Owned:
    number: int
    position: int
    facts: dict[str, int] = field(default_factory=dict)
    work: deque[_Work] = field(default_factory=deque)


class Context(Member[int]):
    """One process of the group on admissions, outcomes and chats."""

    def __init__(self, world: World, group: Group[int]) -> None:
        super().__init__(world, "context", group)
        self._partitions: dict[int, _Owned] = {}
        self._memory = ChatMemory(chats_max=2)
        self.actions += [self.learn, self.take, self.assemble, self.commit]

    def assigned(self, before: list[int]) -> None:
        self._memory.forget_partitions(before)
        self._partitions = {
            number: _Owned(number=number, position=self.start_of(number)) for number in self.owned
        }

    def learn(self) -> bool:
        """Chats and outcomes. What lies before a restart comes from history, when somebody asks for it."""
        did = False
        for owned in self._partitions.values():
            for topic in (CHATS, OUTCOMES):
                records = self.world.log.partition(topic, owned.number).records
                at = owned.facts.setdefault(topic.name, len(records))
                for record in records[at:]:
                    event = record.event
                    if isinstance(event, ChatCreated | RunConcluded):
                        self._memory.learn(event, owned.number)
                    did = True
                owned.facts[topic.name] = len(records)
        return did

    def take(self) -> bool:
        """Take the next admission of each partition into work."""
        did = False
        for owned in self._partitions.values():
            records = self.world.log.partition(ADMISSIONS, owned.number).records
            if owned.position >= len(records):
                continue
            did = True
            record = records[owned.position]
            owned.position += 1
            event = record.event
            assert isinstance(event, PromptAdmitted | PromptRefused), "the topic's events"
            self._memory.learn(event, owned.number)
            prompt = event if isinstance(event, PromptAdmitted) else None
            owned.work.append(
                _Work(record.offset, prompt, record.event_id, since_ms=self.world.now_ms)
            )
        return did

    def assemble(self) -> bool:
        """Write what is ready to be written."""
        did = False
        for owned in self._partitions.values():
            for work in owned.work:
                if work.prompt is not None and work.sent is None:
                    did = self._answer(owned.number, work, work.prompt) or did
        return did

    def _answer(self, number: int, work: _Work, prompt: PromptAdmitted) -> bool:
        found = self._look(prompt)
        if isinstance(found, Missing):
            if self.world.chance(0.5):
                self._recall(number, prompt, found)
                found = self._look(prompt)
            if isinstance(found, Missing) and self._waits(work, prompt):
                return False
        if found is None:
            work.prompt = None
            self.world.sometimes["ended while it waited"] += 1
            return True
        failed = not isinstance(found, Branch) or self.world.chance(0.04)
        topic: Topic
        event: GenerationRequested | RunEnded
        if failed:
            topic, event = TOKENS, _failure(prompt.run_id)
        else:
            topic, event = generations(MODEL, prompt.lane), self._request(prompt)
        work.sent = self.producer.send(
            topic,
            run_address(prompt.run_id).partition,
            event,
            event_id=derived_event_id(work.event_id, type(event).__name__),
            cause_id=work.event_id,
        )
        return True

    def _waits(self, work: _Work, prompt: PromptAdmitted) -> bool:
        if not work.parked:
            work.parked = True
            self.world.sometimes["prompt parked"] += 1
        behind = prompt.after_run_id is not None
        parked_ms_max = prompt.deadline_ms if behind else PARKED_MS_MAX
        return self.world.now_ms - work.since_ms <= parked_ms_max

    def _look(self, prompt: PromptAdmitted) -> Branch | Missing | NeverComes | None:
        """None: the run ended while its prompt waited."""
        facts = self._memory.facts(prompt.chat_id)
        if facts is None or facts.system_prompt is None:
            return Missing(message_id=prompt.chat_id)
        if prompt.after_run_id is not None:
            if self._memory.has(prompt.chat_id, prompt.assistant_message_id):
                return None
            if (awaited := self._memory.awaited(prompt)) is not None:
                return Missing(message_id=awaited)
        return self._memory.branch(prompt.chat_id, prompt.parent_id)

    def _recall(self, number: int, prompt: PromptAdmitted, missing: Missing) -> None:
        """Read the history store, which holds what was projected: here at once."""
        log = self.world.log
        if missing.message_id == prompt.chat_id:
            for record in log.partition(CHATS, number).records:
                if cast("ChatCreated", record.event).chat_id == prompt.chat_id:
                    self._memory.learn(cast("ChatCreated", record.event), number)
            return
        messages = [
            remembered
            for topic in (ADMISSIONS, OUTCOMES)
            for record in log.partition(topic, number).records
            if (remembered := _remembered(record, prompt.chat_id)) is not None
        ]
        if messages:
            self.world.sometimes["history recalled"] += 1
            self._memory.recall(prompt.chat_id, number, None, messages)

    def _request(self, prompt: PromptAdmitted) -> GenerationRequested:
        rng = self.world.rng
        length = rng.randint(1, prompt.input_budget_tokens) if prompt.input_budget_tokens else 0
        return GenerationRequested(
            run_id=prompt.run_id,
            account_id=prompt.account_id,
            chat_id=prompt.chat_id,
            tier=prompt.tier,
            lane=prompt.lane,
            model=prompt.model,
            prompt_ids=tuple(rng.randint(0, 99) for _ in range(length)),
            granted_output_tokens=prompt.granted_output_tokens,
            cache_scope=prompt.account_id,
            deadline_ms=prompt.deadline_ms,
            quota_limited=prompt.quota_limited,
        )

    def commit(self) -> bool:
        """Acknowledge in order what is done."""
        did = False
        for owned in self._partitions.values():
            upto = None
            while owned.work and owned.work[0].done:
                upto = owned.work.popleft().offset + 1
            if upto is not None:
                self.group.commit(self.name, self.generation, {owned.number: upto})
                did = True
        return did


def _failure(run_id: str) -> RunEnded:
    return RunEnded(run_id=run_id, cause=EndCause.ERROR, writer=EndWriter.CONTEXT)


def _remembered(record: Record, chat_id: str) -> Remembered | None:
    event = record.event
    match event:
        case PromptAdmitted(chat_id=chat) if chat == chat_id:
            said = Said(message_id=event.user_message_id, role=Role.USER, content=event.content)
            return Remembered(said=said, parent_id=event.parent_id)
        case RunConcluded(chat_id=chat) if chat == chat_id:
            said = Said(message_id=event.assistant_message_id, role=Role.ASSISTANT, content="")
            return Remembered(said=said, parent_id=event.user_message_id)
        case _:
            return None
