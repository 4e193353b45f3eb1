"""What every history store promises. `STORES` names the implementations; each one passes the same tests."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infra.history import BadCursor, Chat, History, HistoryUnavailable, Message, Run
from infra.history.sqlite import HISTORY_FILE, connect, open_history
from infra.history.sqlite_writer import Applied, HistoryWriter, Unstorable, title_from
from schemas.topics import ADMISSIONS, CHATS, OUTCOMES
from schemas.vocabulary import FinishReason, Role, RunStatus
from tests.contracts.history_log import ACCOUNT, HistoryLog, Stamped


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Both sides of one store over the same data."""

    history: History
    apply: Callable[[Iterable[Stamped]], Applied]


@pytest.fixture(params=["sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    assert request.param == "sqlite"
    writer = HistoryWriter(tmp_path / HISTORY_FILE)
    async with open_history(tmp_path / HISTORY_FILE) as history:
        yield Store(history=history, apply=lambda stamped: apply_to(writer, stamped))
    writer.close()


def apply_to(writer: HistoryWriter, stamped: Iterable[Stamped]) -> Applied:
    """One batch, with the offsets it reaches."""
    batch = list(stamped)
    reached: dict[tuple[str, int], int] = {}
    for item in batch:
        at = (item.topic.name, item.record.partition)
        reached[at] = max(reached.get(at, 0), item.record.offset + 1)
    return writer.apply([item.record for item in batch], reached)


async def everything(history: History, log: HistoryLog) -> tuple[list[object], ...]:
    """All that readers can see of the chats, messages and runs of `log`."""
    chats = sorted({item.record.event.chat_id for item in log.records})  # type: ignore[attr-defined]
    turns = sorted(
        {
            run.removesuffix(".run")
            for item in log.records
            if (run := getattr(item.record.event, "run_id", ""))
        }
    )
    return (
        [await history.chat(chat) for chat in chats],
        [await history.message(f"{t}.{side}") for t in turns for side in ("user", "answer")],
        [await history.run(f"{turn}.run") for turn in turns],
        list((await history.chats(ACCOUNT, cursor=None, limit=100)).rows),
    )


def conversation() -> HistoryLog:
    """Two chats with a fork, a refusal, a rename, a chosen leaf, and one that is deleted in mid-answer."""
    log = HistoryLog()
    log.created("chat-a", system_prompt="be brief")
    log.admitted("chat-a", "a1", content="What is\n a log?")
    log.created("chat-b", title="named")
    log.concluded("chat-a", "a1", text="Records, in order.")
    log.admitted("chat-a", "a2", parent="a1")
    log.refused("chat-a", "a3")
    log.concluded("chat-a", "a2", finish=FinishReason.CANCELLED)
    log.admitted("chat-a", "a4", parent="a1")
    log.leaf("chat-a", "a2.answer")
    log.renamed("chat-b", "renamed")
    log.admitted("chat-b", "b1")
    log.created("chat-c")
    log.admitted("chat-c", "c1", content="secret")
    log.deleted("chat-c")
    log.concluded("chat-c", "c1", text="also secret")
    # What restarted writers append again, under other offsets and times.
    for number in (0, 1, 3, 4, 7, 12):
        again = log.records[number]
        log.append(again.topic, again.record.event)
    return log


async def test_an_empty_store_knows_nothing(store: Store) -> None:
    history = store.history
    assert await history.chat("chat") is None
    assert await history.message("msg") is None
    assert await history.run("run") is None
    assert await history.ancestors("msg", limit=5) == []
    assert (await history.chats(ACCOUNT, cursor=None, limit=5)).rows == []
    assert (await history.branch("chat", "msg", cursor=None, limit=5)).rows == []
    assert await history.projected(CHATS.name, 0) == 0


async def test_a_turn_is_read_back_as_it_was_projected(store: Store) -> None:
    log = HistoryLog()
    created = log.created("chat", system_prompt="be brief").record
    admitted = log.admitted("chat", "t", content="What?").record
    store.apply(log.records)
    answer = await store.history.message("t.answer")
    assert answer is not None
    assert (answer.status, answer.content, answer.token_count) == (RunStatus.QUEUED, "", None)
    concluded = log.concluded("chat", "t", text="That.").record
    store.apply(log.records[-1:])
    assert await store.history.chat("chat") == Chat(
        chat_id="chat",
        account_id=ACCOUNT,
        title="What?",
        system_prompt="be brief",
        model=None,
        created_ms=created.appended_ms,
        updated_ms=concluded.appended_ms,
        current_leaf="t.answer",
        deleted=False,
    )
    assert await store.history.message("t.user") == Message(
        message_id="t.user",
        chat_id="chat",
        account_id=ACCOUNT,
        parent_id=None,
        role=Role.USER,
        content="What?",
        status=RunStatus.DONE,
        finish_reason=None,
        run_id="t.run",
        token_count=None,
        created_ms=admitted.appended_ms,
    )
    assert await store.history.message("t.answer") == Message(
        message_id="t.answer",
        chat_id="chat",
        account_id=ACCOUNT,
        parent_id="t.user",
        role=Role.ASSISTANT,
        content="That.",
        status=RunStatus.DONE,
        finish_reason=FinishReason.STOP,
        run_id="t.run",
        token_count=3,
        created_ms=admitted.appended_ms,
    )
    assert await store.history.run("t.run") == Run(
        run_id="t.run",
        chat_id="chat",
        account_id=ACCOUNT,
        user_message_id="t.user",
        assistant_message_id="t.answer",
        model="m",
        status=RunStatus.DONE,
        finish_reason=FinishReason.STOP,
        input_tokens=7,
        output_tokens=3,
        attempts=1,
        text="That.",
        end_offset=9,
    )


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_order_with_any_repeats_gives_the_same_history(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    log = conversation()
    shuffled = data.draw(st.permutations(log.records))
    repeats = data.draw(st.lists(st.sampled_from(log.records), max_size=6))
    cut = data.draw(st.integers(0, len(shuffled)))
    batches = (shuffled[:cut], repeats, shuffled[cut:], repeats)

    async def read_of(name: str, parts: Iterable[Iterable[Stamped]]) -> tuple[list[object], ...]:
        path = tmp_path_factory.mktemp(name) / HISTORY_FILE
        writer = HistoryWriter(path)
        for part in parts:
            assert apply_to(writer, part).contradicted == ()
        writer.close()
        async with open_history(path) as history:
            return await everything(history, log)

    async def compare() -> None:
        assert await read_of("mixed", batches) == await read_of("ordered", [log.records])

    asyncio.run(compare())


async def test_a_chat_is_not_seen_before_its_creation_is(store: Store) -> None:
    log = HistoryLog()
    log.created("chat", system_prompt="be brief")
    log.admitted("chat", "t")
    store.apply(log.records[1:])
    assert await store.history.chat("chat") is None
    assert (await store.history.chats(ACCOUNT, cursor=None, limit=5)).rows == []
    store.apply(log.records[:1])
    chat = await store.history.chat("chat")
    assert chat is not None
    assert (chat.system_prompt, chat.current_leaf) == ("be brief", "t.answer")


async def test_an_outcome_without_its_admission_is_an_answer_already(store: Store) -> None:
    log = HistoryLog()
    log.created("chat")
    log.concluded("chat", "t", text="early")
    store.apply(log.records)
    found = await store.history.ancestors("t.answer", limit=10)
    assert [(m.message_id, m.content, m.parent_id) for m in found] == [
        ("t.answer", "early", "t.user")
    ]


async def test_a_refused_prompt_leaves_a_run_and_no_message(store: Store) -> None:
    log = conversation()
    store.apply(log.records)
    run = await store.history.run("a3.run")
    assert run is not None
    assert (run.status, run.text, run.end_offset) == (RunStatus.REFUSED, "", None)
    assert await store.history.message("a3.user") is None
    assert await store.history.message("a3.answer") is None


async def test_a_deleted_chat_keeps_no_text_and_is_not_listed(store: Store) -> None:
    store.apply(conversation().records)
    chat = await store.history.chat("chat-c")
    assert chat is not None
    assert chat.deleted
    assert (chat.title, chat.system_prompt, chat.current_leaf) == ("", "", None)
    assert await store.history.message("c1.user") is None
    run = await store.history.run("c1.run")
    assert run is not None
    assert (run.text, run.output_tokens) == ("", 3)
    listed = await store.history.chats(ACCOUNT, cursor=None, limit=10)
    assert {c.chat_id for c in listed.rows} == {"chat-b", "chat-a"}


async def test_the_newest_leaf_is_current_whoever_chose_it(store: Store) -> None:
    log = conversation()
    store.apply(log.records)
    chosen = await store.history.chat("chat-a")
    assert chosen is not None
    assert chosen.current_leaf == "a2.answer"
    log.admitted("chat-a", "a5", parent="a2")
    store.apply(log.records[-1:])
    moved = await store.history.chat("chat-a")
    assert moved is not None
    assert moved.current_leaf == "a5.answer"


async def test_a_copy_of_an_older_prompt_does_not_become_the_newest_leaf(store: Store) -> None:
    log = HistoryLog()
    log.created("chat")
    first = log.admitted("chat", "t1")
    log.admitted("chat", "t2", parent="t1")
    log.append(first.topic, first.record.event)
    store.apply(log.records)
    chat = await store.history.chat("chat")
    assert chat is not None
    assert chat.current_leaf == "t2.answer"
    user = await store.history.message("t1.user")
    assert user is not None
    assert user.created_ms == first.record.appended_ms


async def test_chats_are_paged_by_newest_activity(store: Store) -> None:
    log = HistoryLog()
    for number in range(7):
        log.created(f"chat-{number}")
    log.admitted("chat-2", "t")
    store.apply(log.records)
    seen: list[str] = []
    cursor: str | None = None
    while True:
        page = await store.history.chats(ACCOUNT, cursor=cursor, limit=3)
        seen += [chat.chat_id for chat in page.rows]
        cursor = page.next_cursor
        if cursor is None:
            break
        assert len(page.rows) == 3
    assert seen == [f"chat-{n}" for n in (2, 6, 5, 4, 3, 1, 0)]
    assert (await store.history.chats("acc-2", cursor=None, limit=3)).rows == []


async def test_a_branch_is_paged_from_its_root_and_leaves_other_branches_out(store: Store) -> None:
    log = HistoryLog()
    log.created("chat")
    parent = None
    for number in range(5):
        log.admitted("chat", f"t{number}", parent=parent)
        parent = f"t{number}"
    log.admitted("chat", "fork", parent="t1")
    store.apply(log.records)
    page = await store.history.branch("chat", "t4.answer", cursor=None, limit=4)
    names = [message.message_id for message in page.rows]
    assert names == ["t0.user", "t0.answer", "t1.user", "t1.answer"]
    # The chat goes on while somebody pages through it.
    log.admitted("chat", "t5", parent="t4")
    store.apply(log.records[-1:])
    for leaf, last in (("t5.answer", "t5"), ("fork.answer", "fork")):
        rest = await store.history.branch("chat", leaf, cursor=page.next_cursor, limit=100)
        assert rest.next_cursor is None
        assert rest.rows[-1].message_id == f"{last}.answer"
        assert len(rest.rows) == (8 if last == "t5" else 2)


async def test_a_branch_of_another_chat_is_empty(store: Store) -> None:
    store.apply(conversation().records)
    assert (await store.history.branch("chat-b", "a1.answer", cursor=None, limit=9)).rows == []


async def test_ancestors_are_the_newest_messages_up_to_the_limit(store: Store) -> None:
    store.apply(conversation().records)
    found = await store.history.ancestors("a4.answer", limit=3)
    assert [m.message_id for m in found] == ["a4.answer", "a4.user", "a1.answer"]
    assert await store.history.ancestors("a4.answer", limit=0) == []


@pytest.mark.parametrize("cursor", ["", "x", "é", "W10", "W10=", "bnVsbA", "a" * 300, "WyJjIl0"])
async def test_a_made_up_cursor_is_refused(store: Store, cursor: str) -> None:
    with pytest.raises(BadCursor):
        await store.history.chats(ACCOUNT, cursor=cursor, limit=3)
    with pytest.raises(BadCursor):
        await store.history.branch("chat-a", "a1.answer", cursor=cursor, limit=3)


async def test_a_cursor_of_another_listing_is_refused(store: Store) -> None:
    store.apply(conversation().records)
    chats = (await store.history.chats(ACCOUNT, cursor=None, limit=1)).next_cursor
    branch = (await store.history.branch("chat-a", "a2.answer", cursor=None, limit=3)).next_cursor
    with pytest.raises(BadCursor):
        await store.history.branch("chat-a", "a2.answer", cursor=chats, limit=1)
    with pytest.raises(BadCursor):
        await store.history.chats(ACCOUNT, cursor=branch, limit=1)
    with pytest.raises(BadCursor):
        await store.history.branch("chat-b", "a2.answer", cursor=branch, limit=1)
    with pytest.raises(BadCursor):  # a2.user is not on the way to a4.
        await store.history.branch("chat-a", "a4.answer", cursor=branch, limit=1)


async def test_any_text_comes_back_byte_for_byte(store: Store) -> None:
    text = "\x00 a\r\nb\u2028\u202e e\u0301 👩‍🚀 \U0010ffff"
    log = HistoryLog()
    log.created("chat", title=text)
    log.admitted("chat", "t", content=text)
    log.concluded("chat", "t", text=text)
    store.apply(log.records)
    chat = await store.history.chat("chat")
    found = await store.history.ancestors("t.answer", limit=2)
    assert chat is not None
    assert [chat.title, *(m.content for m in found)] == [text] * 3


async def test_a_run_that_concludes_twice_differently_keeps_the_first_and_is_reported(
    store: Store,
) -> None:
    log = HistoryLog()
    log.created("chat")
    log.concluded("chat", "t", text="first")
    log.concluded("chat", "t", text="second")
    assert store.apply(log.records).contradicted == ("t.run",)
    run = await store.history.run("t.run")
    assert run is not None
    assert run.text == "first"


async def test_offsets_reached_are_kept_and_never_go_back(store: Store, tmp_path: Path) -> None:
    log = conversation()
    store.apply(log.records)
    for topic in (CHATS, ADMISSIONS, OUTCOMES):
        assert await store.history.projected(topic.name, 0) == log.ends[topic.name]
    store.apply(log.records[:1])
    assert await store.history.projected(CHATS.name, 0) == log.ends[CHATS.name]


async def test_what_cannot_be_stored_fails_alone_and_leaves_nothing_half_done(store: Store) -> None:
    log = HistoryLog()
    log.created("chat")
    bad = log.concluded("chat", "t", end_offset=2**70)
    with pytest.raises(Unstorable) as caught:
        store.apply(log.records)
    assert caught.value.record is bad.record
    assert await store.history.chat("chat") is None
    assert await store.history.projected(CHATS.name, 0) == 0
    store.apply(log.records[:1])
    assert await store.history.chat("chat") is not None


async def test_reading_goes_on_while_a_batch_is_being_written(tmp_path: Path) -> None:
    log = conversation()
    writer = HistoryWriter(tmp_path / HISTORY_FILE)
    apply_to(writer, log.records)
    blocker = connect(tmp_path / HISTORY_FILE)
    async with open_history(tmp_path / HISTORY_FILE) as history:
        blocker.execute("BEGIN IMMEDIATE")
        blocker.execute("DELETE FROM messages")
        assert await history.message("a1.user") is not None
        blocker.execute("COMMIT")
        assert await history.message("a1.user") is None
    blocker.close()
    writer.close()


async def test_many_readers_at_once_all_get_their_rows(store: Store) -> None:
    store.apply(conversation().records)
    found = await asyncio.gather(*(store.history.message("a1.user") for _ in range(100)))
    assert all(message is not None and message.content for message in found)


async def test_a_query_that_takes_too_long_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.history.sqlite.READ_WAIT_MS_MAX", 50)
    history = open_history(tmp_path / HISTORY_FILE)
    forever = """WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"""
    for _ in range(5):  # More often than there are connections: each one comes back.
        with pytest.raises(TimeoutError):
            await history._rows(forever)
    monkeypatch.setattr("infra.history.sqlite.READ_WAIT_MS_MAX", 60_000)
    assert await history.run("run") is None
    await history.close()


def test_a_store_that_another_process_makes_just_now_is_waited_for(tmp_path: Path) -> None:
    """Processes of a new home start at the same moment. SQLite refuses at once what here holds the lock for a while."""
    path = tmp_path / HISTORY_FILE
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(1) as threads:
        opening = threads.submit(connect, path)
        try:
            wait([opening], timeout=0.3)
            assert not opening.done(), opening.exception()
        finally:
            other.execute("ROLLBACK")
            other.close()
        opening.result().close()


def test_a_file_of_another_version_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / HISTORY_FILE
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA user_version = 99")
    with pytest.raises(HistoryUnavailable, match="another version") as caught:
        open_history(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_database_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / HISTORY_FILE
    path.write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(HistoryUnavailable) as caught:
        open_history(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "title"),
    [
        ("Hello", "Hello"),
        ("  two\n\nlines ", "two lines"),
        ("word " * 40, "word word word word word word word word word word word…"),
        ("x" * 100, "x" * 59 + "…"),
        ("\n\t ", ""),
    ],
)
def test_a_title_is_one_short_line_of_the_first_message(content: str, title: str) -> None:
    assert title_from(content) == title


def test_a_title_is_never_longer_than_its_bound() -> None:
    for length in itertools.chain(range(50, 130), [1_000]):
        for word in (1, 7, 33, 80):
            content = (("w" * word + " ") * length)[:length]
            assert len(title_from(content)) <= 60
