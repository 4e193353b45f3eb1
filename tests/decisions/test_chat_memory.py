"""Recently active chats: what is known, in whatever order it was told."""

from __future__ import annotations

from itertools import permutations

from processors.decisions.chat_memory import (
    Branch,
    ChatFacts,
    ChatMemory,
    Missing,
    NeverComes,
    Remembered,
)
from processors.decisions.context_window import Said
from schemas.events.admissions import PromptAdmitted, PromptRefused
from schemas.events.chats import ChatCreated, ChatDeleted
from schemas.events.outcomes import RunConcluded
from schemas.vocabulary import FinishReason, Lane, RefusalReason, Role, Tier

Told = ChatCreated | ChatDeleted | PromptAdmitted | RunConcluded
CREATED = ChatCreated(chat_id="c", account_id="anna", system_prompt="Be brief.")


def admitted(number: int, parent: str | None, content: str = "question") -> PromptAdmitted:
    return PromptAdmitted(
        run_id=f"r{number}",
        account_id="anna",
        chat_id="c",
        tier=Tier.FREE,
        lane=Lane.FREE,
        model="m",
        user_message_id=f"u{number}",
        assistant_message_id=f"a{number}",
        parent_id=parent,
        content=content,
        input_budget_tokens=100,
        granted_output_tokens=10,
        deadline_ms=1_000,
    )


def concluded(number: int, text: str = "answer") -> RunConcluded:
    return RunConcluded(
        run_id=f"r{number}",
        account_id="anna",
        chat_id="c",
        user_message_id=f"u{number}",
        assistant_message_id=f"a{number}",
        tier=Tier.FREE,
        model="m",
        text=text,
        input_tokens=1,
        output_tokens=1,
        finish_reason=FinishReason.STOP,
        attempts=1,
        end_offset=1,
    )


def told(*events: Told) -> ChatMemory:
    memory = ChatMemory()
    for event in events:
        memory.learn(event, partition=0)
    return memory


def ids(branch: Branch | Missing | NeverComes) -> list[str]:
    assert isinstance(branch, Branch)
    return [message.message_id for message in branch.messages]


def test_a_branch_is_known_when_all_its_texts_are_in_whatever_order_they_came() -> None:
    events: list[Told] = [CREATED, admitted(1, None), concluded(1), admitted(2, "a1"), concluded(2)]
    for order in permutations(events):
        memory = told(*order, *order)
        assert ids(memory.branch("c", "a2")) == ["u1", "a1", "u2", "a2"]
        assert memory.facts("c") == ChatFacts(
            account_id="anna", system_prompt="Be brief.", deleted=False
        )


def test_the_first_message_of_a_chat_has_an_empty_branch() -> None:
    assert ids(ChatMemory().branch("c", None)) == []


def test_an_answer_is_missing_until_its_run_is_concluded() -> None:
    memory = told(CREATED, admitted(1, None))
    assert memory.branch("c", "a1") == Missing(message_id="a1")
    memory.learn(concluded(1), partition=0)
    assert ids(memory.branch("c", "a1")) == ["u1", "a1"]


def test_a_message_whose_prompt_was_refused_never_comes() -> None:
    memory = told(CREATED)
    memory.learn(
        PromptRefused(
            run_id="r1",
            account_id="anna",
            chat_id="c",
            user_message_id="u1",
            assistant_message_id="a1",
            reason=RefusalReason.OVERLOADED,
        ),
        partition=0,
    )
    memory.learn(admitted(2, "a1"), partition=0)
    for leaf, gone in (("a1", "a1"), ("u1", "u1"), ("u2", "a1")):
        assert memory.branch("c", leaf) == NeverComes(message_id=gone)


def test_a_circle_of_parents_ends() -> None:
    memory = told(CREATED, admitted(1, "a1"), concluded(1))
    assert isinstance(memory.branch("c", "a1"), NeverComes)


def test_a_deleted_chat_stays_deleted() -> None:
    deleted = ChatDeleted(chat_id="c", account_id="anna")
    for order in ((CREATED, deleted), (deleted, CREATED)):
        facts = told(*order).facts("c")
        assert facts is not None
        assert facts.deleted
    memory = told(deleted)
    alive = ChatFacts(account_id="anna", system_prompt="", deleted=False)
    memory.recall("c", 0, alive, [])
    facts = memory.facts("c")
    assert facts is not None
    assert facts.deleted


def test_what_history_holds_fills_the_gap_below_what_the_log_told() -> None:
    memory = told(CREATED, admitted(2, "a1"))
    assert memory.branch("c", "u2") == Missing(message_id="a1")
    old = [
        Remembered(said=Said(message_id="a1", role=Role.ASSISTANT, content="x"), parent_id="u1"),
        Remembered(said=Said(message_id="u1", role=Role.USER, content="y"), parent_id=None),
    ]
    memory.recall("c", 0, None, old)
    assert ids(memory.branch("c", "u2")) == ["u1", "a1", "u2"]


def test_the_chat_longest_unused_is_forgotten_first() -> None:
    memory = ChatMemory(chats_max=2)
    for chat in ("one", "two"):
        memory.learn(ChatCreated(chat_id=chat, account_id="anna"), partition=0)
    assert isinstance(memory.branch("one", None), Branch)  # Used, so the other is older now.
    memory.learn(ChatCreated(chat_id="three", account_id="anna"), partition=0)
    assert memory.facts("two") is None
    assert memory.facts("one") is not None


def test_memory_is_bounded_by_characters_too_and_counts_them_exactly() -> None:
    memory = ChatMemory(chars_max=20)
    memory.learn(ChatCreated(chat_id="old", account_id="anna", system_prompt="x" * 15), 0)
    memory.learn(admitted(1, None, content="y" * 10), partition=0)
    assert (len(memory), memory.chars) == (1, 10)
    memory.forget_partitions([0])
    assert (len(memory), memory.chars) == (0, 0)


def test_partitions_that_are_no_longer_fed_are_forgotten() -> None:
    memory = told(CREATED)
    memory.forget_partitions([1])
    assert memory.facts("c") is not None
    memory.forget_partitions([0])
    assert memory.facts("c") is None


def test_m4_refused_prompts_count_towards_the_bound() -> None:
    memory = ChatMemory()
    for number in range(1_000):
        refused = PromptRefused(
            run_id=f"r{number}",
            account_id="anna",
            chat_id="c",
            user_message_id=f"u{number}",
            assistant_message_id=f"a{number}",
            reason=RefusalReason.TOO_MANY_RUNS,
        )
        memory.learn(refused, 0)
        memory.learn(refused, 0)
    assert memory.chars == sum(len(f"u{number}a{number}") for number in range(1_000))
    memory.forget_partitions({0})
    assert memory.chars == 0
