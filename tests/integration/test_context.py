"""Context assembly over a real broker: one request for each admitted prompt, with what was said before, and never a wrong one."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import msgspec
import pytest

from infra.command.topics import apply_topics
from infra.history.sqlite import HISTORY_FILE
from infra.history.sqlite_writer import HistoryWriter
from infra.log.records import LogRecord
from infra.models import MODELS, ChatMessage, PromptModel, load_model
from infra.secrets import load_secrets
from processors.context_assembly import PARKED_MS_MAX
from producers.log_writer import acknowledged
from schemas.codec import Envelope
from schemas.events import Event
from schemas.events.admissions import PromptAdmitted, PromptRefused
from schemas.events.chats import ChatCreated, ChatDeleted
from schemas.events.generations import GenerationRequested
from schemas.events.outcomes import RunConcluded
from schemas.events.tokens import RunEnded
from schemas.ids import RANDOM_BYTES, RunAddress, mint_run_id, partition_for_key
from schemas.topics import ADMISSIONS, CHATS, OUTCOMES, TOKENS, generations
from schemas.vocabulary import EndCause, EndWriter, FinishReason, Lane, RefusalReason, Role, Tier
from tests.integration.recording import ACCOUNT, ID_KEY, PARTITIONS, STEADY, Log, PartProcess
from tests.integration.running import RunningBroker
from tests.integration.waiting import eventually_async

CONTEXT: Final = "processors.context_app"
MODEL: Final = next(iter(MODELS))
REQUESTS: Final = generations(MODEL, Lane.PLUS)
PROMPTS: Final = 200
# A prompt that is parked stays so, however long the test takes.
PATIENT: Final = {"processors.context_assembly.PARKED_MS_MAX": 600_000}
# The log's clock and that of the process that waits.
CLOCKS_APART_MS: Final = 500


@cache
def model() -> PromptModel:
    return load_model(MODEL)


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker for this module: its context process must meet no other test's prompts."""
    running = RunningBroker(tmp_path_factory.mktemp("broker"))
    running.start()
    asyncio.run(apply_topics(running.bootstrap, models=tuple(MODELS), partitions=PARTITIONS))
    yield running.bootstrap
    running.end()


@pytest.fixture
async def log(bootstrap: str) -> AsyncIterator[Log]:
    opened = await Log.open(bootstrap)
    yield opened
    await opened.close()


def new_chat(system_prompt: str = "Be brief.") -> ChatCreated:
    return ChatCreated(
        chat_id=f"chat-{secrets.token_hex(6)}", account_id=ACCOUNT, system_prompt=system_prompt
    )


def admitted(
    chat_id: str, content: str, *, parent: str | None = None, **changes: object
) -> PromptAdmitted:
    name = secrets.token_hex(6)
    made = PromptAdmitted(
        run_id=mint_run_id(
            key=ID_KEY,
            account_id=ACCOUNT,
            address=RunAddress(epoch=1, partition=secrets.randbelow(PARTITIONS), mint_offset=0),
            random=secrets.token_bytes(RANDOM_BYTES),
        ),
        account_id=ACCOUNT,
        chat_id=chat_id,
        tier=Tier.PLUS,
        lane=Lane.PLUS,
        model=MODEL,
        user_message_id=f"u-{name}",
        assistant_message_id=f"a-{name}",
        parent_id=parent,
        content=content,
        input_budget_tokens=1_000,
        granted_output_tokens=100,
        deadline_ms=600_000,
    )
    return msgspec.structs.replace(made, **changes)


def concluded(
    prompt: PromptAdmitted, text: str, reason: FinishReason = FinishReason.STOP
) -> RunConcluded:
    return RunConcluded(
        run_id=prompt.run_id,
        account_id=ACCOUNT,
        chat_id=prompt.chat_id,
        user_message_id=prompt.user_message_id,
        assistant_message_id=prompt.assistant_message_id,
        tier=prompt.tier,
        model=prompt.model,
        text=text,
        input_tokens=1,
        output_tokens=1,
        finish_reason=reason,
        attempts=1,
        end_offset=1,
    )


def ids_of(system_prompt: str, *said: str) -> tuple[int, ...]:
    """The prompt of these messages, which alternate and begin and end with the user."""
    roles = (Role.USER, Role.ASSISTANT)
    messages = [
        ChatMessage(role=Role.SYSTEM, content=system_prompt or model().system_prompt_default)
    ]
    messages += [ChatMessage(role=roles[i % 2], content=text) for i, text in enumerate(said)]
    return model().prompt_ids(messages)


async def outcomes_of(log: Log) -> dict[str, list[GenerationRequested | RunEnded]]:
    """What context made of each run; copies included."""
    found: dict[str, list[GenerationRequested | RunEnded]] = {}
    for topic in (REQUESTS, TOKENS):
        for copies in (await log.events(topic)).values():
            for event in copies:
                assert isinstance(event, GenerationRequested | RunEnded)
                found.setdefault(event.run_id, []).append(event)
    return found


async def outcome(log: Log, prompt: PromptAdmitted) -> GenerationRequested | RunEnded:
    async def made() -> GenerationRequested | RunEnded | None:
        found = (await outcomes_of(log)).get(prompt.run_id, [])
        return found[0] if found else None

    return await eventually_async(made, what=f"{prompt.run_id} is answered")


async def request(log: Log, prompt: PromptAdmitted) -> GenerationRequested:
    made = await outcome(log, prompt)
    assert isinstance(made, GenerationRequested), made
    return made


async def failure(log: Log, prompt: PromptAdmitted) -> str:
    made = await outcome(log, prompt)
    assert isinstance(made, RunEnded), made
    assert (made.cause, made.writer) == (EndCause.ERROR, EndWriter.CONTEXT)
    return made.detail


async def asked_and_ended_ms(log: Log, prompt: PromptAdmitted) -> tuple[int, int]:
    """When the prompt and its end were appended."""
    found = [
        record.appended_ms
        for topic in (ADMISSIONS, TOKENS)
        for record in await log.read(topic)
        if isinstance(record, LogRecord)
        and isinstance(record.event, PromptAdmitted | RunEnded)
        and record.event.run_id == prompt.run_id
    ]
    asked_ms, ended_ms, *_ = found  # An end is said twice.
    return asked_ms, ended_ms


async def test_earlier_turns_are_carried_into_the_next_prompt(
    log: Log, bootstrap: str, tmp_path: Path
) -> None:
    with PartProcess(
        CONTEXT, tmp_path, bootstrap=bootstrap, variables=STEADY, limits=PATIENT
    ) as context:
        context.wait_ready()
        chat = new_chat()
        await log.append(CHATS, chat)
        first = admitted(chat.chat_id, "one")
        await log.append(ADMISSIONS, first)
        made = await request(log, first)
        assert made.prompt_ids == ids_of("Be brief.", "one")
        assert (made.granted_output_tokens, made.deadline_ms) == (100, 600_000)
        assert ACCOUNT not in made.cache_scope
        assert load_secrets(tmp_path).cache_key.hex() not in made.cache_scope
        await log.append(OUTCOMES, concluded(first, "ONE"))
        # Cut short, so with the text it has; then one that never said anything and is left out.
        second = admitted(chat.chat_id, "two", parent=first.assistant_message_id)
        await log.append(ADMISSIONS, second)
        await log.append(OUTCOMES, concluded(second, "TW", FinishReason.CANCELLED))
        mute = admitted(chat.chat_id, "mute", parent=second.assistant_message_id)
        await log.append(ADMISSIONS, mute)
        await log.append(OUTCOMES, concluded(mute, "", FinishReason.ERROR))
        third = admitted(chat.chat_id, "three", parent=mute.assistant_message_id)
        await log.append(ADMISSIONS, third)
        expected = ids_of("Be brief.", "one", "ONE", "two", "TW", "three")
        assert (await request(log, third)).prompt_ids == expected
        # A branch from the first answer does not see the second.
        branch = admitted(chat.chat_id, "other", parent=first.assistant_message_id)
        await log.append(ADMISSIONS, branch)
        assert (await request(log, branch)).prompt_ids == ids_of("Be brief.", "one", "ONE", "other")
        # What does not fit goes, the oldest first; the prompt keeps its budget.
        tight = admitted(
            chat.chat_id,
            "three",
            parent=mute.assistant_message_id,
            input_budget_tokens=len(ids_of("Be brief.", "two", "TW", "three")),
        )
        await log.append(ADMISSIONS, tight)
        assert (await request(log, tight)).prompt_ids == ids_of("Be brief.", "two", "TW", "three")
        too_tight = admitted(
            chat.chat_id, "three", input_budget_tokens=len(ids_of("Be brief.", "three")) - 1
        )
        await log.append(ADMISSIONS, too_tight)
        assert "exceeds its input budget" in await failure(log, too_tight)
        assert context.stop() == 0, context.log()


async def test_a_parked_prompt_holds_up_nobody_and_survives_a_kill(
    log: Log, bootstrap: str, tmp_path: Path
) -> None:
    quick = new_chat("")
    late = new_chat()
    first = admitted(late.chat_id, "one")
    waiting = admitted(late.chat_id, "two", parent=first.assistant_message_id)
    # Known to whoever owns their partition, also after a rebalance of a process that the machine has kept waiting.
    store(tmp_path, late, quick)
    with PartProcess(CONTEXT, tmp_path, bootstrap=bootstrap, limits=PATIENT) as context:
        context.wait_ready()
        for event in (late, quick):
            await log.append(CHATS, event)
        await log.append(ADMISSIONS, first)
        await log.append(ADMISSIONS, waiting)
        # Of the very partition in which the other is parked.
        others = [admitted(late.chat_id, f"also {n}") for n in range(5)]
        others.append(admitted(quick.chat_id, "hello"))
        for other in others:
            await log.append(ADMISSIONS, other)
        for other in others:
            await request(log, other)
        assert waiting.run_id not in await outcomes_of(log)
        context.kill()
    # Its memory is empty: the chat and the first turn come from the store.
    store(tmp_path, first)
    with PartProcess(
        CONTEXT, tmp_path, bootstrap=bootstrap, variables=STEADY, limits=PATIENT
    ) as again:
        again.wait_ready()
        await log.append(OUTCOMES, concluded(first, "ONE"))
        made = await request(log, waiting)
        assert made.prompt_ids == ids_of("Be brief.", "one", "ONE", "two")
        again.send(signal.SIGTERM)
        assert again.stop() == 0, again.log()


async def test_an_enqueued_prompt_waits_for_the_run_before_it_and_one_that_ended_meanwhile_is_not_asked_for(
    log: Log, bootstrap: str, tmp_path: Path
) -> None:
    chat = new_chat()
    first = admitted(chat.chat_id, "one")
    behind = {"after_run_id": first.run_id, "after_message_id": first.assistant_message_id}
    second = admitted(chat.chat_id, "two", parent=first.assistant_message_id, **behind)
    cancelled = admitted(chat.chat_id, "never", parent=first.assistant_message_id, **behind)
    after_it = admitted(
        chat.chat_id,
        "three",
        parent=cancelled.assistant_message_id,
        after_run_id=cancelled.run_id,
        after_message_id=cancelled.assistant_message_id,
    )
    # The client named another parent: it waits all the same, and for each that came before it.
    aside = admitted(
        chat.chat_id,
        "aside",
        after_run_id=cancelled.run_id,
        after_message_id=cancelled.assistant_message_id,
        behind_message_ids=(first.assistant_message_id, cancelled.assistant_message_id),
    )
    quick = new_chat("")
    with PartProcess(
        CONTEXT, tmp_path, bootstrap=bootstrap, variables=STEADY, limits=PATIENT
    ) as context:
        context.wait_ready()
        for event in (chat, quick):
            await log.append(CHATS, event)
        for prompt in (first, second, aside, cancelled, after_it):
            await log.append(ADMISSIONS, prompt)
        await request(log, first)
        await log.append(OUTCOMES, concluded(cancelled, "", FinishReason.CANCELLED))
        other = admitted(quick.chat_id, "hello")
        await log.append(ADMISSIONS, other)
        await request(log, other)
        told = await outcomes_of(log)
        assert not {second.run_id, aside.run_id, cancelled.run_id, after_it.run_id} & set(told)
        await log.append(OUTCOMES, concluded(first, "ONE"))
        assert (await request(log, second)).prompt_ids == ids_of("Be brief.", "one", "ONE", "two")
        assert (await request(log, aside)).prompt_ids == ids_of("Be brief.", "aside")
        expected = ids_of("Be brief.", "one", "ONE", "three")
        assert (await request(log, after_it)).prompt_ids == expected
        assert cancelled.run_id not in await outcomes_of(log)
        assert context.stop() == 0, context.log()


def store(home: Path, *events: Event) -> None:
    """Write into the history store as the projector does."""
    writer = HistoryWriter(home / HISTORY_FILE)
    records = [
        LogRecord(
            0, at, 1_000 + at, Envelope(event=event, event_id=f"e{at}", cause_id="", trace="")
        )
        for at, event in enumerate(events)
    ]
    writer.apply(records, {})
    writer.close()


async def test_what_can_never_be_assembled_ends_with_an_error(
    log: Log, bootstrap: str, tmp_path: Path
) -> None:
    deleted, open_chat, foreign = new_chat(), new_chat(), new_chat()
    foreign = msgspec.structs.replace(foreign, account_id="somebody-else")
    behind = [
        next(c for c in iter(new_chat, None) if partition_for_key(c.chat_id, PARTITIONS) == place)
        for place in range(PARTITIONS)
    ]
    refused = PromptRefused(
        run_id=admitted("c", "x").run_id,
        account_id=ACCOUNT,
        chat_id=open_chat.chat_id,
        user_message_id="u-refused",
        assistant_message_id="a-refused",
        reason=RefusalReason.OVERLOADED,
    )
    with PartProcess(CONTEXT, tmp_path, bootstrap=bootstrap, variables=STEADY) as context:
        context.wait_ready()
        for event in (
            deleted,
            open_chat,
            foreign,
            ChatDeleted(chat_id=deleted.chat_id, account_id=ACCOUNT),
            *behind,
        ):
            await log.append(CHATS, event)
        # Nothing orders two topics. Who knows the last chat of a partition has read what is before it, the deletion too.
        for last in behind:
            marker = admitted(last.chat_id, "x")
            await log.append(ADMISSIONS, marker)
            await request(log, marker)
        await log.append(ADMISSIONS, refused)
        expected: Sequence[tuple[PromptAdmitted, str]] = (
            (admitted(deleted.chat_id, "x"), "deleted"),
            (admitted(foreign.chat_id, "x"), "another account"),
            (admitted(open_chat.chat_id, "x", parent="a-refused"), "never comes"),
            (admitted(open_chat.chat_id, "x", model="no-such-model"), "not served"),
        )
        unknown = admitted("chat-unknown", "x")
        await log.append(ADMISSIONS, unknown)
        for prompt, _ in expected:
            await log.append(ADMISSIONS, prompt)
        for prompt, detail in expected:
            assert detail in await failure(log, prompt)
        assert "not known in time" in await failure(log, unknown)
        asked_ms, ended_ms = await asked_and_ended_ms(log, unknown)
        assert ended_ms - asked_ms >= PARKED_MS_MAX - CLOCKS_APART_MS, "it was waited for"


async def test_a_process_killed_in_mid_stream_leaves_no_prompt_without_its_request(
    log: Log, bootstrap: str, tmp_path: Path
) -> None:
    """I13, and records that are no events in between (I19)."""
    chats = [new_chat() for _ in range(10)]
    prompts: list[PromptAdmitted] = []
    store(tmp_path, *chats)

    async def submit() -> None:
        for chat in chats:
            await log.append(CHATS, chat)
        for number in range(PROMPTS):
            prompts.append(admitted(chats[number % 10].chat_id, f"question {number}"))
            await log.append(ADMISSIONS, prompts[-1])
            if number % 50 == 0:
                for topic in (ADMISSIONS, CHATS, OUTCOMES):
                    for partition in range(PARTITIONS):
                        sent = await log.writer.send_raw(
                            topic.name, b"{", key=b"k", partition=partition, headers=[]
                        )
                        await acknowledged(sent)

    async def until_submitted(count: int) -> None:
        async def reached() -> bool:
            return len(prompts) >= count

        await eventually_async(reached, what=f"{count} prompts are submitted")

    with PartProcess(CONTEXT, tmp_path, bootstrap=bootstrap, limits=PATIENT) as first:
        first.wait_ready()
        submitting = asyncio.create_task(submit())
        await until_submitted(60)
        first.kill()
        with PartProcess(CONTEXT, tmp_path, bootstrap=bootstrap, limits=PATIENT) as second:
            # Not in this loop: what it has sent would look unacknowledged for as long as that takes.
            await asyncio.to_thread(second.wait_ready)
            await until_submitted(140)
            second.kill()
            await submitting
            with PartProcess(CONTEXT, tmp_path, bootstrap=bootstrap, limits=PATIENT) as third:
                third.wait_ready()

                async def all_requested() -> bool:
                    return {p.run_id for p in prompts} <= (await outcomes_of(log)).keys()

                await eventually_async(all_requested, what="all are requested")
                found = await outcomes_of(log)
                for prompt in prompts:
                    copies = found[prompt.run_id]
                    assert all(isinstance(copy, GenerationRequested) for copy in copies)
                    assert all(copy == copies[0] for copy in copies)
                assert third.stop() == 0, third.log()
