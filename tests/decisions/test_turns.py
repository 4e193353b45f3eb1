"""What a worker says of whose turn comes when: rules T1 to T4, and when slots are free."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from inference_workers.decisions.lanes import Claim, FairLanes
from inference_workers.decisions.turns import STARTS_MAX, Asked, Flow, Habits, Held, turns
from inference_workers.outlook import FREE_SLOTS_MAX, SlotTimes, free_ms
from schemas.vocabulary import Lane

NEWCOMER: Asked = (Lane.PLUS, None)


def claim(name: str, *, account: str | None = None, lane: Lane = Lane.PLUS) -> Claim:
    return Claim(run_id=name, account_id=account or name, lane=lane, tokens=100)


def one_runs() -> FairLanes:
    """Its slot is taken."""
    lanes = FairLanes()
    lanes.wait(claim("runs"))
    assert lanes.take(room_tokens=1_000) == "runs"
    return lanes


def found(
    lanes: FairLanes, asked: Sequence[Asked], *, flows: dict[Lane, Flow] | None = None
) -> dict[Asked, int]:
    """Requests use half of what they claim and hold the one slot for a second."""
    return turns(
        lanes,
        [Held(claim=lanes.held("runs"), age_ms=0)],
        habits=Habits(
            held_ms=[1_000],
            used_shares=dict.fromkeys(Lane, 0.5),
            flows=flows or {},
        ),
        asked=asked,
        draw=Random(1).random,
    )


def test_t1_t4_a_newcomer_goes_behind_those_who_wait_and_a_heavy_account_behind_its_own() -> None:
    lanes = one_runs()
    heavy: Asked = (Lane.PLUS, "heavy")
    for number in range(5):
        lanes.wait(claim(f"h{number}", account="heavy"))
    lanes.wait(claim("other"))
    tokens = found(lanes, [NEWCOMER, heavy])
    assert tokens[NEWCOMER] <= 100, "one of the heavy account's and the other's"
    assert tokens[heavy] == 300, "all six"


def test_t1_nothing_real_is_touched() -> None:
    lanes, same = one_runs(), one_runs()
    for each in (lanes, same):
        for number in range(8):
            each.wait(claim(f"r{number}", account=f"a{number % 3}", lane=list(Lane)[number % 3]))
    found(lanes, [NEWCOMER])
    order, expected = ([each.take(room_tokens=1_000) for _ in range(9)] for each in (lanes, same))
    assert order == expected
    assert order[-1] is None


def test_t3_those_who_go_first_delay_whoever_waits_also_before_they_have_come() -> None:
    background: Asked = (Lane.BACKGROUND, None)
    team = Flow(recent=[("t", 100)], gap_ms=1_250)
    quiet, crowded = one_runs(), one_runs()
    for lanes in (quiet, crowded):
        lanes.wait(claim("team", lane=Lane.TEAM))
    assert found(quiet, [background])[background] == 50
    assert found(crowded, [background], flows={Lane.TEAM: team})[background] > 50


def test_t4_what_is_far_ahead_has_no_answer() -> None:
    lanes = one_runs()
    for number in range(STARTS_MAX + 1):
        lanes.wait(claim(f"r{number}", account="one"))
    one: Asked = (Lane.PLUS, "one")
    assert set(found(lanes, [NEWCOMER, one])) == {NEWCOMER}


def test_even_answers_end_one_by_one_and_slots_that_are_free_count() -> None:
    held = [1_000] * 10
    assert free_ms([900, 600, 300, 0], slots=4, held_ms=held) == (100, 400)
    assert free_ms([900, 600, 300], slots=4, held_ms=held) == (0, 100)
    assert free_ms([400], slots=1, held_ms=held) == (600,)
    assert free_ms([2_000], slots=1, held_ms=held) == (1_000,), "longer than any: nobody knows"
    assert free_ms([0], slots=1, held_ms=[]) == ()
    many = FREE_SLOTS_MAX + 1
    assert free_ms([0] * many, slots=many, held_ms=held) == ()


def test_what_ran_long_is_likely_to_be_one_of_the_long_ones() -> None:
    held = [100, 200, 300, 4_000]
    assert free_ms([0], slots=1, held_ms=held) == (200,)
    assert free_ms([1_000], slots=1, held_ms=held) == (3_000,)


def test_times_are_stretched_to_the_pace_of_the_full_worker() -> None:
    times = SlotTimes()
    assert times.held_ms(slots=4, full_tokens_per_s=10.0) == []
    times.freed(3_000, used_tokens=300)
    times.freed(1_000, used_tokens=100)
    assert times.held_ms(slots=4, full_tokens_per_s=0.0) == [1_000, 3_000]
    # So quick a worker would make 400 tokens a second; it makes half of that.
    assert times.held_ms(slots=4, full_tokens_per_s=200.0) == pytest.approx([2_000, 6_000])
