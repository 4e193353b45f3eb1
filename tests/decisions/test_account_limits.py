"""Versions of the limits in one partition of the account log: which record makes one (rules S1 and S4)."""

from __future__ import annotations

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


def limits(version: str) -> LimitsChanged:
    return LimitsChanged(version=version, tiers={Tier.FREE: LIMITS_OF_A_TIER}, changed_by="test")


def partition_after(*records: tuple[str, str]) -> AccountPartition:
    """After records of (event id, version of the policy)."""
    partition = AccountPartition()
    for offset, (event_id, version) in enumerate(records):
        partition.take(offset=offset, appended_ms=0, event_id=event_id, event=limits(version))
    return partition


def versions(partition: AccountPartition) -> list[str]:
    return [version.limits.version for version in partition.limits]


def test_the_same_limits_again_are_no_new_version() -> None:
    assert versions(partition_after(("e1", "old"), ("e2", "old"))) == ["old"]


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
