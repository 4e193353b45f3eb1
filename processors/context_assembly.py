"""From an admitted prompt to a request for an engine: find the branch, have it encoded, append the request.

Chats come from memory, else from the history store; so there is no state to lose. A prompt whose chat or ancestors are not known yet is
parked for a bounded time: it stays unacknowledged and holds up nobody else. One that was enqueued waits so for the end of the run
before it, whose answer is known then, until its own deadline: nobody can start it earlier. What is written may differ when it is
written again (a replay): harmless, because workers take the lowest offset of a run.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, assert_never

from infra.history import History, HistoryUnavailable, Message
from infra.log.records import BadRecord, LogRecord
from infra.models import PromptModel
from processors.ack_order import AckOrder, TooManyAside
from processors.decisions.chat_memory import (
    Branch,
    ChatFacts,
    ChatMemory,
    Missing,
    NeverComes,
    Remembered,
)
from processors.decisions.context_window import Said, Turn, turns_of
from processors.faust_process import bad_record, log_bad, or_die, park_bad
from processors.prompt_encoder import PromptEncoder, UnencodablePrompt
from producers.log_writer import LogWriter
from schemas.events.admissions import PromptAdmitted, PromptRefused
from schemas.events.chats import ChatCreated, ChatDeleted
from schemas.events.generations import GenerationRequested
from schemas.events.outcomes import RunConcluded
from schemas.events.tokens import RunEnded
from schemas.ids import BadId, derived_event_id, run_address
from schemas.topics import ADMISSIONS, CHATS, OUTCOMES, TOKENS, Topic, generations
from schemas.vocabulary import EndCause, EndWriter, Role, RunStatus

log = logging.getLogger(__name__)

PARKED_MS_MAX: Final = 10_000
# The store is asked again at doubling intervals; what the log tells meanwhile counts at once.
LOOK_AGAIN_MS_MIN: Final = 50
LOOK_AGAIN_MS_MAX: Final = 800
# Who waits for a run to end waits for the log to tell it; the store is asked only in case it was told long ago.
LOOK_AGAIN_BEHIND_MS_MAX: Final = 5_000
END_AGAIN_MS: Final = 2_000
ANCESTORS_MAX: Final = 20_000

CONCLUDED: Final = frozenset(
    {RunStatus.DONE, RunStatus.CANCELLED, RunStatus.FAILED, RunStatus.BLOCKED}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """All that a prompt needs to be assembled."""

    system_prompt: str
    turns: list[Turn]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Over:
    """The run ended while its prompt waited: nobody needs a request any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    """The prompt can never be assembled. `detail` is for operators."""

    detail: str


class ContextAssembly:
    """Takes the records of admissions, outcomes and chats."""

    def __init__(
        self,
        *,
        writer: LogWriter,
        history: History,
        models: Mapping[str, PromptModel],
        cache_key: bytes,
        tasks: asyncio.TaskGroup,
        acknowledge: Callable[[Any], None],
    ) -> None:
        self._writer = writer
        self._history = history
        self._encoder = PromptEncoder(models)
        self._cache_key = cache_key
        self._tasks = tasks
        self._acknowledge = acknowledge
        self._prompts = AckOrder(acknowledge)
        self._memory = ChatMemory()
        self._parked: dict[str, set[asyncio.Event]] = {}

    def revoked(self, partitions: set[int]) -> None:
        """Forget what belongs to these partitions; their next owner does it again."""
        self._prompts.forget(partitions)
        self._memory.forget_partitions(partitions)

    # Records

    async def take_chat(self, message: Any, record: LogRecord | BadRecord) -> None:
        """A record of chat.chats."""
        await self._take_fact(CHATS, message, record)

    async def take_outcome(self, message: Any, record: LogRecord | BadRecord) -> None:
        """A record of chat.outcomes."""
        await self._take_fact(OUTCOMES, message, record)

    async def _take_fact(self, topic: Topic, message: Any, record: LogRecord | BadRecord) -> None:
        if isinstance(record, BadRecord):
            log_bad(topic, record)  # The projector parks it.
        else:
            self._learn(record)
        self._acknowledge(message)

    async def take_admission(self, message: Any, record: LogRecord | BadRecord) -> None:
        """A record of chat.admissions: an admitted prompt goes into work, beside all others."""
        await self._prompts.room()
        if isinstance(record, BadRecord):
            log_bad(ADMISSIONS, record)  # The projector parks it.
            self._prompts.add(message)
            return
        if (bad := await self._misplaced(message, record)) is not None:
            await park_bad(self._writer, ADMISSIONS, bad)
            self._prompts.add(message)
            return
        self._learn(record)
        work = None
        if isinstance(record.event, PromptAdmitted):
            answering = self._answer(record, record.event)
            work = self._tasks.create_task(or_die("a prompt could not be assembled", answering))
        self._prompts.add(message, work)

    async def _misplaced(self, message: Any, record: LogRecord) -> BadRecord | None:
        """An admission whose run has no place is as bad as one that cannot be decoded, and only seen here."""
        reason = ""
        try:
            run_id: str = record.event.run_id  # type: ignore[attr-defined]
            if run_address(run_id).partition >= await self._writer.partitions_of(TOKENS):
                reason = "the run's partition does not exist"
        except BadId:
            reason = "the run id is none"
        return bad_record(message, record, reason) if reason else None

    def _learn(self, record: LogRecord) -> None:
        match record.event:
            case (
                ChatCreated()
                | ChatDeleted()
                | PromptAdmitted()
                | PromptRefused()
                | RunConcluded() as event
            ):
                self._memory.learn(event, record.partition)
                for waiting in self._parked.get(event.chat_id, ()):
                    waiting.set()
            case _:
                pass  # Titles and leaves do not enter a prompt.

    # One prompt

    async def _answer(self, record: LogRecord, prompt: PromptAdmitted) -> None:
        found = await self._find(record.partition, prompt)
        outcome = await self._assemble(prompt, found) if isinstance(found, _Found) else found
        match outcome:
            case GenerationRequested():
                await self._append(generations(prompt.model, prompt.lane), outcome, record)
            case _Failed(detail=detail):
                log.warning("failed run=%s: %s", prompt.run_id, detail)
                ended = RunEnded(
                    run_id=prompt.run_id,
                    cause=EndCause.ERROR,
                    writer=EndWriter.CONTEXT,
                    detail=detail,
                )
                await self._append(TOKENS, ended, record)
                # Admission sends RunQueued and PromptAdmitted to two partitions without waiting. Where this end was on the log
                # before RunQueued it did not count (R8), and the run would wait for its deadline: so it is said again.
                await asyncio.sleep(END_AGAIN_MS / 1000)
                await self._append(TOKENS, ended, record)
            case _Over():
                pass
            case _:
                assert_never(outcome)

    async def _append(
        self, topic: Topic, event: GenerationRequested | RunEnded, record: LogRecord
    ) -> None:
        cause_id = record.envelope.event_id
        await self._writer.append(
            topic,
            event,
            event_id=derived_event_id(cause_id, type(event).__name__),
            cause_id=cause_id,
            trace=record.envelope.trace,
        )

    async def _find(self, partition: int, prompt: PromptAdmitted) -> _Found | _Failed | _Over:
        """Look in memory and history until everything is known: PARKED_MS_MAX at most, behind another run until the deadline."""
        found = self._look(prompt)
        if not isinstance(found, Missing):
            return found
        if prompt.after_run_id is None:
            return await self._park(
                partition, prompt, found, parked_ms_max=PARKED_MS_MAX, look_ms_max=LOOK_AGAIN_MS_MAX
            )
        try:
            with self._prompts.set_aside():
                return await self._park(
                    partition,
                    prompt,
                    found,
                    parked_ms_max=prompt.deadline_ms,
                    look_ms_max=LOOK_AGAIN_BEHIND_MS_MAX,
                )
        except TooManyAside:
            return _Failed(detail="too many prompts wait for other runs")

    async def _park(
        self,
        partition: int,
        prompt: PromptAdmitted,
        found: Missing | _Found | _Failed | _Over,
        *,
        parked_ms_max: int,
        look_ms_max: int,
    ) -> _Found | _Failed | _Over:
        changed = asyncio.Event()
        waiting = self._parked.setdefault(prompt.chat_id, set())
        waiting.add(changed)
        try:
            deadline = time.monotonic() + parked_ms_max / 1000
            wait_ms = LOOK_AGAIN_MS_MIN
            while isinstance(found, Missing):
                if time.monotonic() > deadline:
                    return _Failed(detail=f"not known in time: {found.message_id}")
                await self._recall(partition, prompt, found)
                found = self._look(prompt)
                if isinstance(found, Missing):
                    await _either(changed, wait_ms)
                    wait_ms = min(2 * wait_ms, look_ms_max)
                    found = self._look(prompt)
            return found
        finally:
            waiting.discard(changed)
            if not waiting:
                self._parked.pop(prompt.chat_id, None)

    def _look(self, prompt: PromptAdmitted) -> _Found | _Failed | _Over | Missing:
        facts = self._memory.facts(prompt.chat_id)
        if facts is not None and facts.deleted:
            return _Failed(detail="the chat is deleted")
        if facts is None or facts.system_prompt is None:
            return Missing(message_id=prompt.chat_id)
        if facts.account_id != prompt.account_id:
            return _Failed(detail="the chat belongs to another account")
        if prompt.after_run_id is not None:
            if self._memory.has(prompt.chat_id, prompt.assistant_message_id):
                return _Over()
            if (awaited := self._memory.awaited(prompt)) is not None:
                return Missing(message_id=awaited)
        branch = self._memory.branch(prompt.chat_id, prompt.parent_id)
        match branch:
            case Branch():
                return _Found(system_prompt=facts.system_prompt, turns=turns_of(branch.messages))
            case Missing():
                return branch
            case NeverComes():
                return _Failed(detail=f"an ancestor never comes: {branch.message_id}")
            case _:
                assert_never(branch)

    async def _recall(self, partition: int, prompt: PromptAdmitted, missing: Missing) -> None:
        """Take what the history store holds of this chat into memory."""
        facts, messages = None, []
        try:
            if missing.message_id == prompt.chat_id:
                chat = await self._history.chat(prompt.chat_id)
                if chat is not None:
                    facts = ChatFacts(
                        account_id=chat.account_id,
                        system_prompt=chat.system_prompt,
                        deleted=chat.deleted,
                    )
            else:
                found = await self._history.ancestors(missing.message_id, limit=ANCESTORS_MAX)
                messages = [
                    _remembered(each)
                    for each in found
                    if each.chat_id == prompt.chat_id and _whole(each)
                ]
        except HistoryUnavailable as error:
            log.warning("history: %s", error)
        if facts is not None or messages:
            self._memory.recall(prompt.chat_id, partition, facts, messages)

    async def _assemble(
        self, prompt: PromptAdmitted, found: _Found
    ) -> GenerationRequested | _Failed:
        try:
            ids = await self._encoder.prompt_ids(prompt, found.system_prompt, found.turns)
        except UnencodablePrompt as error:
            return _Failed(detail=str(error))
        return GenerationRequested(
            run_id=prompt.run_id,
            account_id=prompt.account_id,
            chat_id=prompt.chat_id,
            tier=prompt.tier,
            lane=prompt.lane,
            model=prompt.model,
            prompt_ids=ids,
            sampling=prompt.sampling,
            stop=prompt.stop,
            granted_output_tokens=prompt.granted_output_tokens,
            cache_scope=hmac.digest(self._cache_key, prompt.account_id.encode(), "sha256").hex(),
            deadline_ms=prompt.deadline_ms,
            quota_limited=prompt.quota_limited,
        )


async def _either(changed: asyncio.Event, wait_ms: int) -> None:
    """Until something was learnt of the chat, or time to ask the history store again."""
    try:
        async with asyncio.timeout(wait_ms / 1000):
            await changed.wait()
    except TimeoutError:
        return
    changed.clear()


def _whole(message: Message) -> bool:
    return message.role is Role.USER or message.status in CONCLUDED


def _remembered(message: Message) -> Remembered:
    said = Said(message_id=message.message_id, role=message.role, content=message.content)
    return Remembered(said=said, parent_id=message.parent_id)
