"""History in one SQLite file: the writing side, a projection of chats, admissions and outcomes.

Rules (the tests cite them):
  H1  A batch and the offsets it reaches are one transaction: a crash leaves both or neither.
  H2  Order does not matter: an outcome may come before its admission and both before their chat. Every field is the one of the oldest
      or of the newest record by (append time, offset), or a minimum or maximum. So a replay changes nothing, and a copy that a
      restarted writer appended later does not count as newer.
  H3  Times are append times of records, never a clock's.
  H4  A deleted chat stays as an empty row. Its messages and answers are removed, and those that come later are not stored.
  H5  The same run concluded twice with different content is a defect: the first one stays, and it is counted.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infra.history import HistoryUnavailable
from infra.history.sqlite import connect
from infra.log.records import LogRecord
from schemas.events import Event
from schemas.events.admissions import PromptAdmitted, PromptRefused
from schemas.events.chats import ChatCreated, ChatDeleted, ChatRenamed, LeafChosen
from schemas.events.outcomes import RunConcluded
from schemas.vocabulary import STATUS_OF_FINISH, Role, RunStatus

TITLE_CHARS_MAX: Final = 60


class Unstorable(ValueError):
    """`record` holds a value that the store cannot keep, such as a number of more than 64 bits. The caller parks it."""

    def __init__(self, record: LogRecord, why: str) -> None:
        super().__init__(f"{type(record.event).__name__}: not storable ({why})")
        self.record = record


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What a batch did. `contradicted` are runs that concluded twice with different content (H5)."""

    records: int
    contradicted: tuple[str, ...]


class HistoryWriter:
    """Applies batches. Blocking: call it in a thread, from one at a time. Several processes may write to one file."""

    def __init__(self, path: Path) -> None:
        """Open the store; makes an empty one when there is none. Raises HistoryUnavailable."""
        self._connection = connect(path)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def projected(self) -> dict[tuple[str, int], int]:
        """For each (topic, partition) the offset up to which (exclusive) it is in the store."""
        try:
            rows = self._connection.execute("SELECT topic, partition, next_offset FROM projected")
            return {(topic, partition): offset for topic, partition, offset in rows}
        except sqlite3.Error as error:
            raise HistoryUnavailable(f"history store: {error}") from error

    def forget_projected(self, topic: str, partition: int) -> None:
        """Count this partition from zero again: for a topic that was made anew, with offsets of its own."""
        with self._writing() as cursor:
            cursor.execute(
                "DELETE FROM projected WHERE topic = ? AND partition = ?", (topic, partition)
            )

    def read_from(self, epoch: int) -> bool:
        """Say which topics (by their epoch) the offsets belong to. True: others than before, so all count from zero."""
        with self._writing() as cursor:
            row = cursor.execute("SELECT epoch FROM source").fetchone()
            if row is not None and row[0] == epoch:
                return False
            cursor.execute("DELETE FROM source")
            cursor.execute("INSERT INTO source VALUES (?)", (epoch,))
            cursor.execute("DELETE FROM projected")
            return row is not None

    def apply(
        self, records: Sequence[LogRecord], projected: Mapping[tuple[str, int], int]
    ) -> Applied:
        """Apply records of chats, admissions and outcomes, and note the offsets reached (H1).

        Raises HistoryUnavailable, or Unstorable where one record cannot be kept; then nothing of the batch was.
        """
        with self._writing() as cursor:
            contradicted = [
                str(getattr(record.event, "run_id", ""))
                for record in records
                if not _project(cursor, record)
            ]
            cursor.executemany(
                """INSERT INTO projected VALUES (?, ?, ?) ON CONFLICT DO UPDATE
                SET next_offset = max(next_offset, excluded.next_offset)""",
                [(topic, partition, offset) for (topic, partition), offset in projected.items()],
            )
        return Applied(records=len(records), contradicted=tuple(contradicted))

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Cursor]:
        """One transaction: all of it, or nothing where anything is raised."""
        cursor = self._connection.cursor()
        try:
            cursor.execute("BEGIN IMMEDIATE")
            yield cursor
            cursor.execute("COMMIT")
        except sqlite3.Error as error:
            raise HistoryUnavailable(f"history store: {error}") from error
        finally:
            if self._connection.in_transaction:
                self._connection.rollback()


def _project(cursor: sqlite3.Cursor, record: LogRecord) -> bool:
    """Write one event. False: it contradicts what is stored (H5)."""
    try:
        return _write(cursor, record.event, record.appended_ms, record.offset)
    except (OverflowError, UnicodeError) as error:
        raise Unstorable(record, type(error).__name__) from error


def _write(cursor: sqlite3.Cursor, event: Event, ms: int, offset: int) -> bool:
    match event:
        case ChatCreated():
            _created(cursor, event, ms, offset)
        case ChatRenamed():
            _touch(cursor, event.chat_id, event.account_id, ms)
            _title(cursor, event.chat_id, event.title, ms, offset)
        case ChatDeleted():
            _touch(cursor, event.chat_id, event.account_id, ms)
            _deleted(cursor, event.chat_id)
        case LeafChosen():
            _touch(cursor, event.chat_id, event.account_id, ms)
            _leaf_chosen(cursor, event, ms, offset)
        case PromptAdmitted():
            _admitted(cursor, event, ms, offset)
        case PromptRefused():
            _refused(cursor, event)
        case RunConcluded():
            return _concluded(cursor, event, ms)
        case _:
            raise AssertionError(f"{type(event).__name__} is not projected")
    return True


def _touch(cursor: sqlite3.Cursor, chat_id: str, account_id: str, ms: int) -> None:
    cursor.execute(
        """INSERT INTO chats (chat_id, account_id, updated_ms) VALUES (?, ?, ?)
        ON CONFLICT DO UPDATE SET updated_ms = max(updated_ms, excluded.updated_ms)""",
        (chat_id, account_id, ms),
    )


def _is_deleted(cursor: sqlite3.Cursor, chat_id: str) -> bool:
    row = cursor.execute("SELECT deleted FROM chats WHERE chat_id = ?", (chat_id,)).fetchone()
    return bool(row and row[0])


def _created(cursor: sqlite3.Cursor, event: ChatCreated, ms: int, offset: int) -> None:
    _touch(cursor, event.chat_id, event.account_id, ms)
    cursor.execute(
        """UPDATE chats SET created_ms = min(coalesce(created_ms, ?), ?), model = ?,
            system_prompt = CASE WHEN deleted THEN '' ELSE ? END WHERE chat_id = ?""",
        (ms, ms, event.model, event.system_prompt, event.chat_id),
    )
    _title(cursor, event.chat_id, event.title, ms, offset)


def _title(cursor: sqlite3.Cursor, chat_id: str, title: str, ms: int, offset: int) -> None:
    cursor.execute(
        """UPDATE chats SET title = ?, title_ms = ?, title_offset = ?
        WHERE chat_id = ? AND NOT deleted AND (title_ms, title_offset) < (?, ?)""",
        (title, ms, offset, chat_id, ms, offset),
    )


def _leaf_chosen(cursor: sqlite3.Cursor, event: LeafChosen, ms: int, offset: int) -> None:
    cursor.execute(
        """UPDATE chats SET chosen_leaf = ?, chosen_ms = ?, chosen_offset = ?
        WHERE chat_id = ? AND (chosen_ms, chosen_offset) < (?, ?)""",
        (event.message_id, ms, offset, event.chat_id, ms, offset),
    )
    _current_leaf(cursor, event.chat_id)


def _current_leaf(cursor: sqlite3.Cursor, chat_id: str) -> None:
    """The answer admitted last, or what a person chose after that. An answer is as old as its first admission."""
    cursor.execute(
        """UPDATE chats SET current_leaf = coalesce(
            (SELECT message_id FROM messages WHERE chat_id = chats.chat_id AND role = ?
                AND (admitted_ms, admitted_offset) > (chosen_ms, chosen_offset)
                ORDER BY admitted_ms DESC, admitted_offset DESC LIMIT 1),
            chosen_leaf)
        WHERE chat_id = ? AND NOT deleted""",
        (Role.ASSISTANT, chat_id),
    )


def _deleted(cursor: sqlite3.Cursor, chat_id: str) -> None:
    cursor.execute(
        """UPDATE chats SET deleted = 1, title = '', first_words = '', system_prompt = '', current_leaf = NULL,
            chosen_leaf = NULL WHERE chat_id = ?""",
        (chat_id,),
    )
    cursor.execute("DELETE FROM messages WHERE chat_id = ?", (chat_id,))
    cursor.execute("UPDATE runs SET text = '' WHERE chat_id = ?", (chat_id,))


def _admitted(cursor: sqlite3.Cursor, event: PromptAdmitted, ms: int, offset: int) -> None:
    _touch(cursor, event.chat_id, event.account_id, ms)
    _run(cursor, event, model=event.model, status=RunStatus.QUEUED)
    if _is_deleted(cursor, event.chat_id):
        return
    cursor.execute(
        """UPDATE chats SET first_words = ?, first_words_ms = ?, first_words_offset = ?
        WHERE chat_id = ? AND (first_words_ms IS NULL OR (first_words_ms, first_words_offset) > (?, ?))""",
        (title_from(event.content), ms, offset, event.chat_id, ms, offset),
    )
    cursor.execute(
        """INSERT INTO messages (message_id, chat_id, account_id, parent_id, role, content, status, run_id, created_ms)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
        ON CONFLICT DO UPDATE SET created_ms = min(created_ms, excluded.created_ms)""",
        (
            event.user_message_id,
            event.chat_id,
            event.account_id,
            event.parent_id,
            Role.USER,
            event.content,
            RunStatus.DONE,
            event.run_id,
            ms,
        ),
    )
    cursor.execute(
        """INSERT INTO messages (message_id, chat_id, account_id, parent_id, role, content, status, run_id, created_ms,
            admitted_ms, admitted_offset) VALUES (?, ?, ?, ?, ?, '', ?, ?, ?, ?, ?)
        ON CONFLICT DO UPDATE SET created_ms = min(created_ms, excluded.created_ms),
            admitted_ms = CASE WHEN admitted_ms <= excluded.admitted_ms THEN admitted_ms ELSE excluded.admitted_ms END,
            admitted_offset = CASE WHEN (admitted_ms, admitted_offset) <= (excluded.admitted_ms, excluded.admitted_offset)
                THEN admitted_offset ELSE excluded.admitted_offset END""",
        (
            event.assistant_message_id,
            event.chat_id,
            event.account_id,
            event.user_message_id,
            Role.ASSISTANT,
            RunStatus.QUEUED,
            event.run_id,
            ms,
            ms,
            offset,
        ),
    )
    _current_leaf(cursor, event.chat_id)


def _refused(cursor: sqlite3.Cursor, event: PromptRefused) -> None:
    """Only the run: a refusal binds nothing, so it makes no message and is no activity of the chat."""
    _run(cursor, event, model="", status=RunStatus.REFUSED)


def _run(
    cursor: sqlite3.Cursor,
    event: PromptAdmitted | PromptRefused | RunConcluded,
    *,
    model: str,
    status: RunStatus,
) -> None:
    cursor.execute(
        """INSERT INTO runs (run_id, chat_id, account_id, user_message_id, assistant_message_id, model, status)
        VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING""",
        (
            event.run_id,
            event.chat_id,
            event.account_id,
            event.user_message_id,
            event.assistant_message_id,
            model,
            status,
        ),
    )


def _concluded(cursor: sqlite3.Cursor, event: RunConcluded, ms: int) -> bool:
    _touch(cursor, event.chat_id, event.account_id, ms)
    _run(cursor, event, model=event.model, status=RunStatus.QUEUED)
    deleted = _is_deleted(cursor, event.chat_id)
    status = STATUS_OF_FINISH[event.finish_reason]
    text = "" if deleted else event.text
    facts = (
        status,
        event.finish_reason,
        event.input_tokens,
        event.output_tokens,
        event.attempts,
        text,
        event.end_offset,
    )
    stored = cursor.execute(
        """SELECT status, finish_reason, input_tokens, output_tokens, attempts, text, end_offset FROM runs
        WHERE run_id = ?""",
        (event.run_id,),
    ).fetchone()
    if stored[-1] is not None:
        return bool(stored == facts)  # H5
    cursor.execute(
        """UPDATE runs SET model = ?, status = ?, finish_reason = ?, input_tokens = ?, output_tokens = ?, attempts = ?,
        text = ?, end_offset = ? WHERE run_id = ?""",
        (event.model, *facts, event.run_id),
    )
    if deleted:
        return True
    cursor.execute(
        """INSERT INTO messages (message_id, chat_id, account_id, parent_id, role, content, status, finish_reason, run_id,
            token_count, created_ms) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
        ON CONFLICT DO UPDATE SET content = excluded.content, status = excluded.status,
            finish_reason = excluded.finish_reason, token_count = excluded.token_count,
            created_ms = min(created_ms, excluded.created_ms)""",
        (
            event.assistant_message_id,
            event.chat_id,
            event.account_id,
            event.user_message_id,
            Role.ASSISTANT,
            event.text,
            status,
            event.finish_reason,
            event.run_id,
            event.output_tokens,
            ms,
        ),
    )
    return True


def title_from(content: str) -> str:
    """The title of a chat that nobody named: the first words of its first message, one line of TITLE_CHARS_MAX characters."""
    line = " ".join(content[: TITLE_CHARS_MAX * 8].split())
    if len(line) <= TITLE_CHARS_MAX:
        return line
    cut = line[: TITLE_CHARS_MAX - 1]
    at_word = cut.rpartition(" ")[0]
    return (at_word if len(at_word) >= TITLE_CHARS_MAX // 2 else cut).rstrip() + "…"
