"""A crash after a save's rows and before its snapshots: each record is judged at the level at which it was judged first (S2, S5)."""

from __future__ import annotations

import msgspec
import pytest

from processors.decisions.account_partition import (
    LADDER_MOVES_MAX,
    AccountPartition,
    Decided,
    plan_save,
)
from schemas.events.account_snapshots import LadderKept
from schemas.events.accounts import Ladder, LadderLevel, LoadView
from tests.decisions.account_samples import NOON_MS, limits, prompt

HOLD_MS = 5_000
LEVEL = LadderLevel(enter_ms=20, leave_ms=10, output_percent_free=50)
LIMITS = msgspec.structs.replace(
    limits(open_runs_max=900, tokens_per_window=10**9),
    ladder=Ladder(hold_ms=HOLD_MS, levels=(LEVEL,)),
)


def decided(state: AccountPartition, count: int) -> list[Decided]:
    """Prompts of an hour or so, as they are caught up with after an outage; the workers are full at every other one."""
    found = [state.take(offset=0, appended_ms=NOON_MS, event_id="limits", event=LIMITS)]
    for number in range(1, count + 1):
        load = LoadView(saturation_ms=50 * (number % 2))
        found.append(
            state.take(
                offset=number,
                appended_ms=NOON_MS + number * HOLD_MS,
                event_id=f"e{number}",
                event=prompt(f"r{number}", chat=f"c{number}", load=load),
            )
        )
    return found


@pytest.mark.parametrize("count", [10, LADDER_MOVES_MAX + 1, 10 * LADDER_MOVES_MAX])
def test_records_without_a_snapshot_are_decided_again_alike(count: int) -> None:
    first = decided(AccountPartition(), count)
    rows = plan_save(first).rows
    assert sum(isinstance(row, LadderKept) for row in rows) == 1, "one row of a kind a save"
    again = decided(AccountPartition(rows), count)
    assert [each.outputs for each in again] == [each.outputs for each in first]


def test_what_was_saved_is_forgotten_up_to_a_bound() -> None:
    state = AccountPartition()
    state.saved(plan_save(decided(state, 10 * LADDER_MOVES_MAX)))
    (row,) = [row for row in state.rows_to_refresh() if isinstance(row, LadderKept)]
    assert len(row.moves) == LADDER_MOVES_MAX
