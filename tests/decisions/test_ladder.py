"""The degradation ladder: up at once, down with hysteresis, and the free tier before those that pay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.policies import PACKAGED, read_policies
from processors.decisions.ladder import CALM, PRESSURE_SHED, Step, moved, saturation_ms, step
from schemas.events.account_snapshots import LadderMoved
from schemas.events.accounts import Ladder, LadderLevel, LaneWait, LimitsChanged, LoadView
from schemas.vocabulary import PAID_TIERS, Tier
from tests.decisions.account_samples import limits

LADDER = Ladder(
    hold_ms=5_000,
    levels=(
        LadderLevel(enter_ms=2_000, leave_ms=1_000, output_percent_free=50),
        LadderLevel(enter_ms=10_000, leave_ms=5_000, output_percent_free=25, downgrade_free=True),
        LadderLevel(
            enter_ms=30_000,
            leave_ms=20_000,
            output_percent_free=25,
            output_percent_paid=50,
            downgrade_free=True,
            downgrade_paid=True,
            optional_work=False,
            shed_free=True,
        ),
    ),
)


def levels(*seen: tuple[int, int], before: LadderMoved = CALM) -> list[int]:
    """The level after each (append time, saturation), in ms."""
    found = []
    for offset, (at_ms, saturation) in enumerate(seen):
        before = moved(LADDER, before, saturation=saturation, offset=offset, appended_ms=at_ms)
        found.append(before.level)
    return found


def test_the_ladder_goes_up_at_once_as_far_as_the_saturation_says() -> None:
    assert levels((0, 1_999), (1, 2_000), (2, 30_000)) == [0, 1, 3]


def test_it_stays_where_the_saturation_is_between_leave_and_enter() -> None:
    assert levels((0, 10_000), (60_000, 9_000), (120_000, 5_000)) == [2, 2, 2]


def test_it_goes_down_only_after_it_was_held_and_then_to_the_level_that_is_not_left() -> None:
    assert levels((0, 30_000), (4_999, 0), (5_000, 6_000), (9_999, 0), (10_000, 0)) == [
        3,
        3,
        2,
        2,
        0,
    ]


def test_it_clears_by_itself_with_the_first_prompt_after_a_silence() -> None:
    assert levels((0, 90_000), (3_600_000, 0)) == [3, 0]


def test_one_edge_that_sees_nothing_moves_it_once_in_the_time_that_a_level_is_held() -> None:
    seen = [(at, 30_000 if at % 2 else 0) for at in range(1, 20_000)]
    at_zero = levels(*seen).count(0)
    assert at_zero <= len(seen) // LADDER.hold_ms + 1


@given(st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 40_000)), max_size=60))
def test_moves_are_few_and_each_is_an_entered_or_a_left_threshold(
    steps: list[tuple[int, int]],
) -> None:
    now, last, moves = 0, CALM, 0
    for offset, (gap, saturation) in enumerate(steps):
        now += gap
        after = moved(LADDER, last, saturation=saturation, offset=offset, appended_ms=now)
        if after is not last:
            moves += 1
            assert (after.source_offset, after.moved_ms) == (offset, now)
            if after.level > last.level:
                assert saturation >= LADDER.levels[after.level - 1].enter_ms, "L1"
            else:
                assert saturation < LADDER.levels[last.level - 1].leave_ms, "L2"
                assert now - last.moved_ms >= LADDER.hold_ms, "L2"
        last = after
    most_down = now // LADDER.hold_ms + 1
    assert moves <= (len(LADDER.levels) + 1) * (most_down + 1)


def test_a_ladder_with_fewer_levels_takes_the_level_down_with_it() -> None:
    high = LadderMoved(source_offset=0, level=3, moved_ms=0)
    fewer = Ladder(hold_ms=5_000, levels=LADDER.levels[:1])
    assert moved(fewer, high, saturation=90_000, offset=1, appended_ms=1).level == 1
    assert moved(Ladder(), high, saturation=90_000, offset=1, appended_ms=1).level == 0


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (LoadView(), 0),
        (LoadView(waits=(LaneWait(model="m", lane="free", wait_ms=7),)), 7),
        (LoadView(waits=(LaneWait(model="m", lane="free", wait_ms=7),), saturation_ms=3), 3),
    ],
)
def test_the_longest_wait_stands_for_a_saturation_that_an_edge_does_not_say(
    load: LoadView, expected: int
) -> None:
    assert saturation_ms(load) == expected


def test_without_a_ladder_the_edges_word_alone_sheds() -> None:
    for pressure in range(PRESSURE_SHED + 1):
        found = step(limits(), 0, Tier.PLUS, LoadView(pressure=pressure))
        assert found == Step(shed=pressure == PRESSURE_SHED)


def packaged() -> LimitsChanged:
    return read_policies(
        PACKAGED, models={"smollm2-135m": 4_096, "gemma3-270m": 4_096}, changed_by="test"
    )


@pytest.mark.parametrize("level", range(8))
def test_at_no_level_does_a_paying_tier_feel_more_than_the_free_one(level: int) -> None:
    policy = packaged()
    if level > len(policy.ladder.levels):
        return
    free = step(policy, level, Tier.FREE, LoadView())
    for tier in PAID_TIERS:
        paid = step(policy, level, tier, LoadView())
        assert paid.output_percent >= free.output_percent, "L4"
        assert free.downgrade or not paid.downgrade, "L4"
        assert free.shed or not paid.shed, "L4"


def test_the_packaged_ladder_cuts_replaces_and_sheds_the_free_tier_before_any_other() -> None:
    policy = packaged()
    steps = range(1, len(policy.ladder.levels) + 1)
    free = [step(policy, level, Tier.FREE, LoadView()) for level in steps]
    paid = [step(policy, level, Tier.PLUS, LoadView()) for level in steps]

    def first(found: list[bool]) -> int:
        return found.index(True) if True in found else len(found)

    assert first([s.output_percent < 100 for s in free]) < first(
        [s.output_percent < 100 for s in paid]
    )
    assert first([s.downgrade for s in free]) < first([s.downgrade for s in paid])
    assert first([s.shed for s in free]) < first([s.shed for s in paid])
