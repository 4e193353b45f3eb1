"""`turnlog verify` can fail: every check is seen to fail on a damaged log, and none on a sound one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from infra.verify.findings import GRACE_MS, Findings, LogTime
from infra.verify.judgement import Audit
from infra.verify.run_audit import AcceptedStream
from schemas.events import Event
from schemas.events.account_snapshots import AccountSnapshot
from schemas.events.accounts import LimitsChanged, UsageMeasured
from schemas.events.admissions import PromptAdmitted
from schemas.events.outcomes import RunConcluded
from schemas.events.quotas import QuotaReleased, QuotaReserved
from schemas.events.tokens import (
    AttemptStarted,
    RunEnded,
    RunEvent,
    RunQueued,
    RunRedirected,
    TokensGenerated,
)
from schemas.events.usage import UsageSettled
from schemas.topics import ACCOUNTS, QUOTAS, TOKENS
from schemas.vocabulary import EndCause, EndWriter, FinishReason
from tests.decisions.recorded_system import LIMITS, Item, RecordedSystem, altered, audited, dropped

# Long enough that nothing may be missing any more.
SETTLED_S = GRACE_MS // 1_000 + 15


def sound() -> RecordedSystem:
    """An answer, a takeover with a zombie, cancels early and late, a refusal, a redirect, a conflict; then all is settled."""
    system = RecordedSystem()
    system.answer(system.submit(key="k1"))
    taken = system.submit()
    system.start(taken)
    system.say(taken, 0, "half ")
    system.start(taken, attempt=2)
    system.say(taken, 1, "zombie")
    system.say(taken, 1, "whole", attempt=2)
    system.stop(taken, 2, attempt=2)
    system.say(taken, 2, "late", attempt=2)
    cancelled = system.submit()
    system.start(cancelled)
    system.say(cancelled, 0, "seen")
    system.cancel(cancelled)
    system.say(cancelled, 1, "unseen")
    system.cancel(system.submit())
    system.submit(tokens=1_000)
    system.submit(key="k1")
    system.submit(key="k1", fingerprint="other")
    system.save()
    system.runs_for(SETTLED_S)
    return system


def invariants(findings: Findings) -> set[str]:
    return {violation.invariant for violation in findings.violations}


def test_a_sound_log_has_no_violation_and_is_counted() -> None:
    findings = audited(sound().items)
    assert findings.violations == []
    assert findings.pending == []
    expected = {
        "prompts": 7,
        "runs": 7,
        "finished runs": 4,
        "finished: stop": 2,
        "finished: cancelled": 2,
        "refusals": 1,
        "refusals: context_too_long": 1,
        "redirects": 2,
        "cancels": 2,
        "attempts": 4,
        "runs with a second attempt": 1,
        "deltas": 5,
        "tokens": 5,
        "ignored records": 3,
        "ignored: TokensGenerated fenced": 1,
        "ignored: TokensGenerated after the end": 2,
        "open runs": 0,
        "open reservations": 0,
        "ticks": SETTLED_S,
    }
    assert {name: findings.counts[name] for name in expected} == expected


def test_records_written_twice_are_no_violation() -> None:
    system = sound()
    twice: list[Item] = []
    ends: dict[str, int] = {}
    for item in system.items:
        for _ in range(2):
            offset = ends.get(item.topic.name, 0)
            ends[item.topic.name] = offset + 1
            # Token records keep their offsets: runs are addresses.
            record = item.record
            if item.topic is not TOKENS and item.topic is not ACCOUNTS:
                record = replace(record, offset=offset)
            twice.append(Item(topic=item.topic, record=record))
    findings = audited(twice)
    assert findings.violations == []
    assert findings.counts["copies written twice"] > 10


Damage = Callable[[list[Item]], list[Item]]


def first_of(items: list[Item], kind: type[Event]) -> Item:
    return next(item for item in items if isinstance(item.record.event, kind))


def change(kind: type[Event], **fields: object) -> Damage:
    return lambda items: altered(items, kind, lambda item: item.changed(**fields))


def change_first(kind: type[Event], **fields: object) -> Damage:
    def damage(items: list[Item]) -> list[Item]:
        target = first_of(items, kind)
        return [item.changed(**fields) if item is target else item for item in items]

    return damage


def drop_first(kind: type[Event]) -> Damage:
    def damage(items: list[Item]) -> list[Item]:
        target = first_of(items, kind)
        return [item for item in items if item is not target]

    return damage


def repeat_first(kind: type[Event], *, event_id: str | None = None, **fields: object) -> Damage:
    """The first event of this kind once more, under another id or with other content."""

    def damage(items: list[Item]) -> list[Item]:
        target = first_of(items, kind)
        again = target.changed(**fields)
        record = replace(again.record, event_id=event_id or target.record.event_id)
        at = items.index(target) + 1
        return [*items[:at], replace(again, record=record), *items[at:]]

    return damage


def settle_late(items: list[Item]) -> list[Item]:
    def late(item: Item) -> Item:
        record = replace(item.record, appended_ms=item.record.appended_ms + GRACE_MS + 10_000)
        return replace(item, record=record)

    return altered(items, UsageSettled, late)


def lower_the_limit(items: list[Item]) -> list[Item]:
    tiers = {
        tier: msgspec.structs.replace(limits, tokens_per_window=160)
        for tier, limits in LIMITS.tiers.items()
    }
    return altered(items, LimitsChanged, lambda item: item.changed(tiers=tiers))


def queue_the_redirected(items: list[Item]) -> list[Item]:
    """As if two concurrent submissions had both won."""
    queued = first_of(items, RunQueued).record.event

    def admitted(item: Item) -> Item:
        run_id = item.record.event.run_id  # type: ignore[attr-defined]
        event = msgspec.structs.replace(queued, run_id=run_id)
        return replace(item, record=replace(item.record, event=event))

    return altered(items, RunRedirected, admitted)


def stray(kind: type[Event]) -> Damage:
    """An output for a run that nobody submitted."""

    def damage(items: list[Item]) -> list[Item]:
        system = RecordedSystem()
        system.minted = 100
        system.now_ms += 1_000
        system.answer(system.submit())
        target = first_of(system.items, kind)
        record = replace(target.record, offset=1_000, event_id="stray")
        return [replace(target, record=record), *items]

    return damage


DAMAGES: dict[str, tuple[str, Damage]] = {
    "a terminal is lost": (
        "I4",
        lambda items: dropped(items, RunEnded),
    ),
    "a terminal hides a lost delta": ("I4", drop_first(TokensGenerated)),
    "a prompt has no decision": ("I1", drop_first(RunQueued)),
    "a refusal is lost": (
        "I1",
        lambda items: [
            item
            for item in items
            if getattr(item.record.event, "writer", None) is not EndWriter.ADMISSION
        ],
    ),
    "an admission is lost": ("I1", drop_first(PromptAdmitted)),
    "the concluded text is another": ("I4", change_first(RunConcluded, text="one  two")),
    "a conclusion is lost": ("I4", drop_first(RunConcluded)),
    "a run is concluded twice": ("I4", repeat_first(RunConcluded, event_id="other")),
    "a conclusion counts otherwise": ("I5", change_first(RunConcluded, output_tokens=3)),
    "a conclusion names another end": ("I5", change_first(RunConcluded, end_offset=0)),
    "usage is measured otherwise": ("I5", change_first(UsageMeasured, output_tokens=1)),
    "usage is not measured": ("I5", drop_first(UsageMeasured)),
    "the bill counts otherwise": ("I5", change_first(UsageSettled, output_tokens=1)),
    "the bill has another reason": (
        "I5",
        change_first(UsageSettled, finish_reason=FinishReason.ERROR),
    ),
    "a run is billed twice": ("I5", repeat_first(UsageSettled, event_id="other")),
    "a settlement is lost": ("I6", drop_first(UsageSettled)),
    "a settlement comes late": ("I6", settle_late),
    "a release is lost": ("I6", drop_first(QuotaReleased)),
    "too much is released": ("I6", change_first(QuotaReleased, tokens=149)),
    "something is released twice": ("I6", repeat_first(QuotaReleased, event_id="other")),
    "a settlement is in another window": ("I6", change_first(UsageSettled, window="2001-01-01")),
    "a reservation is lost": ("I6", drop_first(QuotaReserved)),
    "more was reserved than granted": ("I6", change_first(QuotaReserved, output_tokens=51)),
    "a reservation for a run that is not queued": (
        "I6",
        lambda items: dropped(items, RunQueued),
    ),
    "a reservation for nobody's run": ("I6", stray(QuotaReserved)),
    "a bill for nobody's run": ("I5", stray(UsageSettled)),
    "an answer to nobody's run": ("I4", stray(RunConcluded)),
    "more was reserved than the limit": ("I7", lower_the_limit),
    "a reservation in another window": ("I7", change(QuotaReserved, window="2001-01-01")),
    "an answer holds a blocked phrase": (
        "I11",
        change_first(RunQueued, blocked_phrases=("TWO",)),
    ),
    "an answer is longer than its grant": ("I7", change_first(RunQueued, granted_output_tokens=1)),
    "a prompt is longer than its budget": ("I7", change_first(AttemptStarted, input_tokens=101)),
    "one id has two contents": ("I12", repeat_first(QuotaReserved, output_tokens=1)),
    "a decision that does not follow": ("I12", change_first(PromptAdmitted, content="another")),
    "an output that nothing explains": ("I12", repeat_first(QuotaReserved, event_id="other")),
    "a snapshot of another state": ("I12", change_first(AccountSnapshot, windows=())),
    "a snapshot at another place": ("I12", change_first(AccountSnapshot, applied_offset=10_000)),
    "an account log that no fold accepts": (
        "I12",
        change_first(UsageMeasured, output_tokens=1_000),
    ),
    "one key, two runs": ("I14", queue_the_redirected),
    "one key, sent to another run": ("I14", change(RunRedirected, to_run_id="run_other")),
    "another body is not a conflict": (
        "I14",
        lambda items: [
            item.changed(to_run_id=first_of(items, RunQueued).record.event.run_id)  # type: ignore[attr-defined]
            if isinstance(item.record.event, RunRedirected)
            else item
            for item in items
        ],
    ),
}


@pytest.mark.parametrize(("invariant", "damage"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_found(invariant: str, damage: Damage) -> None:
    assert invariant in invariants(audited(damage(sound().items)))


def test_an_open_run_beyond_its_deadline_is_found() -> None:
    system = RecordedSystem()
    run_id = system.submit()
    system.start(run_id)
    system.runs_for(89)
    assert audited(system.items).violations == []
    assert audited(system.items).counts["open runs"] == 1
    system.runs_for(5)
    assert invariants(audited(system.items)) == {"I1"}


def test_a_run_that_ended_beyond_its_deadline_is_found() -> None:
    system = RecordedSystem()
    run_id = system.submit()
    system.runs_for(95)
    system.cancel(run_id)
    system.runs_for(30)
    assert invariants(audited(system.items)) == {"I1"}


def test_time_in_which_the_system_stood_still_does_not_count() -> None:
    system = RecordedSystem()
    run_id = system.submit()
    system.start(run_id)
    system.runs_for(5)
    system.now_ms += 10 * 3_600_000
    system.runs_for(5)
    system.cancel(run_id)
    system.runs_for(30)
    assert audited(system.items).violations == []


def test_what_was_caused_just_now_is_pending_and_not_missed() -> None:
    system = RecordedSystem()
    system.submit()
    items = dropped(system.items, PromptAdmitted, QuotaReserved)
    findings = audited(items)
    assert findings.violations == []
    assert {each.invariant for each in findings.pending} == {"I1", "I6"}


def test_waiting_makes_what_is_pending_a_violation() -> None:
    findings = Findings()
    time = LogTime()
    time.saw(1_000)
    findings.missing("I6", "run", "x", age_ms=time.age_ms(1_000))
    time.waited_ms = GRACE_MS + 5_000
    findings.missing("I6", "run", "x", age_ms=time.age_ms(1_000))
    assert (len(findings.pending), len(findings.violations)) == (1, 1)


def test_runs_whose_beginning_is_gone_are_not_judged() -> None:
    system = sound()
    for first_token in range(1, system.ends[TOKENS.name]):
        findings = audited(system.items, first_token=first_token)
        assert findings.violations == []
        assert findings.counts["runs"] < 7


def test_accounts_whose_beginning_is_gone_are_not_decided_again() -> None:
    system = sound()
    findings = audited(system.items, first_account=3)
    assert findings.counts["account partitions not judged from the start"] == 1
    assert invariants(findings) <= {"I5"}  # A measurement of a run before it may be gone.


def test_run_ids_of_another_epoch_are_not_judged() -> None:
    system = sound()
    audit = Audit(partitions=1, epoch=2)
    for item in system.items:
        if item.topic is TOKENS:
            audit.runs.take(item.record)
        elif item.topic is QUOTAS:
            audit.take(item.topic, item.record)
    findings = audit.judge()
    assert findings.violations == []
    assert findings.counts["runs not judged"] == 7


def tokens(index: int, *, nonce: str = "n1", count: int = 1) -> TokensGenerated:
    return TokensGenerated(run_id="r", nonce=nonce, index=index, count=count, text="x")


def attempt(number: int, nonce: str) -> AttemptStarted:
    return AttemptStarted(run_id="r", attempt=number, nonce=nonce, worker_id="w", input_tokens=1)


def ended(end: int) -> RunEnded:
    return RunEnded(run_id="r", cause=EndCause.STOP, writer=EndWriter.WORKER, nonce="n1", end=end)


@pytest.mark.parametrize(
    ("invariant", "accepted"),
    [
        ("I2", [attempt(1, "n1"), tokens(1)]),
        ("I2", [attempt(1, "n1"), tokens(0), tokens(0)]),
        ("I2", [attempt(1, "n1"), tokens(0, count=0)]),
        ("I2", [attempt(1, "n1"), ended(0), tokens(0)]),
        ("I3", [attempt(1, "n1"), tokens(0, nonce="n2")]),
        ("I3", [attempt(1, "n1"), attempt(2, "n2"), tokens(0, nonce="n1")]),
        ("I3", [attempt(1, "n1"), attempt(3, "n2")]),
        ("I3", [attempt(1, "n1"), attempt(2, "n1")]),
        ("I1", [attempt(1, "n1"), ended(1)]),
        ("I1", [attempt(1, "n1"), ended(0), ended(0)]),
    ],
)
def test_a_fold_that_accepts_what_it_must_not_is_found(
    invariant: str, accepted: list[RunEvent]
) -> None:
    stream = AcceptedStream()
    for event in accepted:
        stream.take(event, ends=isinstance(event, RunEnded))
    assert invariant in {broken for broken, _ in stream.broken}


def test_a_sound_stream_breaks_nothing() -> None:
    stream = AcceptedStream()
    for event in (attempt(1, "n1"), tokens(0), tokens(1, count=3), ended(4)):
        stream.take(event, ends=isinstance(event, RunEnded))
    assert (stream.broken, stream.n, stream.text) == ([], 4, "xx")
