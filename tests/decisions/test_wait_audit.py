"""The report on estimated waits: what it takes from the log, and what it makes of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from infra.verify.findings import Record
from infra.verify.wait_audit import Wait, WaitAudit, summary
from schemas.events.tokens import RunQueued
from schemas.vocabulary import Lane
from tests.decisions.token_log import PARTITION, TokenLog


def waits_of(log: TokenLog) -> list[Wait]:
    audit = WaitAudit()
    for seen in log.records:
        audit.take(
            Record(
                partition=PARTITION,
                offset=seen.offset,
                appended_ms=seen.appended_ms,
                event_id=seen.event_id,
                event=seen.event,
            )
        )
    return audit.waits


def queue(log: TokenLog, run_id: str, *, told_ms: int, after: str | None = None) -> None:
    seen = log.queued(run_id)
    assert isinstance(seen.event, RunQueued)
    log.records.pop()
    log.append(replace(seen.event, wait_ms=told_ms, after_run_id=after))


def test_a_wait_lasts_from_the_admission_to_the_first_attempt_and_counts_once() -> None:
    log = TokenLog()
    run, never, cancelled, second = (log.mint() for _ in range(4))
    queue(log, run, told_ms=4_000)
    queue(log, never, told_ms=1)
    queue(log, cancelled, told_ms=1)
    queue(log, second, told_ms=1, after=run)
    log.now_ms += 5_000
    log.tick()
    log.cancelled(cancelled)
    log.attempt(run, 1, "a")
    log.attempt(run, 1, "zombie")
    log.attempt(second, 1, "s")
    log.now_ms += 60_000
    log.attempt(run, 2, "b")
    log.cancelled(run)
    found = waits_of(log)
    assert found == [Wait(model="m", lane=Lane.FREE, estimated_ms=4_000, waited_ms=5_000)]
    assert found[0].error == pytest.approx(0.2)


def test_a_summary_says_how_wrong_half_of_them_were() -> None:
    waits = [
        Wait(model="m", lane=Lane.FREE, estimated_ms=told, waited_ms=10_000)
        for told in (10_000, 9_000, 8_000, 5_000, 0)
    ]
    found = summary(waits)
    assert found is not None
    assert found.error_median == pytest.approx(0.2)
    assert found.good_share == pytest.approx(0.6)
    assert (found.runs, found.waited_p95_ms, found.estimated_median_ms) == (5, 10_000, 8_000)
    assert found.bias == pytest.approx(32 / 50 - 1), "told too short"
    one = summary(waits[:1])
    assert one is not None
    assert one.error_p90 == 0
    assert summary([]) is None
    nobody = summary([Wait(model="m", lane=Lane.FREE, estimated_ms=5, waited_ms=0)])
    assert nobody is not None
    assert nobody.bias is None
