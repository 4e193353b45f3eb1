"""A record of the account log that decodes and that no decision can use is set aside with its reason, and its partition goes on (I19)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processors.decisions.account_partition import AccountPartition, Decided
from processors.decisions.account_state import snapshot
from processors.decisions.what_if import what_if
from schemas.events.accounts import AccountEvent
from schemas.events.usage import UsageSettled
from tests.decisions.account_samples import ACCOUNT, limits, prompt, usage
from tests.decisions.test_what_if import log

LIMITS = limits(open_runs_max=5, tokens_per_window=10_000)
UNFIT = {
    "more input than its budget": (
        usage("r", input_tokens=301),
        "301 input tokens, reserved were 300",
    ),
    "more output than its grant": (
        usage("r", output_tokens=101),
        "101 output tokens, reserved were 100",
    ),
    "less than no input": (usage("r", input_tokens=-1), "-1 input tokens, reserved were 300"),
    "less than no output": (usage("r", output_tokens=-1), "-1 output tokens, reserved were 100"),
}


def decided(state: AccountPartition, *events: AccountEvent, start: int = 0) -> list[Decided]:
    return [
        state.take(
            offset=start + record.offset,
            appended_ms=record.appended_ms,
            event_id=f"e{start + record.offset}",
            event=record.event,
        )
        for record in log(*events)
    ]


@pytest.mark.parametrize(("unfit", "reason"), UNFIT.values(), ids=UNFIT)
def test_a_measure_beyond_its_reservation_is_set_aside_and_decides_nothing(
    unfit: AccountEvent, reason: str
) -> None:
    state = AccountPartition()
    decided(state, LIMITS, prompt("r"))
    before = state.account(ACCOUNT)
    (found,) = decided(state, unfit, start=2)
    assert found.unfit == reason
    assert (found.outputs, found.rows, found.accounts) == ((), (), ())
    assert state.account(ACCOUNT) == before, "what it holds stays reserved"
    after, settled = decided(state, prompt("r2"), usage("r"), start=3)
    assert after.outputs, "the partition goes on"
    assert not settled.unfit
    assert any(isinstance(output, UsageSettled) for output in settled.outputs)


def test_of_a_run_that_is_not_open_any_measure_is_nothing() -> None:
    state = AccountPartition()
    _, _, _, again, unknown = decided(
        state,
        LIMITS,
        prompt("r"),
        usage("r"),
        usage("r", input_tokens=10**9),
        usage("nobody's", output_tokens=-5),
    )
    assert (again.unfit, unknown.unfit) == ("", "")


@given(
    st.lists(
        st.one_of(
            st.integers(0, 5).map(lambda at: prompt(f"r{at}")),
            st.builds(
                usage,
                st.integers(0, 5).map(lambda at: f"r{at}"),
                input_tokens=st.sampled_from((-1, 0, 10, 300, 301)),
                output_tokens=st.sampled_from((-1, 0, 5, 100, 101)),
            ),
        ),
        max_size=12,
    ),
    st.integers(0, 12),
)
def test_a_new_owner_sets_aside_what_the_old_one_did(
    events: list[AccountEvent], saved_after: int
) -> None:
    state = AccountPartition()
    first = decided(state, LIMITS, *events)
    old = AccountPartition()
    kept = decided(old, LIMITS, *events[:saved_after])
    rows = [row for each in kept for row in each.rows]
    again = AccountPartition([*rows, snapshot(old.account(ACCOUNT))])
    for before, after in zip(first, decided(again, LIMITS, *events), strict=True):
        if before.offset > again.account(ACCOUNT).applied_offset or after.unfit:
            assert after.unfit == before.unfit
    assert again.account(ACCOUNT) == state.account(ACCOUNT)


def test_what_if_goes_on_as_well() -> None:
    for unfit, _ in UNFIT.values():
        report = what_if(log(LIMITS, prompt("r"), unfit, usage("r")), LIMITS)
        assert report.was == report.would_be


@given(st.integers(-(2**62), 2**62), st.integers(-(2**62), 2**62), st.integers(-(2**62), 2**62))
def test_no_number_in_a_prompt_stops_the_partition(needed: int, asked: int, waits: int) -> None:
    state = AccountPartition()
    decided(
        state,
        LIMITS,
        prompt("r1", needed=needed, max_output_tokens=asked, wait_ms=waits),
        prompt("r2"),
        usage("r1", input_tokens=needed, output_tokens=asked),
        usage("r2"),
    )
    assert all(use.reserved >= 0 for use in state.account(ACCOUNT).windows)
