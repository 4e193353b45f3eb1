"""History in one SQLite file: the reading side. `sqlite_writer` is the writing one.

The file is in WAL mode, so any number of processes read while one writes. Readers are a few read-only connections, each used by one
thread at a time; a call that takes too long is interrupted, and its connection is used again only when its thread is through.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from infra.history import (
    READ_WAIT_MS_MAX,
    BadCursor,
    Chat,
    HistoryUnavailable,
    Message,
    Page,
    Run,
)
from infra.history.cursors import (
    ChatsAfter,
    MessagesAfter,
    read_chats_cursor,
    read_messages_cursor,
    write_cursor,
)
from schemas.vocabulary import FinishReason, Role, RunStatus

HISTORY_FILE: Final = "history.db"  # Under TURNLOG_HOME.
SCHEMA_VERSION: Final = 1
READERS_MAX: Final = 3
LOCK_WAIT_MS_MAX: Final = 5_000
LOCK_AGAIN_MS: Final = 20
PRIMARY_CODE: Final = 0xFF
"""What of SQLite's error code names its kind."""
PAGE_ROWS_MAX: Final = 500
BRANCH_MESSAGES_MAX: Final = 20_000

T = TypeVar("T")

# Pairs (_ms, _offset) say which record a field came from: the newest one counts, in whatever order records arrive.
# `created_ms` of a chat is null until its ChatCreated is projected; until then readers do not see the chat.
_SCHEMA: Final = """
CREATE TABLE chats (
    chat_id TEXT PRIMARY KEY,
    account_id TEXT NOT NULL,
    title TEXT NOT NULL DEFAULT '',
    title_ms INTEGER NOT NULL DEFAULT -1,
    title_offset INTEGER NOT NULL DEFAULT -1,
    first_words TEXT NOT NULL DEFAULT '',
    first_words_ms INTEGER,
    first_words_offset INTEGER,
    system_prompt TEXT NOT NULL DEFAULT '',
    model TEXT,
    created_ms INTEGER,
    updated_ms INTEGER NOT NULL,
    current_leaf TEXT,
    chosen_leaf TEXT,
    chosen_ms INTEGER NOT NULL DEFAULT -1,
    chosen_offset INTEGER NOT NULL DEFAULT -1,
    deleted INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX chats_of_account ON chats (account_id, updated_ms DESC, chat_id DESC);
CREATE TABLE messages (
    message_id TEXT PRIMARY KEY,
    chat_id TEXT NOT NULL,
    account_id TEXT NOT NULL,
    parent_id TEXT,
    role TEXT NOT NULL,
    content TEXT NOT NULL,
    status TEXT NOT NULL,
    finish_reason TEXT,
    run_id TEXT NOT NULL,
    token_count INTEGER,
    created_ms INTEGER NOT NULL,
    admitted_ms INTEGER,
    admitted_offset INTEGER
);
CREATE INDEX messages_of_chat ON messages (chat_id, role, admitted_ms, admitted_offset);
CREATE TABLE runs (
    run_id TEXT PRIMARY KEY,
    chat_id TEXT NOT NULL,
    account_id TEXT NOT NULL,
    user_message_id TEXT NOT NULL,
    assistant_message_id TEXT NOT NULL,
    model TEXT NOT NULL,
    status TEXT NOT NULL,
    finish_reason TEXT,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0,
    text TEXT NOT NULL DEFAULT '',
    end_offset INTEGER
);
CREATE INDEX runs_of_chat ON runs (chat_id);
CREATE TABLE projected (
    topic TEXT NOT NULL,
    partition INTEGER NOT NULL,
    next_offset INTEGER NOT NULL,
    PRIMARY KEY (topic, partition)
) WITHOUT ROWID;
CREATE TABLE source (epoch INTEGER NOT NULL);
"""

CHAT_COLUMNS: Final = """chat_id, account_id, CASE WHEN title <> '' THEN title ELSE first_words END, system_prompt, model,
    coalesce(created_ms, updated_ms), updated_ms, current_leaf, deleted"""
MESSAGE_COLUMNS: Final = """m.message_id, m.chat_id, m.account_id, m.parent_id, m.role, m.content, m.status, m.finish_reason,
    m.run_id, m.token_count, m.created_ms"""
RUN_COLUMNS: Final = """run_id, chat_id, account_id, user_message_id, assistant_message_id, model, status, finish_reason,
    input_tokens, output_tokens, attempts, text, end_offset"""
_PATH: Final = """WITH RECURSIVE path (message_id, parent_id, depth) AS (
    SELECT message_id, parent_id, 0 FROM messages WHERE message_id = :leaf AND chat_id = :chat
    UNION ALL
    SELECT m.message_id, m.parent_id, depth + 1 FROM path JOIN messages m ON m.message_id = path.parent_id
    WHERE m.chat_id = :chat AND depth < :depth_max) """


def connect(path: Path) -> sqlite3.Connection:
    """A connection that may write; makes the file and its tables when there are none. Raises HistoryUnavailable."""
    deadline = time.monotonic() + LOCK_WAIT_MS_MAX / 1000
    pause = threading.Event()
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return _connected(path)
        except (OSError, sqlite3.OperationalError) as error:
            # Of several that make the file at once SQLite refuses some at once, whatever its own timeout says: a reader that wants
            # to write could wait for another one that waits for it.
            locked = getattr(error, "sqlite_errorcode", 0) & PRIMARY_CODE == sqlite3.SQLITE_BUSY
            if not locked or time.monotonic() > deadline:
                raise HistoryUnavailable(f"{path}: {error}") from error
            pause.wait(LOCK_AGAIN_MS / 1000)
        except sqlite3.DatabaseError as error:
            raise HistoryUnavailable(
                f"{path} is damaged ({error}): remove it, it is rebuilt from the log"
            ) from error


def _connected(path: Path) -> sqlite3.Connection:
    """One attempt. Raises what SQLite raises, or HistoryUnavailable for a file of another version."""
    connection = sqlite3.connect(
        path, timeout=LOCK_WAIT_MS_MAX / 1000, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("BEGIN IMMEDIATE")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            for statement in _SCHEMA.split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
        if version not in (0, SCHEMA_VERSION):
            raise HistoryUnavailable(
                f"{path} was made by another version: remove it, it is rebuilt from the log"
            )
    except BaseException:
        connection.close()
        raise
    return connection


def open_history(path: Path) -> SqliteHistory:
    """Open the store for reading; makes an empty one when there is none. Raises HistoryUnavailable. Close it when done."""
    connect(path).close()
    return SqliteHistory(path)


class SqliteHistory:
    """The `History` promise on one file. An async context manager; or call `close`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._threads = ThreadPoolExecutor(READERS_MAX, thread_name_prefix="history")
        self._idle: asyncio.LifoQueue[sqlite3.Connection] = asyncio.LifoQueue(READERS_MAX)
        self._all = [self._reader() for _ in range(READERS_MAX)]
        for connection in self._all:
            self._idle.put_nowait(connection)

    def _reader(self) -> sqlite3.Connection:
        return sqlite3.connect(
            f"{self._path.absolute().as_uri()}?mode=ro",
            uri=True,
            timeout=READ_WAIT_MS_MAX / 2_000,
            isolation_level=None,
            check_same_thread=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Interrupt what is still running and close the connections."""
        for connection in self._all:
            connection.interrupt()
        await asyncio.get_running_loop().run_in_executor(None, self._threads.shutdown)
        for connection in self._all:
            connection.close()

    async def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        try:
            async with asyncio.timeout(READ_WAIT_MS_MAX / 1000):
                connection = await self._idle.get()
                work = asyncio.get_running_loop().run_in_executor(self._threads, query, connection)
                work.add_done_callback(lambda done: self._give_back(connection, done))
                try:
                    return await asyncio.shield(work)
                except asyncio.CancelledError:
                    connection.interrupt()
                    raise
        except TimeoutError as error:
            raise HistoryUnavailable("the history store did not answer in time") from error
        except sqlite3.Error as error:
            raise HistoryUnavailable(
                f"the history store failed: {getattr(error, 'sqlite_errorname', type(error).__name__)}"
            ) from error

    def _give_back(self, connection: sqlite3.Connection, done: asyncio.Future[Any]) -> None:
        if not done.cancelled():
            done.exception()  # Taken: its caller may have stopped waiting.
        self._idle.put_nowait(connection)

    async def chat(self, chat_id: str) -> Chat | None:
        """See History."""
        rows = await self._rows(
            f"SELECT {CHAT_COLUMNS} FROM chats WHERE chat_id = ? AND (created_ms IS NOT NULL OR deleted)",
            chat_id,
        )
        return _chat(rows[0]) if rows else None

    async def chats(self, account_id: str, *, cursor: str | None, limit: int) -> Page[Chat]:
        """See History. At most PAGE_ROWS_MAX rows a page."""
        after = read_chats_cursor(cursor) if cursor is not None else ChatsAfter(2**63 - 1, "")
        size = _page_size(limit)
        rows = await self._rows(
            f"""SELECT {CHAT_COLUMNS} FROM chats
            WHERE account_id = ? AND created_ms IS NOT NULL AND NOT deleted AND (updated_ms, chat_id) < (?, ?)
            ORDER BY updated_ms DESC, chat_id DESC LIMIT ?""",
            account_id,
            after.updated_ms,
            after.chat_id,
            size + 1,
        )
        found = [_chat(row) for row in rows[:size]]
        if len(rows) <= size:
            return Page(rows=found, next_cursor=None)
        last = found[-1]
        return Page(rows=found, next_cursor=write_cursor(ChatsAfter(last.updated_ms, last.chat_id)))

    async def message(self, message_id: str) -> Message | None:
        """See History."""
        rows = await self._rows(
            f"SELECT {MESSAGE_COLUMNS} FROM messages m WHERE m.message_id = ?", message_id
        )
        return _message(rows[0]) if rows else None

    async def branch(
        self, chat_id: str, leaf: str, *, cursor: str | None, limit: int
    ) -> Page[Message]:
        """See History. At most PAGE_ROWS_MAX rows a page; a cursor stays good while its message is on the way to `leaf`."""
        after = None
        if cursor is not None:
            after = read_messages_cursor(cursor, chat_id=chat_id).message_id
        size = _page_size(limit)
        rows = await self._read(lambda c: _branch_rows(c, chat_id, leaf, after, size + 1))
        found = [_message(row) for row in rows[:size]]
        if len(rows) <= size:
            return Page(rows=found, next_cursor=None)
        return Page(
            rows=found, next_cursor=write_cursor(MessagesAfter(chat_id, found[-1].message_id))
        )

    async def ancestors(self, message_id: str, *, limit: int) -> Sequence[Message]:
        """See History. At most BRANCH_MESSAGES_MAX."""
        rows = await self._rows(
            f"""WITH RECURSIVE path (message_id, parent_id, chat_id, depth) AS (
                SELECT message_id, parent_id, chat_id, 0 FROM messages WHERE message_id = ?
                UNION ALL
                SELECT m.message_id, m.parent_id, m.chat_id, depth + 1
                FROM path JOIN messages m ON m.message_id = path.parent_id AND m.chat_id = path.chat_id
                LIMIT ?)
            SELECT {MESSAGE_COLUMNS} FROM path JOIN messages m USING (message_id) ORDER BY depth""",
            message_id,
            max(0, min(limit, BRANCH_MESSAGES_MAX)),
        )
        return [_message(row) for row in rows]

    async def run(self, run_id: str) -> Run | None:
        """See History."""
        rows = await self._rows(f"SELECT {RUN_COLUMNS} FROM runs WHERE run_id = ?", run_id)
        return _run(rows[0]) if rows else None

    async def projected(self, topic: str, partition: int) -> int:
        """See History."""
        rows = await self._rows(
            "SELECT next_offset FROM projected WHERE topic = ? AND partition = ?", topic, partition
        )
        return int(rows[0][0]) if rows else 0

    async def _rows(self, sql: str, *values: object) -> list[Any]:
        return await self._read(lambda c: c.execute(sql, values).fetchall())


def _page_size(limit: int) -> int:
    return max(1, min(limit, PAGE_ROWS_MAX))


def _branch_rows(
    connection: sqlite3.Connection, chat_id: str, leaf: str, after: str | None, count: int
) -> list[Any]:
    values: dict[str, object] = {
        "leaf": leaf,
        "chat": chat_id,
        "depth_max": BRANCH_MESSAGES_MAX,
        "count": count,
        "below": BRANCH_MESSAGES_MAX + 1,
        "after": after,
    }
    if after is not None:
        found = connection.execute(
            _PATH + "SELECT depth FROM path WHERE message_id = :after", values
        ).fetchone()
        if found is None:
            raise BadCursor("a cursor of another branch")
        values["below"] = found[0]  # Paths only grow, so this holds in the next statement too.
    return connection.execute(
        _PATH
        + f"""SELECT {MESSAGE_COLUMNS} FROM path JOIN messages m USING (message_id)
        WHERE depth < :below ORDER BY depth DESC LIMIT :count""",
        values,
    ).fetchall()


def _chat(row: Sequence[Any]) -> Chat:
    return Chat(
        chat_id=row[0],
        account_id=row[1],
        title=row[2],
        system_prompt=row[3],
        model=row[4],
        created_ms=row[5],
        updated_ms=row[6],
        current_leaf=row[7],
        deleted=bool(row[8]),
    )


def _message(row: Sequence[Any]) -> Message:
    return Message(
        message_id=row[0],
        chat_id=row[1],
        account_id=row[2],
        parent_id=row[3],
        role=Role(row[4]),
        content=row[5],
        status=RunStatus(row[6]),
        finish_reason=FinishReason(row[7]) if row[7] is not None else None,
        run_id=row[8],
        token_count=row[9],
        created_ms=row[10],
    )


def _run(row: Sequence[Any]) -> Run:
    return Run(
        run_id=row[0],
        chat_id=row[1],
        account_id=row[2],
        user_message_id=row[3],
        assistant_message_id=row[4],
        model=row[5],
        status=RunStatus(row[6]),
        finish_reason=FinishReason(row[7]) if row[7] is not None else None,
        input_tokens=row[8],
        output_tokens=row[9],
        attempts=row[10],
        text=row[11],
        end_offset=row[12],
    )
