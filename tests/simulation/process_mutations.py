"""Rules of the worker, the recorder, admission, context and edge, each broken in some way: in the decision modules where the rule
lives there, in the order of effects (`world.Order`) where it lives in a shell."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from itertools import count
from typing import Any, Final

from edge.decisions import viewer
from inference_workers.decisions import generation
from inference_workers.decisions.delta_buffer import add
from inference_workers.decisions.generation import Phase
from inference_workers.decisions.held_phrases import HeldPieces
from inference_workers.decisions.request_book import RequestBook
from inference_workers.decisions.run_book import RunBook
from inference_workers.decisions.waiting_room import WaitingRoom
from processors.decisions import (
    account,
    account_partition,
    account_state,
    admission,
    known_ids,
    recorder,
)
from processors.decisions.account_partition import AccountPartition
from processors.decisions.known_ids import Facts
from tests.simulation import context, recording
from tests.simulation.mutation import (
    CONTEXT_CRASHES,
    EDGE_CRASHES,
    LOSSES,
    OWNER_CRASHES,
    OWNER_ZOMBIES,
    POLICIES,
    RECORDER_CRASHES,
    REPLAYS,
    WORKER_CRASHES,
    WORKER_ZOMBIES,
    Mutation,
)
from tests.simulation.swaps import swap, swap_everywhere
from tests.simulation.world import Order

# The worker

_begin = generation.begin


def _speaks_before_its_fence(**given: Any) -> Any:
    return replace(_begin(**given), phase=Phase.SPEAKING)


def _commits_what_was_read(book: Any) -> Any:
    return {queue: at for queue, at in book._next.items() if at != book._committed.get(queue)}


def _drops_what_comes_meanwhile(book: Any, runs: Any) -> Any:
    for run_id in runs:
        book._waiting[run_id].clear()
    return _end_reading_back(book, runs)


_end_reading_back = RunBook.end_reading_back


def _lets_what_was_lost_go(room: Any, run_id: str, **_: object) -> None:
    room.lanes.finish(run_id, used_tokens=0)


def _says_it_all(_: object, piece: Any, buffer: Any) -> Any:
    return add(buffer, piece)


WORKER_MUTATIONS: Final = (
    Mutation(
        rule="P1, P2: what may be the beginning of a blocked phrase is held, and an answer ends before one",
        swaps=(swap(HeldPieces, "hear", _says_it_all),),
        caught_by={"I11"},
    ),
    Mutation(
        rule="G1: a later attempt says nothing before its fence has come back",
        swaps=(swap(generation, "begin", _speaks_before_its_fence),),
        faults=WORKER_ZOMBIES,
        caught_by={"I3"},
    ),
    Mutation(
        rule="G6: an attempt whose record does not come back is lost",
        swaps=(swap(generation, "overdue", lambda state, *, now_ms: state),),
        faults=LOSSES,
        caught_by={"I13"},
    ),
    Mutation(
        rule="Q2: a request is done when an accepted terminal has come back, not when one was sent",
        order=Order(done_when_terminal_is_back=False),
        faults=LOSSES,
        caught_by={"I13"},
    ),
    Mutation(
        rule="Q3: what is not done is not committed",
        swaps=(swap(RequestBook, "to_commit", _commits_what_was_read),),
        faults=WORKER_CRASHES,
        caught_by={"I13"},
    ),
    Mutation(
        rule="B1 with B3: the tail begins at the lowest mint offset, and unknown runs are read back",
        note="a tail that begins at the end only knows less, and what it does not know is read back",
        order=Order(tail_from_mint_offset=False, read_back_unknown_runs=False),
        caught_by={"I13"},
    ),
    Mutation(
        rule="B3: what the tail brings while a run is read back waits and is folded after it",
        swaps=(swap(RunBook, "end_reading_back", _drops_what_comes_meanwhile),),
        faults=WORKER_ZOMBIES,
        caught_by={"I13"},
    ),
    Mutation(
        rule="W2: a run whose attempt was lost rests, and goes on",
        swaps=(swap(WaitingRoom, "lost", _lets_what_was_lost_go),),
        faults=LOSSES,
        caught_by={"I13"},
    ),
)

# The recorder

_numbers = count()
_recorder_queued = recorder.Partition._queued


def _another_id(*_: object) -> str:
    return f"another-{next(_numbers)}"


def _trusts_what_it_holds(partition: Any, event: Any, seen: Any) -> Any:
    start, partition._start = partition._start, 0
    try:
        return _recorder_queued(partition, event, seen)
    finally:
        partition._start = start


RECORDER_MUTATIONS: Final = (
    Mutation(
        rule="C1: a run that is not held complete is read back",
        swaps=(swap(recorder.Partition, "_queued", _trusts_what_it_holds),),
        faults=RECORDER_CRASHES,
        caught_by={"I4", "I5", "I6", "I12"},
    ),
    Mutation(
        rule="C2: the ids of what is written derive from the run",
        swaps=(swap(recorder, "derived_event_id", _another_id),),
        caught_by={"I5"},
    ),
    Mutation(
        rule="C3: an open run holds the commit back to its mint offset",
        swaps=(swap(recorder.Partition, "commit_offset", lambda partition: partition.position),),
        caught_by={"I5", "I6"},
    ),
    Mutation(
        rule="C3: what is not acknowledged holds the commit back",
        faults=RECORDER_CRASHES,
        order=Order(recorder_commits_after_outputs=False),
        caught_by={"I5", "I6"},
    ),
    Mutation(
        rule="C4: a run past its deadline is ended",
        swaps=(swap(recorder.Partition, "overdue", lambda _: []),),
        caught_by={"I1"},
    ),
    Mutation(
        rule="the partition's time moves while runs are open",
        swaps=(swap(recording.Recorder, "tick", lambda _: False),),
        caught_by={"I1"},
    ),
)

# Admission

_judge_prompt = account._decide_prompt
_restored = account_state.restored
_admitted = admission._admitted


def _last_written_counts(partition: Any, row: Any) -> None:
    partition._accounts[row.account_id] = account_state.restored(row)


def _applied_offset_forgotten(row: Any) -> Any:
    return replace(_restored(row), applied_offset=-1)


def _ended_runs_as_a_counter(state: Any, command: Any) -> Any:
    freed = len(getattr(command.event, "ended_runs", ()))
    opened = []
    for run in state.open:
        ends = freed > 0 and not run.ended
        freed -= ends
        opened.append(account_state.ended(run) if ends else run)
    return replace(state, open=tuple(opened))


def _forgetting(**forgotten: Any) -> Any:
    def judge(
        state: Any, command: Any, prompt: Any, facts: Facts, limits: Any, *, level: int
    ) -> Any:
        return _judge_prompt(
            state, command, prompt, replace(facts, **forgotten), limits, level=level
        )

    return judge


def _as_in_an_idle_chat(case: Any, *rest: Any) -> Any:
    return _admitted(replace(case, after=None, interrupted=[]), *rest)


def _reservations_do_not_count(windows: Any, window: str, limit: int) -> int:
    settled: int = sum(use.settled for use in windows if use.window == window)
    return limit - settled


ADMISSION_MUTATIONS: Final = (
    Mutation(
        rule="Q1: what a snapshot has applied is not decided again",
        swaps=(swap(account_partition, "restored", _applied_offset_forgotten),),
        caught_by={"I5", "I6", "I7", "I12"},
    ),
    Mutation(
        rule="Q2: ended_runs is a set, never a counter",
        swaps=(swap_everywhere(account.mark_ended, _ended_runs_as_a_counter),),
        caught_by={"C4"},
    ),
    Mutation(
        rule="Q3: a run that is known is not decided again",
        swaps=(swap(account, "_decide_prompt", _forgetting(run_known=False)),),
        faults=REPLAYS,
        caught_by={"I6", "I12", "I14"},
    ),
    Mutation(
        rule="Q4: a bound key redirects or conflicts",
        swaps=(swap(account, "_decide_prompt", _forgetting(binding=None)),),
        caught_by={"I14"},
    ),
    Mutation(
        rule="Q6: one run of a chat at a time",
        swaps=(
            swap(admission, "_busy", lambda case: None),
            swap(admission, "_admitted", _as_in_an_idle_chat),
        ),
        caught_by={"C4"},
    ),
    Mutation(
        rule="Q8: no more runs at once than the tier allows",
        swaps=(swap(admission, "_open_runs", lambda case: None),),
        caught_by={"C4"},
    ),
    Mutation(
        rule="N2: what is reserved is not given twice",
        swaps=(swap(admission, "headroom", _reservations_do_not_count),),
        caught_by={"I7"},
    ),
    Mutation(
        rule="K1: a row counts for records above its source only",
        swaps=(swap(known_ids, "_counts", lambda row, offset, appended_ms: True),),
        caught_by={"I6", "I12"},
    ),
    Mutation(
        rule="S1: limits are judged by the last version below the record",
        swaps=(
            swap(
                account_partition,
                "limits_below",
                lambda versions, offset: versions[-1].limits if versions else None,
            ),
        ),
        faults=POLICIES,
        caught_by={"I12"},
    ),
    Mutation(
        rule="S7: of policies that are applied at the same time the one that was ordered last counts",
        swaps=(swap(account_partition, "outranked", lambda limits, by: False),),
        faults=POLICIES,
        caught_by={"S7"},
    ),
    Mutation(
        rule="S2: a snapshot is the account as of its offset, not as it lives",
        order=Order(snapshot_as_of_offset=False),
        faults=OWNER_CRASHES,
        caught_by={"I1", "I5", "I6", "I12", "I13"},
    ),
    Mutation(
        rule="S2: rows are acknowledged before snapshots are sent",
        order=Order(snapshots_after_rows=False),
        caught_by={"I6", "I12", "I14"},
    ),
    Mutation(
        rule="S2: snapshots are acknowledged before their sources",
        order=Order(commit_after_snapshots=False),
        caught_by={"I5", "I6", "I7", "I12"},
    ),
    Mutation(
        rule="S3: the row with the highest applied offset counts, not the last written",
        swaps=(swap(AccountPartition, "_restore", _last_written_counts),),
        faults=OWNER_ZOMBIES,
        caught_by={"I5", "I6", "I7", "I12"},
    ),
)

# Context and edge

OTHER_MUTATIONS: Final = (
    Mutation(
        rule="context acknowledges an admission when its request is acknowledged",
        swaps=(
            swap(
                context._Work,
                "done",
                property(lambda work: work.prompt is None or work.sent is not None),
            ),
        ),
        faults=CONTEXT_CRASHES,
        caught_by={"I13"},
    ),
    Mutation(
        rule="V2: what follows a cursor begins after it",
        swaps=(swap(viewer, "bisect_right", bisect_left),),
        caught_by={"I4"},
    ),
    Mutation(
        rule="an edge that is behind a viewer's cursor reads up to it first",
        order=Order(resume_waits_for_tail=False),
        caught_by={"I4"},
    ),
    Mutation(
        rule="what the tail brings while a run is read back is joined to it",
        order=Order(read_back_joins_tail=False),
        faults=EDGE_CRASHES,
        caught_by={"I4"},
    ),
)
