"""What must hold of runs of one account, and of one chat, that are open at the same time: caps, and who waits for whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, cast

from infra.verify.findings import Violation
from processors.decisions.account_partition import outranked
from schemas.events.accounts import LimitsChanged, PromptSubmitted
from schemas.events.tokens import AttemptStarted, RunCancelled, RunEvent, RunQueued
from schemas.topics import ACCOUNTS, TOKENS
from schemas.vocabulary import CancelReason, OnBusy
from tests.simulation.log import Record
from tests.simulation.simulation import Simulation

NEVER: Final = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A record that the run fold accepted."""

    record: Record
    event: RunEvent
    ends: bool


def broken(invariant: str, subject: str, detail: str) -> Violation:
    """A violation."""
    return Violation(invariant=invariant, subject=subject, detail=detail)


def busy_chats(run: Simulation, accepted: dict[str, list[Accepted]]) -> Iterator[Violation]:
    """C4 and A6."""
    ended = _decided_ends(run)
    queued: dict[str, RunQueued] = {}
    for run_id, records in accepted.items():
        for each in records:
            if isinstance(each.event, RunQueued):
                queued[run_id] = each.event
            if each.ends:
                ended[run_id] = min(each.record.seq, ended.get(run_id, each.record.seq))
    yield from _open_runs(run, queued, ended)
    yield from _waiting_runs(run, accepted, queued, ended)


def _open_runs(
    run: Simulation, queued: dict[str, RunQueued], ended: dict[str, int]
) -> Iterator[Violation]:
    """C4: when a run was admitted, no more runs of its account could generate in truth than its tier allows, and none of its chat.

    A run that admission itself cancels is over for it with that decision.
    """
    for partition in run.world.log.partitions(ACCOUNTS):
        limits: LimitsChanged | None = None
        admitted: dict[str, dict[str, RunQueued]] = defaultdict(dict)
        for record in partition.records:
            event = record.event
            if isinstance(event, LimitsChanged) and not (limits and outranked(event, limits)):
                limits = event
            if not isinstance(event, PromptSubmitted) or event.run_id not in queued:
                continue
            others = admitted[event.account_id]
            if event.run_id in others:
                continue
            mine = others[event.run_id] = queued[event.run_id]
            now = {
                other: each
                for other, each in others.items()
                if ended.get(other, record.seq) >= record.seq and other != event.run_id
            }
            at_once = len({each.chat_id for each in now.values()})
            assert limits is not None, "limits come first"
            beside = any(each.chat_id == event.chat_id for each in now.values())
            if beside and mine.after_run_id is not None:
                run.world.sometimes["enqueued"] += 1
                if event.on_busy is OnBusy.REJECT:
                    yield broken("C4", event.run_id, "enqueued though it asked to be rejected")
                continue
            if at_once >= limits.tiers[event.tier].open_runs_max:
                yield broken("C4", event.run_id, f"admitted beside {at_once} open runs")
            if beside:
                yield broken("C4", event.run_id, "admitted beside an open run of its chat")


def _decided_ends(run: Simulation) -> dict[str, int]:
    """Runs that admission cancelled, with the moment before the record that decided it."""
    decided: dict[str, int] = {}
    for record in run.world.log.records(ACCOUNTS):
        decided.setdefault(record.event_id, record.seq - 1)
    found: dict[str, int] = {}
    for record in run.world.log.records(TOKENS):
        match record.event:
            case RunCancelled(reason=CancelReason.INTERRUPT | CancelReason.LIMITS) as cancelled:
                run.world.sometimes[f"cancelled for {cancelled.reason.value}"] += 1
                found[cancelled.run_id] = decided[record.cause_id]
            case _:
                pass
    return found


def _waiting_runs(
    run: Simulation,
    accepted: dict[str, list[Accepted]],
    queued: dict[str, RunQueued],
    ended: dict[str, int],
) -> Iterator[Violation]:
    """A6: no run that was enqueued starts before all that came before it in its chat have ended, and it continues from the answer of the
    newest, unless its client named another parent."""
    posted: dict[str, Record] = {}
    for record in run.world.log.records(ACCOUNTS):
        if isinstance(record.event, PromptSubmitted):
            posted.setdefault(record.event.run_id, record)
    for run_id, mine in queued.items():
        if mine.after_run_id is None:
            continue
        prompt = cast("PromptSubmitted", posted[run_id].event)
        newest = queued[mine.after_run_id].assistant_message_id
        if mine.parent_id != (prompt.parent_id if prompt.parent_given else newest):
            yield broken("A6", run_id, "its parent is not the answer that it waited for")
        starts = [each for each in accepted[run_id] if isinstance(each.event, AttemptStarted)]
        for other, before in queued.items():
            earlier = before.chat_id == mine.chat_id and posted[other].seq < posted[run_id].seq
            if earlier and starts and ended.get(other, NEVER) > starts[0].record.seq:
                yield broken("A6", run_id, "it started before a run that it waits for had ended")
