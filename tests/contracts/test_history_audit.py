"""The audit of the history store: sound stores pass, damaged ones do not."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from infra.history.sqlite import HISTORY_FILE
from infra.history.sqlite_writer import HistoryWriter
from infra.verify.findings import Findings, LogTime
from infra.verify.history_audit import HistoryAudit
from tests.contracts.history_log import HistoryLog
from tests.contracts.test_history_sqlite import apply_to, conversation


def audited(log: HistoryLog, store: Path) -> Findings:
    time = LogTime()
    audit = HistoryAudit(time)
    for item in log.records:
        time.saw(item.record.appended_ms)
        audit.take(item.topic, item.record)
    findings = Findings()
    audit.judge(findings, store)
    return findings


@pytest.fixture
def store(tmp_path: Path) -> Path:
    writer = HistoryWriter(tmp_path / HISTORY_FILE)
    apply_to(writer, conversation().records)
    writer.close()
    return tmp_path / HISTORY_FILE


def test_a_store_that_holds_what_the_topics_say_passes(store: Path) -> None:
    findings = audited(conversation(), store)
    assert findings.violations == findings.pending == []
    assert findings.counts["history rows compared"] > 10


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE runs SET text = 'Records, in other order.' WHERE run_id = 'a1.run'",
        "UPDATE messages SET content = 'x' WHERE message_id = 'a1.answer'",
        "UPDATE messages SET parent_id = NULL WHERE message_id = 'a2.user'",
        "DELETE FROM messages WHERE message_id = 'a1.user'",
        "UPDATE chats SET current_leaf = 'a1.answer' WHERE chat_id = 'chat-a'",
        "UPDATE chats SET deleted = 0 WHERE chat_id = 'chat-c'",
        "DELETE FROM runs WHERE run_id = 'a3.run'",
    ],
)
def test_damage_is_found(store: Path, damage: str) -> None:
    with sqlite3.connect(store) as writing:
        writing.execute(damage)
    assert {each.invariant for each in audited(conversation(), store).violations} == {"I4"}


def test_a_store_that_is_behind_is_waited_for(store: Path) -> None:
    log = conversation()
    log.concluded("chat-a", "a4", text="not projected yet")
    findings = audited(log, store)
    assert findings.violations == []
    assert [each.invariant for each in findings.pending] == ["I4"]


def test_a_store_that_is_ahead_is_held_to_its_finished_runs_only(store: Path) -> None:
    log = conversation()
    more = conversation()
    more.renamed("chat-a", "later")
    more.deleted("chat-b")
    writer = HistoryWriter(store)
    apply_to(writer, more.records[-2:])
    writer.close()
    assert audited(log, store).violations == []
    with sqlite3.connect(store) as writing:
        writing.execute("UPDATE runs SET text = 'x' WHERE run_id = 'a1.run'")
    assert [each.subject for each in audited(log, store).violations] == ["a1.run"]


def test_a_missing_store_is_said(tmp_path: Path) -> None:
    findings = audited(conversation(), tmp_path / HISTORY_FILE)
    assert findings.violations == []
    assert findings.counts["history not compared: there is no store"] == 1
