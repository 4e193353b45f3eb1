"""One partition through crashes, zombies, redelivery and compaction: whoever decides, the decisions are those of one undisturbed fold.

The machine runs the real decision code over an in-memory log. A process takes records, its outputs are acknowledged in order, and a
save goes row by row, snapshot by snapshot; a crash or a zombie's waking may come between any two of these steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from processors.decisions.account_partition import (
    LIMITS_VERSIONS_MAX,
    AccountPartition,
    Decided,
    limits_below,
    plan_save,
)
from processors.decisions.account_state import (
    AccountOutput,
    held_tokens,
    may_generate,
    output_id,
    snapshot,
)
from schemas.events.account_snapshots import (
    KNOWN_MS_MAX,
    AccountSnapshot,
    AccountSnapshotEvent,
    IdempotencyKeyBound,
    LadderKept,
    LimitsKept,
    RunKnown,
)
from schemas.events.accounts import (
    AccountEvent,
    Ladder,
    LadderLevel,
    LoadView,
    PromptSubmitted,
    TierLimits,
)
from schemas.events.quotas import QuotaReleased, QuotaReserved
from schemas.events.tokens import RunCancelled, RunEnded, RunQueued, RunRedirected
from schemas.events.usage import UsageSettled
from schemas.vocabulary import OnBusy, Tier
from tests.decisions.account_samples import NOON_MS, limits, listed, prompt, usage

ACCOUNTS = ("anna", "ben")
LIMITS = {
    "roomy": limits("roomy", tokens_per_window=4_000, open_runs_max=3),
    "tight": limits("tight", tokens_per_window=450),
    "busy": limits("busy", open_runs_max=1),
    "monthly": limits("monthly", window="month", tokens_per_window=5_000),
    "rated": limits("rated", requests_per_minute=2, requests_burst=2, tokens_per_minute=500),
    "seated": limits(
        "seated",
        tokens_per_window=2_000,
        open_runs_max=4,
        seats_max=2,
        seat_open_runs_max=1,
        seat_tokens_per_window=600,
    ),
    "listed": listed("bad word"),
    "laddered": msgspec.structs.replace(
        limits("laddered", tokens_per_window=5_000, open_runs_max=9),
        ladder=Ladder(
            hold_ms=1_000,
            levels=(
                LadderLevel(enter_ms=20, leave_ms=10, output_percent_free=50),
                LadderLevel(enter_ms=40, leave_ms=30, output_percent_free=10, shed_free=True),
            ),
        ),
    ),
}

VERDICTS = (RunQueued, RunRedirected, RunEnded)

PROMPTS = st.fixed_dictionaries(
    {
        "account": st.sampled_from(ACCOUNTS),
        "chat": st.sampled_from(("c1", "c2", "c3")),
        "key": st.sampled_from((None, None, None, None, "k1", "k2")),
        "fingerprint": st.sampled_from(("f1", "f2")),
        "needed": st.sampled_from((1, 1, 20, 20, 20, 300, 301)),
        "asked": st.sampled_from((None, 1, 60, 120)),
        "told": st.booleans(),
        "pressure": st.sampled_from((0, 0, 0, 4)),
        "on_busy": st.sampled_from(OnBusy),
        "seat": st.sampled_from((None, "s1", "s2")),
        "saturation": st.sampled_from((None, 0, 15, 25, 50)),
        "content": st.sampled_from(("hello", "hello", "a bad word")),
    }
)


@dataclass(frozen=True)
class Record:
    offset: int
    appended_ms: int
    event_id: str
    event: AccountEvent


@dataclass
class Process:
    """One owner of the partition, or one that believes to be."""

    state: AccountPartition
    position: int
    in_flight: deque[Decided] = field(default_factory=deque)
    delivered: int = 0
    saving: Iterator[None] | None = None


class Partition(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[Record] = []
        self.now_ms = NOON_MS
        self.rows: list[AccountSnapshotEvent] = []
        self.outputs: dict[str, AccountOutput] = {}
        self.committed = 0
        # The undisturbed fold.
        self.oracle = AccountPartition()
        self.expected: dict[str, AccountOutput] = {}
        self.bound: dict[tuple[str, str], tuple[str, str, int]] = {}
        self.seen_runs: set[str] = set()
        self.owner = self.restored()
        self.zombies: list[Process] = []

    # The log

    def append(self, event: AccountEvent, event_id: str | None = None) -> None:
        record = Record(len(self.log), self.now_ms, event_id or f"e{len(self.log)}", event)
        self.log.append(record)
        decided = take(self.oracle, record)
        self.check_decision(record, decided)
        for output in decided.outputs:
            self.expected[output_id(decided.event_id, output)] = output

    def check_decision(self, record: Record, decided: Decided) -> None:
        event = record.event
        if isinstance(event, PromptSubmitted):
            verdicts = [o for o in decided.outputs if isinstance(o, VERDICTS)]
            new = event.run_id not in self.seen_runs
            assert len(verdicts) == (1 if new else 0), "I9: every new prompt is answered, once"
            self.seen_runs.add(event.run_id)
        for output in decided.outputs:
            match output:
                case QuotaReserved():
                    tier = limits_below(self.oracle.limits, record.offset)
                    assert tier is not None
                    use = next(
                        use
                        for use in self.oracle.account(output.account_id).windows
                        if use.window == output.window
                    )
                    most = next(iter(tier.tiers.values())).tokens_per_window
                    assert use.settled + use.reserved <= most, "I7"
                    self.check_caps(tier.tiers[Tier.FREE], output.account_id)
                case RunCancelled():
                    assert output.run_id in self.oracle_runs(ended=True), "what is cancelled ended"
                case RunQueued():
                    assert isinstance(event, PromptSubmitted)
                    if event.idempotency_key is not None:
                        name = (event.account_id, event.idempotency_key)
                        held = self.bound.get(name)
                        assert held is None or self.now_ms - held[2] >= KNOWN_MS_MAX, "I14"
                        self.bound[name] = (event.run_id, event.fingerprint, self.now_ms)
                case RunRedirected():
                    assert isinstance(event, PromptSubmitted)
                    assert event.idempotency_key is not None
                    run, fingerprint, _ = self.bound[event.account_id, event.idempotency_key]
                    same = fingerprint == event.fingerprint
                    assert output.to_run_id == (run if same else None), "I14"
                case _:
                    pass

    def check_caps(self, tier: TierLimits, account_id: str) -> None:
        """What was just admitted is within every cap of its tier."""
        state = self.oracle.account(account_id)
        live = [run for run in state.open if not run.ended]
        newest = live[-1]
        if newest.after_run_id is None:
            assert may_generate(live) <= tier.open_runs_max, "C4"
        waiting = [run for run in live if run.chat_id == newest.chat_id]
        assert len(waiting) <= tier.enqueued_runs_max + 1, "C2: bounded"
        if newest.seat_counted and tier.seats_max is not None:
            assert len(state.seats.uses) <= tier.seats_max
        if newest.seat_counted and tier.seat_tokens_per_window is not None:
            use = next(u for u in state.seats.uses if u.seat == newest.seat)
            assert use.settled + use.reserved <= tier.seat_tokens_per_window, "I7, for a seat"
            assert use.reserved == sum(
                held_tokens(run)
                for run in state.open
                if run.seat_counted and run.window == state.seats.window and run.seat == newest.seat
            ), "I6, for a seat"

    def oracle_runs(self, *, ended: bool) -> set[str]:
        return {
            run.run_id
            for account_id in ACCOUNTS
            for run in self.oracle.account(account_id).open
            if run.ended is ended
        }

    @rule(drawn=st.lists(PROMPTS, min_size=1, max_size=4))
    def submit(self, drawn: list[dict[str, Any]]) -> None:
        for each in drawn:
            account: str = each["account"]
            runs = [run.run_id for run in self.oracle.account(account).open]
            self.append(
                prompt(
                    f"r{len(self.log)}",
                    account=account,
                    chat=f"{account}-{each['chat']}",
                    needed=each["needed"],
                    pressure=each["pressure"],
                    max_output_tokens=each["asked"],
                    idempotency_key=each["key"],
                    fingerprint=each["fingerprint"],
                    ended_runs=tuple(runs if each["told"] else ()),
                    on_busy=each["on_busy"],
                    seat_id=each["seat"],
                    content=each["content"],
                    load=LoadView(pressure=each["pressure"], saturation_ms=each["saturation"]),
                )
            )

    @rule(back=st.integers(1, 12))
    def append_a_record_again(self, back: int) -> None:
        record = self.log[-back] if back <= len(self.log) else None
        if record is None:
            return
        # A copy of a copy is as old as the first: K2 bounds how late one is known.
        first = next(each for each in self.log if each.event_id == record.event_id)
        if self.now_ms - first.appended_ms < KNOWN_MS_MAX:
            self.append(record.event, record.event_id)

    @initialize()
    def begin(self) -> None:
        self.append(LIMITS["roomy"])

    @rule(name=st.sampled_from(sorted(LIMITS)))
    def change_limits(self, name: str) -> None:
        self.append(LIMITS[name])

    @rule(hours=st.sampled_from((0, 0, 0, 1, 11, 12, 25)), ms=st.sampled_from((1, 900, 29_000)))
    def time_passes(self, hours: int, ms: int) -> None:
        self.now_ms += hours * 3_600_000 + ms

    @rule()
    def the_brokers_stamps_step_back(self) -> None:
        self.now_ms -= 700

    @rule(back=st.integers(1, 5), used=st.integers(0, 100))
    def measure(self, back: int, used: int) -> None:
        """The recorder measures a run that was queued, perhaps twice. `used`: percent of what was reserved."""
        queued = [o for o in self.outputs.values() if isinstance(o, RunQueued)]
        if back <= len(queued):
            run = queued[-back]
            self.append(
                usage(
                    run.run_id,
                    account=run.account_id,
                    input_tokens=run.input_budget_tokens * used // 100,
                    output_tokens=run.granted_output_tokens * used // 100,
                ),
                f"usage-{run.run_id}",
            )

    # The owner

    @rule(taken=st.integers(0, 6), delivered=st.integers(0, 6), steps=st.integers(0, 12))
    def work(self, taken: int, delivered: int, steps: int) -> None:
        """Take records, have outputs acknowledged, and go some steps into a save."""
        self.take_records(self.owner, taken)
        self.deliver(self.owner, delivered)
        self.step(self.owner, steps)

    def take_records(self, process: Process, count: int) -> None:
        for record in self.log[process.position : process.position + count]:
            process.in_flight.append(take(process.state, record))
            process.position += 1

    def deliver(self, process: Process, count: int) -> None:
        upto = min(process.delivered + count, len(process.in_flight))
        for decided in list(process.in_flight)[process.delivered : upto]:
            for output in decided.outputs:
                name = output_id(decided.event_id, output)
                assert self.expected[name] == output, "decided otherwise than the undisturbed fold"
                self.outputs[name] = output
        process.delivered = upto

    def step(self, process: Process, steps: int) -> None:
        for _ in range(steps):
            if process.saving is None:
                process.saving = self.save(process)
            if next(process.saving, "done") == "done":
                process.saving = None

    def save(self, process: Process) -> Iterator[None]:
        """S2, one acknowledgement a step."""
        span = [process.in_flight[at] for at in range(process.delivered)]
        plan = plan_save(span)
        for row in plan.rows:
            self.rows.append(row)
            yield
        for account in plan.accounts:
            self.rows.append(snapshot(account))
            yield
        process.state.saved(plan)
        for _ in span:
            process.in_flight.popleft()
        process.delivered -= len(span)
        if process is self.owner and span:
            self.committed = max(self.committed, span[-1].offset + 1)

    # Faults

    def restored(self) -> Process:
        process = Process(state=AccountPartition(self.rows), position=self.committed)
        self.rows.extend(process.state.rows_out_of_order())
        return process

    @rule()
    def crash(self) -> None:
        self.owner = self.restored()

    @rule()
    def pause_the_owner_and_let_another_take_over(self) -> None:
        self.zombies = [*self.zombies[-1:], self.owner]
        self.owner = self.restored()

    @rule(taken=st.integers(0, 6), delivered=st.integers(0, 6), steps=st.integers(0, 12))
    def a_zombie_goes_on(self, taken: int, delivered: int, steps: int) -> None:
        for zombie in self.zombies[:1]:
            self.take_records(zombie, taken)
            self.deliver(zombie, delivered)
            self.step(zombie, steps)

    @rule(back=st.integers(1, 20))
    def a_row_is_written_again_late(self, back: int) -> None:
        if back <= len(self.rows):
            self.rows.append(self.rows[-back])

    @rule()
    def compact(self) -> None:
        """Within the topic's lag every zombie is gone, and every state was written again."""
        self.zombies = []
        while self.owner.saving is not None:
            self.step(self.owner, 1)  # One task saves and writes again: never both at once.
        self.rows.extend(self.owner.state.rows_to_refresh())
        newest = {row_key(row): at for at, row in enumerate(self.rows)}
        self.rows = [self.rows[at] for at in sorted(newest.values())]

    # What holds

    @invariant()
    def limits_are_kept_in_bounds(self) -> None:
        assert len(self.owner.state.limits) <= LIMITS_VERSIONS_MAX

    def teardown(self) -> None:
        """At rest everything was delivered, once, and every token is accounted for."""
        self.crash()
        self.take_records(self.owner, len(self.log))
        self.deliver(self.owner, len(self.log))
        self.step(self.owner, 10_000)
        assert self.outputs == self.expected
        assert self.committed == len(self.log)
        again = self.restored()
        for account_id in ACCOUNTS:
            for process in (self.owner, again):
                mine, right = process.state.account(account_id), self.oracle.account(account_id)
                assert mine == right
            self.check_tokens(account_id)

    def check_tokens(self, account_id: str) -> None:
        reserved: dict[str, int] = {}
        for output in self.outputs.values():
            match output:
                case QuotaReserved() if output.account_id == account_id:
                    assert output.run_id not in reserved, "a run is reserved once"
                    reserved[output.run_id] = output.input_tokens + output.output_tokens
        settled: dict[str, int] = {}
        for output in self.outputs.values():
            match output:
                case UsageSettled() if output.account_id == account_id:
                    assert output.run_id not in settled, "I5: one settlement a run"
                    settled[output.run_id] = output.input_tokens + output.output_tokens
                case QuotaReleased() if output.account_id == account_id:
                    reserved[output.run_id] -= output.tokens
        open_runs = {run.run_id for run in self.oracle.account(account_id).open}
        for run_id, tokens in reserved.items():
            assert run_id in open_runs or tokens == settled[run_id], "I6"


def take(state: AccountPartition, record: Record) -> Decided:
    return state.take(
        offset=record.offset,
        appended_ms=record.appended_ms,
        event_id=record.event_id,
        event=record.event,
    )


def row_key(row: AccountSnapshotEvent) -> object:
    match row:
        case AccountSnapshot(account_id=account_id):
            return account_id
        case RunKnown(run_id=run_id):
            return ("run", run_id)
        case IdempotencyKeyBound():
            # Both bindings of a key stay within the topic's lag; see K3.
            return ("key", row.account_id, row.idempotency_key, row.source_offset)
        case LimitsKept():
            return "limits"
        case LadderKept():
            return "ladder"


Partition.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, print_blob=True
)
TestAPartitionThroughCrashesAndZombies = Partition.TestCase


def test_a_record_is_judged_by_the_limits_below_it_also_on_replay() -> None:
    state = AccountPartition()
    changes = [("roomy", 0), ("tight", 2)]
    rows: list[AccountSnapshotEvent] = []
    for name, offset in changes:
        decided = state.take(
            offset=offset, appended_ms=NOON_MS, event_id=f"e{offset}", event=LIMITS[name]
        )
        rows.extend(decided.rows)
    replayed = AccountPartition(rows)
    for offset, most in ((1, 400), (3, 450)):
        event = prompt(f"r{offset}", account=f"account-{offset}", needed=300)
        decided = replayed.take(
            offset=offset, appended_ms=NOON_MS, event_id=f"e{offset}", event=event
        )
        reserved = decided.outputs[0]
        assert isinstance(reserved, QuotaReserved)
        assert reserved.input_tokens + reserved.output_tokens <= most
    assert limits_below(replayed.limits, 0) is None


def test_the_highest_snapshot_counts_and_is_written_again_where_it_is_not_the_last() -> None:
    old = AccountSnapshot(account_id="anna", applied_offset=3)
    new = AccountSnapshot(account_id="anna", applied_offset=9)
    other = AccountSnapshot(account_id="ben", applied_offset=1)
    state = AccountPartition([new, other, old])
    assert state.account("anna").applied_offset == 9
    assert state.rows_out_of_order() == [new]
    assert AccountPartition([old, new, other]).rows_out_of_order() == []
