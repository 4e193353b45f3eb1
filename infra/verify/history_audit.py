"""The history store under audit: it must hold what its topics say, and say it however often and in whatever order it is built (I4, I12).

The store is built again from the records into files of its own, twice and in different orders, and compared with the living one.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from infra.history.sqlite import CHAT_COLUMNS, HISTORY_FILE, MESSAGE_COLUMNS, RUN_COLUMNS
from infra.history.sqlite_writer import HistoryWriter, Unstorable
from infra.log.records import LogRecord
from infra.verify.findings import Findings, LogTime
from schemas.topics import Topic

_TABLES: Final = {
    "chat": f"SELECT {CHAT_COLUMNS} FROM chats",
    "message": f"SELECT {MESSAGE_COLUMNS} FROM messages m",
    "run": f"SELECT {RUN_COLUMNS} FROM runs",
}
# In the columns of a run: its text, and the offset of its end.
_RUN_TEXT: Final = 11
_RUN_END: Final = 12

Dump = Mapping[str, Mapping[str, Sequence[Any]]]


@dataclass(slots=True)
class HistoryAudit:
    """Take chats, admissions and outcomes in, in order within a partition."""

    time: LogTime
    records: list[LogRecord] = field(default_factory=list)
    reached: dict[tuple[str, int], int] = field(default_factory=dict)
    newest_ms: int = 0
    whole: bool = True

    def begins(self, first: int) -> None:
        """The first offset that is kept of a partition of one of the topics."""
        self.whole = self.whole and first == 0

    def take(self, topic: Topic, record: LogRecord) -> None:
        """One record."""
        self.records.append(record)
        self.reached[topic.name, record.partition] = record.offset + 1
        self.newest_ms = max(self.newest_ms, record.appended_ms)

    def judge(self, findings: Findings, living: Path) -> None:
        """Compare with the store at `living`. Blocking: it builds two stores in a folder of its own."""
        with tempfile.TemporaryDirectory(prefix="turnlog-verify-") as folder:
            first = build(Path(folder) / "first.db", self.records)
            second = build(
                Path(folder) / "second.db", [*reversed(self.records), *self.records[:100]]
            )
        for table, name in differences(first, second):
            findings.broken("I12", name, f"history built in another order has another {table}")
        if not living.exists():
            findings.counts["history not compared: there is no store"] += 1
            return
        self._compare(findings, first, living)

    def _compare(self, findings: Findings, wanted: Dump, living: Path) -> None:
        with closing(sqlite3.connect(f"{living.absolute().as_uri()}?mode=ro", uri=True)) as store:
            store.execute("BEGIN")
            marks = {
                (topic, partition): offset
                for topic, partition, offset in store.execute(
                    "SELECT topic, partition, next_offset FROM projected"
                )
            }
            found = dump(store)
        behind = [at for at, offset in self.reached.items() if marks.get(at, 0) < offset]
        ahead = any(offset > self.reached.get(at, 0) for at, offset in marks.items())
        if behind:
            findings.missing(
                "I4",
                HISTORY_FILE,
                f"history has not taken {behind[0][0]}/{behind[0][1]} to its end",
                age_ms=self.time.age_ms(self.newest_ms),
            )
        exact = self.whole and not behind and not ahead
        for table, name in differences(wanted, found):
            have = found[table].get(name)
            if exact or (table == "run" and _concluded(wanted[table][name], have, found)):
                findings.broken("I4", name, f"the {table} in history is not what its topics say")
        findings.counts["history rows compared"] = sum(map(len, wanted.values()))


def _concluded(want: Sequence[Any], have: Sequence[Any] | None, found: Dump) -> bool:
    """Whether both say how the run ended: then only a deletion of its chat may make them differ."""
    if have is None or want[_RUN_END] is None or have[_RUN_END] is None:
        return False
    chat = found["chat"].get(have[1])
    return bool(have[_RUN_TEXT]) or chat is None or not chat[-1]


def differences(wanted: Dump, found: Dump) -> list[tuple[str, str]]:
    """Table and id of each row that `found` lacks or has otherwise. Rows that only `found` has may come from another cluster."""
    return [
        (table, name)
        for table, rows in wanted.items()
        for name, row in rows.items()
        if found[table].get(name) != row
    ]


def build(path: Path, records: Sequence[LogRecord]) -> Dump:
    """What a new store holds after these records."""
    writer = HistoryWriter(path)
    try:
        left = list(records)
        while True:
            try:
                writer.apply(left, {})
                break
            except Unstorable as error:  # The projector parks it.
                left = [record for record in left if record is not error.record]
    finally:
        writer.close()
    with closing(sqlite3.connect(path)) as store:
        return dump(store)


def dump(store: sqlite3.Connection) -> Dump:
    """All that readers can see, by table and id."""
    return {
        table: {row[0]: tuple(row) for row in store.execute(query)}
        for table, query in _TABLES.items()
    }
