"""Tokens of the command, and what an edge believes of the rest of the system."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edge.auth import authenticate, mint_token
from edge.decisions.load_view import NO_WORKER_WAIT_MS
from edge.decisions.problems import Refused
from edge.floods import COUNTED_MAX, TOLD_EVERY_S, Floods
from edge.soft_views import Accounts, BrokerClock, Workers
from infra.command.main import command
from infra.secrets import load_secrets
from schemas.events.account_snapshots import (
    KNOWN_MS_MAX,
    AccountSnapshot,
    IdempotencyKeyBound,
    LimitsKept,
    LimitsVersion,
    WindowUse,
)
from schemas.events.accounts import LimitsChanged, TierLimits
from schemas.events.workers import WorkerLoadReported
from schemas.lane_shares import DEFAULT_SHARES
from schemas.vocabulary import Lane, Tier

NOON = 1_767_268_800_000  # 2026-01-01T12:00:00Z


def test_the_command_prints_a_token_that_the_edge_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNLOG_HOME", str(tmp_path))
    made = CliRunner().invoke(
        command(), ["token", "--account", "anna", "--tier", "team", "--seat", "s-1"]
    )
    assert made.exit_code == 0
    assert made.stdout.count("\n") == 1
    caller = authenticate(f"Bearer {made.stdout.strip()}", key=load_secrets(tmp_path).token_key)
    assert (caller.account_id, caller.seat_id, caller.tier) == ("anna", "s-1", Tier.TEAM)


@pytest.mark.parametrize("account", ["", "a b", "ä", "-a", "a" * 65, "a/b"])
def test_a_name_that_no_account_can_have_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, account: str
) -> None:
    monkeypatch.setenv("TURNLOG_HOME", str(tmp_path))
    refused = CliRunner().invoke(command(), ["token", f"--account={account}", "--tier", "plus"])
    assert refused.exit_code == 2
    assert refused.stdout == ""


def test_the_scheme_is_read_in_any_case_and_the_key_counts() -> None:
    token = mint_token(key=b"k" * 32, account_id="a", tier=Tier.FREE, ttl=timedelta(minutes=1))
    assert authenticate(f"bearer  {token}", key=b"k" * 32).account_id == "a"
    with pytest.raises(Refused):
        authenticate(f"Bearer {token}", key=b"j" * 32)


class Hands:
    """Clocks that the test moves."""

    def __init__(self) -> None:
        self.at = 0.0
        self.clock = BrokerClock(monotonic=lambda: self.at, wall=lambda: 0.0)


def test_the_brokers_clock_moves_on_from_its_newest_stamp_and_never_back() -> None:
    hands = Hands()
    hands.clock.saw(NOON)
    hands.at = 2.0
    assert hands.clock.now_ms() == NOON + 2_000
    hands.clock.saw(NOON + 500)
    assert hands.clock.now_ms() == NOON + 2_000
    hands.clock.saw(NOON + 9_000)
    assert hands.clock.now_ms() == NOON + 9_000


def _limits(tokens: int) -> LimitsChanged:
    tier = TierLimits(
        tokens_per_window=tokens,
        window="day",
        open_runs_max=1,
        models=("m",),
        input_tokens_max=10,
        output_tokens_max=10,
        run_deadline_ms=1_000,
        queue_wait_ms_max=1_000,
    )
    return LimitsChanged(version=str(tokens), tiers=dict.fromkeys(Tier, tier), changed_by="test")


def _row(offset: int, settled: int) -> AccountSnapshot:
    use = WindowUse(window="2026-01-01", settled=settled, reserved=0)
    return AccountSnapshot(account_id="a", applied_offset=offset, windows=(use,))


def test_the_row_with_the_highest_applied_offset_counts_in_whatever_order_rows_come() -> None:
    hands = Hands()
    hands.clock.saw(NOON)
    accounts = Accounts(hands.clock)
    assert accounts.quota("a", Tier.FREE) is None
    versions = tuple(
        LimitsVersion(source_offset=offset, limits=_limits(tokens))
        for offset, tokens in ((1, 50), (9, 100))
    )
    accounts.note(LimitsKept(source_offset=9, versions=versions), NOON)
    for row in (_row(3, 30), _row(7, 70), _row(5, 50)):
        accounts.note(row, NOON)
    view = accounts.quota("a", Tier.FREE)
    assert view is not None
    assert (view.limit, view.settled, view.remaining) == (100, 70, 30)
    unused = accounts.quota("b", Tier.FREE)
    assert unused is not None
    assert unused.remaining == 100


def test_an_older_policy_read_later_changes_nothing() -> None:
    accounts = Accounts(Hands().clock)
    for tokens, at in ((100, NOON), (50, NOON - 1)):
        version = LimitsVersion(source_offset=1, limits=_limits(tokens))
        accounts.note(LimitsKept(source_offset=1, versions=(version,)), at)
    limits = accounts.tier(Tier.PLUS)
    assert limits is not None
    assert limits.tokens_per_window == 100


def test_a_bound_key_is_known_for_as_long_as_admission_knows_it() -> None:
    hands = Hands()
    hands.clock.saw(NOON)
    accounts = Accounts(hands.clock)
    for offset, run in ((9, "run_new"), (3, "run_old")):
        row = IdempotencyKeyBound(
            account_id="a",
            idempotency_key="k",
            run_id=run,
            fingerprint="f",
            source_offset=offset,
            appended_ms=NOON,
        )
        accounts.note(row, NOON)
    found = accounts.bound("a", "k")
    assert found is not None
    assert found.run_id == "run_new"
    assert accounts.bound("b", "k") is None
    hands.at = KNOWN_MS_MAX / 1000
    assert accounts.bound("a", "k") is None


def test_a_flood_is_told_once_in_a_while_however_large_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    floods = Floods()
    floods.tell(0.0)
    for number in range(COUNTED_MAX + 10):
        floods.refused(f"account-{number}")
    for _ in range(4):
        floods.refused("account-7")
    floods.tell(1.0)
    floods.refused("account-8")
    floods.tell(1.0 + TOLD_EVERY_S / 2)
    assert [record.getMessage() for record in caplog.records] == [
        f"refused before the log: {COUNTED_MAX + 14} requests of {COUNTED_MAX} accounts, 5 of them of account-7"
    ]
    floods.tell(1.0 + TOLD_EVERY_S)
    assert len(caplog.records) == 2


def test_what_was_sent_counts_until_the_next_report() -> None:
    hands = Hands()
    hands.clock.saw(NOON)
    workers = Workers(hands.clock)

    def report() -> WorkerLoadReported:
        return WorkerLoadReported(
            worker_id="w",
            model="m",
            epoch=1,
            slots=2,
            busy=0,
            queued_requests=0,
            queued_tokens=0,
            prefill_tokens_per_s=100,
            decode_tokens_per_s=100,
            partitions=tuple(range(12)),
        )

    def waits() -> set[int]:
        view = workers.load(["m"], 0, DEFAULT_SHARES)
        return {wait.wait_ms for wait in view.waits if wait.lane == "free"}

    def send(number: int) -> str:
        partition = workers.place(
            "chat_x",
            partitions=12,
            models=["m"],
            lane=Lane.FREE,
            shares=DEFAULT_SHARES,
            draws=(0, 1),
        )
        workers.sent(f"run_{number}", partition=partition, lane=Lane.FREE, models=["m"])
        return f"run_{number}"

    workers.note(report(), NOON)
    assert waits() == {0}
    runs = [send(number) for number in range(4)]
    assert min(waits()) > 0, "at once, for whoever comes next"
    workers.not_queued(runs[0])
    for run in runs[1:]:
        workers.queued(run, partition=0, lane=Lane.FREE, model="m", at_ms=NOON)
    hands.at = 1.0
    assert min(waits()) > 0, "three runs at a worker of two slots"
    workers.note(report(), NOON + 1_000)
    hands.at = 2.0
    assert waits() == {0}, "a later report knows them"
    hands.at = 60.0
    assert workers.fleet().models == {}
    assert min(waits()) >= NO_WORKER_WAIT_MS
