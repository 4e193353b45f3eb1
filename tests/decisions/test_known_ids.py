"""Run ids and idempotency keys: what counts for which record."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from processors.decisions.known_ids import FORGET_AFTER_MS, Facts, KnownIds
from schemas.events.account_snapshots import KNOWN_MS_MAX, IdempotencyKeyBound, RunKnown

Row = RunKnown | IdempotencyKeyBound


def known(run: str, offset: int, at_ms: int = 0) -> RunKnown:
    return RunKnown(account_id="a", run_id=run, source_offset=offset, appended_ms=at_ms)


def bound(run: str, offset: int, at_ms: int = 0, account: str = "a") -> IdempotencyKeyBound:
    return IdempotencyKeyBound(
        account_id=account,
        idempotency_key="k",
        run_id=run,
        fingerprint="f",
        source_offset=offset,
        appended_ms=at_ms,
    )


def facts(index: KnownIds, offset: int, at_ms: int = 0, run: str = "r") -> Facts:
    return index.facts(
        account_id="a", run_id=run, idempotency_key="k", offset=offset, appended_ms=at_ms
    )


def test_an_entry_counts_for_records_above_its_source_only() -> None:
    index = KnownIds([known("r", 5), bound("r", 5)])
    assert facts(index, 5) == Facts()
    assert facts(index, 6) == Facts(run_known=True, binding=bound("r", 5))


def test_an_entry_counts_for_a_day_of_append_times() -> None:
    index = KnownIds([known("r", 0), bound("r", 0)])
    assert facts(index, 9, KNOWN_MS_MAX - 1).run_known
    assert facts(index, 9, KNOWN_MS_MAX) == Facts()


def test_a_key_of_one_account_is_nothing_to_another() -> None:
    assert facts(KnownIds([bound("r", 0, account="b")]), 9).binding is None


def test_a_key_bound_again_after_a_day_still_shows_older_records_the_older_run() -> None:
    first, second = bound("one", 0), bound("two", 9, KNOWN_MS_MAX + 5)
    for rows in ([first, second], [second, first], [second, first, first, second]):
        index = KnownIds(rows)
        assert facts(index, 8, KNOWN_MS_MAX - 1).binding == first
        assert facts(index, 10, KNOWN_MS_MAX + 6).binding == second


def test_what_has_ceased_to_count_is_forgotten_later() -> None:
    index = KnownIds([known("r", 0), bound("r", 0), known("s", 1, 10)])
    assert index.forget(KNOWN_MS_MAX + FORGET_AFTER_MS) == []
    assert index.forget(KNOWN_MS_MAX + FORGET_AFTER_MS + 1) == [known("r", 0), bound("r", 0)]
    assert len(index) == 1
    assert index.forget(KNOWN_MS_MAX + FORGET_AFTER_MS + 11) == [known("s", 1, 10)]
    assert len(index) == 0


def test_the_row_of_a_key_that_was_bound_again_stays_on_the_topic() -> None:
    index = KnownIds([bound("one", 0), bound("two", 9, KNOWN_MS_MAX)])
    assert index.forget(KNOWN_MS_MAX + FORGET_AFTER_MS + 1) == []
    assert facts(index, 10, KNOWN_MS_MAX + 1).binding == bound("two", 9, KNOWN_MS_MAX)


ROWS = st.lists(
    st.builds(
        lambda offset, name, key: (
            bound(name, offset, offset * KNOWN_MS_MAX // 4)
            if key
            else known(name, offset, offset * KNOWN_MS_MAX // 4)
        ),
        st.integers(0, 12),
        st.sampled_from(("r", "s")),
        st.booleans(),
    ),
    max_size=12,
    unique_by=lambda row: (type(row), row.source_offset),
)


@given(ROWS, st.randoms(), st.integers(0, 14))
def test_rows_may_come_in_any_order_and_more_than_once(
    rows: list[Row], random: object, offset: int
) -> None:
    shuffled = [*rows, *rows]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    in_order = KnownIds(sorted(rows, key=lambda row: row.source_offset))
    at_ms = offset * KNOWN_MS_MAX // 4
    assert (
        facts(KnownIds(shuffled), offset, at_ms).binding == facts(in_order, offset, at_ms).binding
    )
