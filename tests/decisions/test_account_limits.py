"""Versions of the limits in one partition of the account log: which record makes one (rules S1, S4 and S7)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from processors.decisions.account_partition import AccountPartition
from schemas.events.accounts import LimitsChanged, TierLimits
from schemas.vocabulary import Tier

LIMITS_OF_A_TIER = TierLimits(
    tokens_per_window=100,
    window="day",
    open_runs_max=1,
    models=("model",),
    input_tokens_max=10,
    output_tokens_max=10,
    run_deadline_ms=1_000,
    queue_wait_ms_max=1_000,
)


def limits(version: str, order: int | None = None) -> LimitsChanged:
    tiers = {Tier.FREE: LIMITS_OF_A_TIER}
    return LimitsChanged(version=version, tiers=tiers, changed_by="test", order=order)


def partition_after(*records: tuple[str, str]) -> AccountPartition:
    """After records of (event id, version of the policy)."""
    partition = AccountPartition()
    for offset, (event_id, version) in enumerate(records):
        partition.take(offset=offset, appended_ms=0, event_id=event_id, event=limits(version))
    return partition


def other_partition_after(*records: tuple[int | None, str]) -> AccountPartition:
    """After records of (order, version of the policy), and after being restored in the middle of each step."""
    partition = AccountPartition()
    for offset, (order, version) in enumerate(records):
        event, event_id = limits(version, order), f"e{offset}"
        rows = partition.take(offset=offset, appended_ms=0, event_id=event_id, event=event).rows
        partition = AccountPartition(rows) if rows else partition
        again = partition.take(offset=offset, appended_ms=0, event_id=event_id, event=event)
        assert not again.rows, "the same record again changes nothing"
    return partition


def versions(partition: AccountPartition) -> list[str]:
    return [version.limits.version for version in partition.limits]


def test_a_copy_of_a_record_is_no_new_version() -> None:
    assert versions(partition_after(("e1", "old"), ("e1", "old"))) == ["old"]


def test_a_copy_of_a_policy_that_was_applied_twice_does_not_bring_it_back() -> None:
    found = partition_after(("e1", "old"), ("e2", "old"), ("e3", "new"), ("e2", "old"))
    assert versions(found)[-1] == "new"


def test_an_operator_can_go_back_to_an_old_policy() -> None:
    found = partition_after(("e1", "old"), ("e2", "new"), ("e3", "old"))
    assert versions(found) == ["old", "new", "old"]


def test_a_replayed_segment_does_not_bring_an_old_policy_back() -> None:
    found = partition_after(("e1", "old"), ("e2", "new"), ("e1", "old"), ("e2", "new"))
    assert versions(found) == ["old", "new"]


def test_a_copy_is_known_after_a_restart() -> None:
    before = partition_after(("e1", "old"), ("e2", "new"))
    kept = before.take(offset=2, appended_ms=0, event_id="e3", event=limits("newest")).rows
    after = AccountPartition(kept)
    after.take(offset=3, appended_ms=0, event_id="e1", event=limits("old"))
    assert versions(after) == ["old", "new", "newest"]


def test_s7_what_the_first_partition_ordered_before_comes_too_late() -> None:
    assert versions(other_partition_after((7, "old"), (9, "new"), (8, "between"))) == ["old", "new"]


def test_s7_a_policy_that_is_applied_again_keeps_out_what_was_ordered_before_it() -> None:
    found = other_partition_after((7, "one"), (9, "one"), (8, "other"))
    assert {version.limits.version for version in found.limits} == {"one"}


def test_s7_what_has_no_order_counts_as_it_comes() -> None:
    assert versions(other_partition_after((7, "a"), (None, "b"), (3, "c"))) == ["a", "b", "c"]


@given(data=st.data(), applied=st.lists(st.sampled_from(("a", "b", "c")), min_size=1, max_size=6))
def test_s7_policies_that_are_applied_at_the_same_time_end_alike_in_every_partition(
    data: st.DataObject, applied: list[str]
) -> None:
    first = partition_after(*((f"e{order}", version) for order, version in enumerate(applied)))
    for _ in range(2):
        came = data.draw(st.permutations(list(enumerate(applied))))
        other = other_partition_after(*came)
        assert versions(other)[-1] == versions(first)[-1] == applied[-1]
