"""The recorded account log under other limits: who would have been admitted, refused, shortened, replaced, and for what."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from processors.decisions.what_if import ADMITTED, REDIRECTED, Recorded, Report, what_if
from schemas.events.accounts import (
    AccountEvent,
    Ladder,
    LadderLevel,
    LimitsChanged,
    LoadView,
    ModelPolicy,
)
from schemas.vocabulary import OnBusy, RefusalReason, ServiceTier, Tier
from tests.decisions.account_samples import MODEL, NOON_MS, limits, listed, prompt, usage

ROOMY = limits("roomy", tokens_per_window=1_000_000, open_runs_max=50)


def log(*events: AccountEvent | int) -> list[Recorded]:
    """Records; a number lets so many ms pass before the next one."""
    found: list[Recorded] = []
    now_ms = NOON_MS
    for event in events:
        if isinstance(event, int):
            now_ms += event
        else:
            found.append(
                Recorded(
                    offset=len(found), appended_ms=now_ms, event_id=f"e{len(found)}", event=event
                )
            )
    return found


def free(report: Report) -> tuple[dict[str, int], dict[str, int]]:
    """Decisions of the free tier: was, would be."""
    return (
        dict(report.was[Tier.FREE].decisions),
        dict(report.would_be[Tier.FREE].decisions),
    )


def test_under_the_same_limits_everything_would_have_been_as_it_was() -> None:
    records = log(ROOMY, prompt("r1"), usage("r1"), prompt("r2", chat="c"), prompt("r3", chat="c"))
    was, would_be = free(what_if(records, ROOMY))
    assert was == would_be == {ADMITTED: 2, RefusalReason.RUN_IN_PROGRESS: 1}


def test_tighter_limits_refuse_what_was_admitted_and_do_not_bill_it() -> None:
    records = log(ROOMY, prompt("r1"), prompt("r2"), 1, usage("r1"), usage("r2"))
    report = what_if(records, limits("tight", open_runs_max=1))
    refused = f"{RefusalReason.TOO_MANY_RUNS} (open_runs_max)"
    assert free(report) == ({ADMITTED: 2}, {ADMITTED: 1, refused: 1})
    assert report.changes == {
        (Tier.FREE, ADMITTED, ADMITTED): 1,
        (Tier.FREE, ADMITTED, refused): 1,
    }
    assert report.was[Tier.FREE].output_tokens == 10
    assert report.would_be[Tier.FREE].output_tokens == 5


def test_wider_limits_admit_what_was_refused_and_guess_what_it_would_have_used() -> None:
    one = limits("one", open_runs_max=1)
    records = log(one, prompt("r1"), prompt("r2"), 100, usage("r1"), 200, prompt("r3"))
    report = what_if(records, ROOMY)
    would_be = report.would_be[Tier.FREE]
    assert would_be.decisions == {ADMITTED: 3}
    # r2 used its 10 tokens of prompt and the mean answer, 5; r3, which has not ended, is left open.
    assert (would_be.input_tokens, would_be.output_tokens) == (20, 10)


def test_a_guessed_run_ends_after_the_mean_time_and_frees_its_place() -> None:
    one = limits("one", open_runs_max=1)
    records = log(
        one,
        prompt("r1"),
        1_000,
        usage("r1"),
        prompt("big", needed=301),
        prompt("r2"),
        500,
        prompt("r3"),
    )
    long = limits("long", open_runs_max=1, input_tokens_max=400)
    would_be = what_if(records, long).would_be[Tier.FREE].decisions
    assert would_be[f"{RefusalReason.TOO_MANY_RUNS} (open_runs_max)"] == 2, "while `big` runs"
    later = [*records, *log(3_000, prompt("r4"))]
    assert what_if(later, long).would_be[Tier.FREE].decisions[ADMITTED] == 3


def test_a_shorter_grant_bills_no_more_than_it_grants() -> None:
    records = log(ROOMY, prompt("r1"), usage("r1", output_tokens=90))
    report = what_if(records, limits("short", output_tokens_max=40))
    assert report.would_be[Tier.FREE].output_tokens == 40
    assert report.would_be[Tier.FREE].shortened == 0, "nobody wishes more than the tier allows"
    cut = what_if(records, limits("quota", tokens_per_window=50))
    assert cut.would_be[Tier.FREE].shortened == 1


def test_another_ladder_is_folded_over_the_load_as_it_was() -> None:
    level = LadderLevel(enter_ms=1_000, leave_ms=500, output_percent_free=50, downgrade_free=True)
    laddered = msgspec.structs.replace(
        ROOMY,
        version="laddered",
        ladder=Ladder(levels=(level,)),
        models={
            MODEL: ModelPolicy(context_tokens=900, cost_percent=300, smaller="tiny"),
            "tiny": ModelPolicy(context_tokens=900, cost_percent=100),
        },
    )
    busy = LoadView(saturation_ms=2_000)
    counts = {MODEL: 10, "tiny": 9}
    records = log(
        ROOMY,
        prompt("r1", prompt_tokens=counts),
        prompt("r2", prompt_tokens=counts, load=busy),
        usage("r1"),
        usage("r2"),
    )
    report = what_if(records, laddered)
    was, would_be = report.was[Tier.FREE], report.would_be[Tier.FREE]
    assert (was.downgraded, was.shortened, was.cost) == (0, 0, 30 * 300)
    assert (would_be.downgraded, would_be.shortened) == (1, 1)
    assert would_be.cost == 15 * 300 + 15 * 100


def test_flex_prompts_would_have_been_the_first_to_be_refused() -> None:
    level = LadderLevel(enter_ms=1_000, leave_ms=500, optional_work=False)
    laddered = msgspec.structs.replace(ROOMY, version="laddered", ladder=Ladder(levels=(level,)))
    busy = LoadView(saturation_ms=2_000)
    records = log(
        ROOMY,
        prompt("r1", load=busy, service_tier=ServiceTier.FLEX),
        prompt("r2", load=busy),
        usage("r1"),
        usage("r2"),
    )
    refused = f"{RefusalReason.OVERLOADED} (optional_work)"
    assert free(what_if(records, laddered)) == ({ADMITTED: 2}, {ADMITTED: 1, refused: 1})


def test_limits_that_were_lowered_on_the_log_cancel_only_what_was() -> None:
    records = log(ROOMY, prompt("r1"), prompt("r2"), limits("low", open_runs_max=1))
    report = what_if(records, ROOMY)
    assert report.was[Tier.FREE].cancelled == 1
    assert report.would_be[Tier.FREE].cancelled == 0


def test_a_key_whose_run_was_refused_leads_nowhere_and_one_that_would_be_admitted_redirects() -> (
    None
):
    one = limits("one", open_runs_max=1)
    records = log(
        one,
        prompt("r1"),
        prompt("r2", idempotency_key="k", fingerprint="f"),
        usage("r1"),
        prompt("r3", idempotency_key="k", fingerprint="f"),
    )
    was, would_be = free(what_if(records, ROOMY))
    assert was[ADMITTED] == 2
    assert would_be == {ADMITTED: 2, REDIRECTED: 1}


def test_reports_of_partitions_add_up() -> None:
    report = Report()
    for _ in range(2):
        report.add(what_if(log(ROOMY, prompt("r1"), usage("r1")), ROOMY))
    assert report.was[Tier.FREE].decisions == {ADMITTED: 2}
    assert report.changes == {(Tier.FREE, ADMITTED, ADMITTED): 2}
    assert report.would_be[Tier.FREE].input_tokens == 20


def test_an_empty_log_says_nothing() -> None:
    assert what_if([], ROOMY).changes == {}


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("say"),
            st.sampled_from(("c1", "c2")),
            st.sampled_from(OnBusy),
            st.sampled_from((1, 20, 300)),
        ),
        st.tuples(st.just("measure"), st.integers(0, 5), st.integers(0, 100), st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 5_000), st.just(0), st.just(0)),
    ),
    max_size=25,
)
POLICIES: list[LimitsChanged] = [
    ROOMY,
    limits("tight", tokens_per_window=450),
    limits("one", open_runs_max=1),
    limits("rated", requests_per_minute=2, tokens_per_minute=500),
    listed("hello"),
    limits("seated", seats_max=1, seat_tokens_per_window=500),
]


@given(STEPS, st.sampled_from(POLICIES), st.sampled_from(POLICIES))
def test_whatever_was_recorded_every_prompt_has_one_fate_on_either_side(
    steps: list[Any], recorded: LimitsChanged, other: LimitsChanged
) -> None:
    events: list[AccountEvent | int] = [recorded]
    runs = 0
    for kind, *drawn in steps:
        match kind:
            case "say":
                events.append(prompt(f"r{runs}", chat=drawn[0], on_busy=drawn[1], needed=drawn[2]))
                runs += 1
            case "measure" if drawn[0] < runs:
                events.append(usage(f"r{drawn[0]}", input_tokens=1, output_tokens=1))
            case "wait":
                events.append(drawn[0])
            case _:
                pass
    report = what_if(log(*events), other)
    assert sum(report.changes.values()) == runs
    assert report.was[Tier.FREE].decisions.total() == runs
    assert report.would_be[Tier.FREE].decisions.total() == runs
    if other is recorded:
        assert all(was == would_be for _, was, would_be in report.changes)
