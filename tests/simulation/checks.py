"""What must hold when a seed has come to rest.

Most of it is the audit of `infra/verify`, which runs over the recorded topics of the real system too. Beside it stand checks that need
what only a simulator knows: what viewers were shown, what the engine was given, who was alive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final, cast

from infra.verify.findings import Record as AuditRecord
from infra.verify.findings import Violation
from infra.verify.judgement import Audit
from infra.verify.verdicts import Kind
from processors.decisions.account_partition import AccountPartition
from schemas.events.account_snapshots import AccountSnapshotEvent
from schemas.events.accounts import AccountEvent, UsageMeasured
from schemas.events.generations import GenerationRequested
from schemas.events.outcomes import RunConcluded
from schemas.events.tokens import (
    AttemptStarted,
    PartitionTick,
    RunCancelled,
    RunEnded,
    RunEvent,
)
from schemas.events.usage import UsageSettled
from schemas.run_fold import NEW_RUN, RunState, fold
from schemas.topics import (
    ACCOUNT_SNAPSHOTS,
    ACCOUNTS,
    ADMISSIONS,
    OUTCOMES,
    QUOTAS,
    TOKENS,
    USAGE,
    generations,
)
from schemas.vocabulary import EndWriter, FinishReason
from tests.simulation.busy_checks import Accepted, broken, busy_chats
from tests.simulation.clients import LONG_DEADLINE_MS
from tests.simulation.engine import incoherent
from tests.simulation.log import Record
from tests.simulation.simulation import Simulation
from tests.simulation.world import KEYED_PARTITIONS, LANES, MODEL, TOKEN_PARTITIONS

# At rest nothing is on its way any more: whatever is missing, is missing for good.
AT_REST_MS: Final = 10**9


def check(run: Simulation) -> list[Violation]:
    """Every invariant that a seed can break. Counts what it saw into the world's `sometimes`."""
    audit = _audit(run)
    accepted = _accepted(run)
    violations = list(audit.judge().violations)
    if not run.rested:
        violations.append(broken("I1", "-", "the system does not come to rest"))
    for each in (
        _liveness(run, audit),
        _coherence(audit),
        _cancels(run, accepted),
        _ends(accepted),
        _context_failures(accepted),
        _bills(run, audit),
        _viewers(run, audit),
        busy_chats(run, accepted),
        _policies(audit),
        _restored(run, audit),
    ):
        violations.extend(each)
    _count(run, audit)
    return violations


def _audit(run: Simulation) -> Audit:
    log = run.world.log
    audit = Audit(partitions=KEYED_PARTITIONS)
    for number in range(TOKEN_PARTITIONS):
        audit.runs.begins(number, 0)
        for record in log.partition(TOKENS, number).records:
            audit.runs.take(_audited(number, record))
    for number in range(KEYED_PARTITIONS):
        audit.accounts.begins(number, 0)
        for topic in (ACCOUNTS, ACCOUNT_SNAPSHOTS, QUOTAS, USAGE, ADMISSIONS, OUTCOMES):
            for record in log.partition(topic, number).records:
                audit.take(topic, _audited(number, record))
    audit.time.waited_ms = AT_REST_MS
    return audit


def _audited(number: int, record: Record) -> AuditRecord:
    return AuditRecord(
        partition=number,
        offset=record.offset,
        appended_ms=record.appended_ms,
        event_id=record.event_id,
        event=record.event,
    )


def _accepted(run: Simulation) -> dict[str, list[Accepted]]:
    """Per run the records that count, by the fold that every process uses."""
    found: dict[str, list[Accepted]] = {}
    for partition in run.world.log.partitions(TOKENS):
        states: dict[str, RunState] = {}
        for record in partition.records:
            if isinstance(record.event, PartitionTick):
                continue
            event = cast("RunEvent", record.event)
            state, counted = fold(states.get(event.run_id, NEW_RUN), event)
            if counted:
                states[event.run_id] = state
                found.setdefault(event.run_id, []).append(
                    Accepted(record=record, event=event, ends=state.ended)
                )
    return found


def _liveness(run: Simulation, audit: Audit) -> Iterator[Violation]:
    """I1, I13: what was queued ends by its own means, though anything was killed, as long as a worker is alive in the end.

    One way to end late is known: context fails a prompt whose RunQueued is still on its way, so that its RunEnded does not count (R8),
    and then only the deadline ends the run.
    """
    failed = {
        record.event.run_id
        for record in run.world.log.records(TOKENS)
        if isinstance(record.event, RunEnded) and record.event.writer is EndWriter.CONTEXT
    }
    for facts in audit.runs.runs.values():
        queued = facts.state.queued
        if queued is None:
            continue
        if not facts.state.ended:
            yield broken("I1", facts.run_id, "no terminal")
        elif (
            facts.state.finish_reason is FinishReason.DEADLINE
            and queued.deadline_ms >= LONG_DEADLINE_MS
            and not run.workers_died
        ):
            if facts.run_id in failed:
                run.world.sometimes["context failed before the queue"] += 1
                continue
            yield broken("I13", facts.run_id, "it was queued, workers live, and nobody answered")
    for run_id in run.client.admitted_runs:
        known = audit.runs.runs.get(run_id)
        if known is None or known.state.queued is None:
            yield broken("I13", run_id, "it was answered 200, and is not queued")


def _coherence(audit: Audit) -> Iterator[Violation]:
    """I3, E2: every token was generated after exactly the text before it; the ids kept for a takeover are those of the text."""
    for facts in audit.runs.runs.values():
        at = incoherent(facts.state.text)
        if at is not None:
            yield broken("I3", facts.run_id, f"token {at} does not follow what lies before it")


def _cancels(run: Simulation, accepted: dict[str, list[Accepted]]) -> Iterator[Violation]:
    """I8: at the first cancel of a run that is not over the answer ends; of one not queued yet, as soon as it is."""
    cancelled: dict[str, int] = {}
    for record in run.world.log.records(TOKENS):
        if isinstance(record.event, RunCancelled):
            cancelled.setdefault(record.event.run_id, record.offset)
    for run_id, offset in cancelled.items():
        for each in accepted.get(run_id, ()):
            after = each.record.offset > offset
            if after and not each.ends and not isinstance(each.event, RunCancelled):
                yield broken("I8", run_id, f"{type(each.event).__name__} counted after its cancel")


def _ends(accepted: dict[str, list[Accepted]]) -> Iterator[Violation]:
    """I3: only the attempt that holds the run ends it."""
    for run_id, records in accepted.items():
        last = records[-1].event
        if isinstance(last, RunEnded) and last.writer is EndWriter.WORKER:
            attempts = [each.event for each in records if isinstance(each.event, AttemptStarted)]
            if not attempts or attempts[-1].nonce != last.nonce:
                yield broken("I3", run_id, "a fenced attempt ended it")


def _context_failures(accepted: dict[str, list[Accepted]]) -> Iterator[Violation]:
    """I13 (R8): a replay of context never ends an answer that has begun."""
    for run_id, records in accepted.items():
        begun = any(isinstance(each.event, AttemptStarted) for each in records)
        last = records[-1].event
        if begun and isinstance(last, RunEnded) and last.writer is EndWriter.CONTEXT:
            yield broken("I13", run_id, "context ended an answer that had begun")


def _bills(run: Simulation, audit: Audit) -> Iterator[Violation]:
    """I5: one measure and one settlement a run, by id; the input is that of the first request. I6: nothing stays reserved."""
    log = run.world.log
    prompts: dict[str, int] = {}
    for lane in LANES:
        for partition in log.partitions(generations(MODEL, lane)):
            for record in partition.records:
                request = cast("GenerationRequested", record.event)
                prompts.setdefault(request.run_id, len(request.prompt_ids))
    ids: dict[tuple[str, str], set[str]] = defaultdict(set)
    for topic in (ACCOUNTS, USAGE, OUTCOMES):
        for record in log.records(topic):
            event = record.event
            if isinstance(event, UsageMeasured | UsageSettled | RunConcluded):
                ids[event.run_id, type(event).__name__].add(record.event_id)
            if isinstance(event, UsageSettled) and event.input_tokens not in (
                0,
                prompts.get(event.run_id),
            ):
                yield broken("I5", event.run_id, "settled input is not the assembled prompt")
    for (run_id, kind), found in ids.items():
        if len(found) > 1:
            yield broken("I5", run_id, f"{kind} under {len(found)} ids")
    for partition_again in audit.accounts._again.values():
        for account in partition_again._accounts.values():
            if account.open or any(use.reserved for use in account.windows):
                yield broken("I6", account.account_id, "tokens are reserved at rest")


def _viewers(run: Simulation, audit: Audit) -> Iterator[Violation]:
    """I4, I15: through all its connections every viewer was shown the stored message, byte for byte, once and in order."""
    concluded = {
        record.event.run_id: record.event
        for record in run.world.log.records(OUTCOMES)
        if isinstance(record.event, RunConcluded)
    }
    for viewer in run.client.viewers:
        for complaint in viewer.complaints:
            yield broken("I4", viewer.run_id, complaint)
        facts = audit.runs.runs.get(viewer.run_id)
        if facts is None or facts.state.queued is None:
            continue
        stored = concluded.get(viewer.run_id)
        if viewer.ended is None:
            yield broken("I4", viewer.run_id, "a viewer never saw the end")
        elif stored is None:
            yield broken("I4", viewer.run_id, "the answer is not stored")
        elif (viewer.text, viewer.tokens) != (stored.text, stored.output_tokens):
            yield broken("I4", viewer.run_id, f"shown {viewer.text!r}, stored {stored.text!r}")
        elif viewer.ended.finish_reason is not stored.finish_reason:
            yield broken("I4", viewer.run_id, "the end that was shown is not the one stored")


def _policies(audit: Audit) -> Iterator[Violation]:
    """S7: at rest all partitions have the same policy."""
    newest = {number: again.limits[-1].limits for number, again in audit.accounts._again.items()}
    if len({limits.version for limits in newest.values()}) > 1:
        yield broken("S7", "-", f"the partitions do not agree: {newest}")


def _restored(run: Simulation, audit: Audit) -> Iterator[Violation]:
    """I12: the state that rests in the snapshots, and the fold of everything on top of it, is the fold from zero."""
    log = run.world.log
    for number, again in audit.accounts._again.items():
        rows = [
            cast("AccountSnapshotEvent", record.event)
            for record in log.partition(ACCOUNT_SNAPSHOTS, number).records
        ]
        restored = AccountPartition(rows)
        for record in log.partition(ACCOUNTS, number).records:
            restored.take(
                offset=record.offset,
                appended_ms=record.appended_ms,
                event_id=record.event_id,
                event=cast("AccountEvent", record.event),
            )
        for account_id, account in again._accounts.items():
            if restored.account(account_id) != account:
                yield broken("I12", account_id, "from the snapshots it is another account")


def _count(run: Simulation, audit: Audit) -> None:
    """What a batch must have seen, for its silence to mean something."""
    sometimes = run.world.sometimes
    for (kind, event), number in audit.runs.ignored.items():
        if kind is Kind.FENCED:
            sometimes["fencing seen"] += number
        elif kind is Kind.LOST_RACE and event == "AttemptStarted":
            sometimes["lost attempt race"] += number
        elif kind is Kind.GAP:
            sometimes["gap ignored"] += number
    for facts in audit.runs.runs.values():
        if facts.state.queued is None:
            continue
        sometimes["queued"] += 1
        if facts.accepted.attempt > 1 and facts.state.n:
            sometimes["takeover"] += 1
        if facts.state.cancelled_early is not None:
            sometimes["cancelled before it was queued"] += 1
        if facts.state.finish_reason is not None:
            sometimes[f"finished {facts.state.finish_reason.value}"] += 1
    _count_pairs(run)


def _count_pairs(run: Simulation) -> None:
    sometimes = run.world.sometimes
    measured: set[str] = set()
    for record in run.world.log.records(ACCOUNTS):
        if isinstance(record.event, UsageMeasured):
            if record.event.run_id in measured:
                sometimes["duplicate settlement ignored"] += 1
            measured.add(record.event.run_id)
    ends: set[str] = set()
    cancels: set[str] = set()
    for record in run.world.log.records(TOKENS):
        if isinstance(record.event, RunCancelled):
            cancels.add(record.event.run_id)
        elif isinstance(record.event, RunEnded) and record.event.writer is EndWriter.WORKER:
            ends.add(record.event.run_id)
    sometimes["cancel raced completion"] += len(ends & cancels)
