"""The account fold, rule by rule: given an account, when a record comes, then these outputs."""

from __future__ import annotations

import pytest

from processors.decisions.account import decide, judge
from processors.decisions.account_state import (
    AccountOutput,
    AccountState,
    Command,
    output_id,
    restored,
    snapshot,
)
from processors.decisions.known_ids import Facts
from processors.decisions.seats import Seats, seat_name
from producers.log_writer import RECORD_OVERHEAD_BYTES
from schemas.codec import encode
from schemas.events.account_snapshots import (
    OPEN_RESERVATIONS_MAX,
    SEAT_NAME_CHARS_MAX,
    SEATS_MAX,
    IdempotencyKeyBound,
    OpenReservation,
    SeatUse,
)
from schemas.events.accounts import LimitsChanged
from schemas.events.admissions import PromptAdmitted, PromptRefused
from schemas.events.quotas import QuotaReleased, QuotaReserved
from schemas.events.tokens import Refusal, RunEnded, RunQueued, RunRedirected
from schemas.events.usage import UsageSettled
from schemas.topics import ACCOUNT_SNAPSHOTS
from schemas.vocabulary import EndCause, EndWriter, Lane, OnBusy, RefusalReason, Tier
from tests.decisions.account_samples import (
    ACCOUNT,
    DAY_MS,
    MODEL,
    NOON_MS,
    command,
    limits,
    prompt,
    usage,
)

NEW = AccountState(account_id=ACCOUNT)


def after(*events: Command, given: AccountState = NEW) -> AccountState:
    """The account after these records."""
    for event in events:
        given, _ = judge(given, event, Facts(), limits())
    return given


def refusal(outputs: list[AccountOutput]) -> Refusal:
    """The reason in a refusal, which is always the same two outputs."""
    match outputs:
        case [PromptRefused(reason=reason), RunEnded(refusal=Refusal() as found) as ended]:
            assert (ended.cause, ended.writer) == (EndCause.REFUSED, EndWriter.ADMISSION)
            assert reason is found.reason
            return found
        case _:
            raise AssertionError(outputs)


def reason(outputs: list[AccountOutput]) -> RefusalReason:
    return refusal(outputs).reason


def test_an_admitted_prompt_is_reserved_queued_and_handed_on_with_its_text() -> None:
    outputs = decide(NEW, command(prompt("r")), Facts(), limits())
    assert [type(output) for output in outputs] == [QuotaReserved, RunQueued, PromptAdmitted]
    reserved, queued, admitted = outputs
    assert isinstance(reserved, QuotaReserved)
    assert isinstance(queued, RunQueued)
    assert isinstance(admitted, PromptAdmitted)
    assert (reserved.input_tokens, reserved.output_tokens) == (300, 100)
    assert (queued.input_budget_tokens, queued.granted_output_tokens) == (300, 100)
    assert (queued.model, queued.lane, queued.deadline_ms) == (MODEL, Lane.FREE, 60_000)
    assert not queued.quota_limited
    assert admitted.content == "hello"
    assert (admitted.model, admitted.lane) == (MODEL, Lane.FREE)


@pytest.mark.parametrize("tier", list(Tier))
def test_the_lane_is_that_of_the_tier(tier: Tier) -> None:
    outputs = decide(NEW, command(prompt("r", tier=tier)), Facts(), limits())
    assert isinstance(outputs[1], RunQueued)
    assert outputs[1].lane.value == tier.value


def test_a_record_at_or_below_the_applied_offset_brings_nothing() -> None:
    account = after(command(prompt("r"), offset=7))
    for offset in (0, 7):
        same, outputs = judge(account, command(prompt("other"), offset=offset), Facts(), limits())
        assert (same, outputs) == (account, [])


def test_a_run_that_is_known_brings_nothing_new() -> None:
    assert decide(NEW, command(prompt("r")), Facts(run_known=True), limits()) == []


def binding(fingerprint: str) -> Facts:
    return Facts(
        binding=IdempotencyKeyBound(
            account_id=ACCOUNT,
            idempotency_key="k",
            run_id="first",
            fingerprint=fingerprint,
            source_offset=0,
            appended_ms=NOON_MS,
        )
    )


def test_a_bound_key_with_the_same_body_leads_to_its_run_and_with_another_to_a_conflict() -> None:
    event = command(prompt("r", idempotency_key="k", fingerprint="same"), offset=1)
    for bound, to in (("same", "first"), ("other", None)):
        outputs = decide(NEW, event, binding(bound), limits())
        assert outputs == [RunRedirected(run_id="r", account_id=ACCOUNT, to_run_id=to)]


def test_a_bound_key_wins_over_every_refusal() -> None:
    account = after(command(prompt("first", chat="c")))
    event = command(prompt("r", chat="c", fingerprint="same"), offset=1)
    assert isinstance(decide(account, event, binding("same"), None)[0], RunRedirected)


def test_without_limits_a_prompt_is_refused_as_overloaded_and_may_come_again() -> None:
    found = refusal(decide(NEW, command(prompt("r")), Facts(), None))
    assert found.reason is RefusalReason.OVERLOADED
    assert found.retry_after_ms


def test_a_second_message_in_a_chat_with_an_open_run_is_refused() -> None:
    account = after(command(prompt("r1", chat="c")))
    event = command(prompt("r2", chat="c", on_busy=OnBusy.REJECT), offset=1)
    assert reason(decide(account, event, Facts(), limits())) is RefusalReason.RUN_IN_PROGRESS


def test_more_open_runs_than_the_tier_allows_are_refused_with_a_time_to_come_back() -> None:
    account = after(command(prompt("r1")), command(prompt("r2"), offset=1))
    found = refusal(decide(account, command(prompt("r3"), offset=2), Facts(), limits()))
    assert found.reason is RefusalReason.TOO_MANY_RUNS
    assert found.retry_after_ms


def test_runs_seen_to_end_free_their_slots_at_once_but_not_their_tokens() -> None:
    account = after(command(prompt("r1", chat="c")), command(prompt("r2"), offset=1))
    told = command(prompt("r3", chat="c", ended_runs=("r1", "r1", "unknown")), offset=2)
    account, outputs = judge(account, told, Facts(), limits())
    assert isinstance(outputs[1], RunQueued)
    assert [run.ended for run in account.open] == [True, False, False]
    # Two runs of 400 are held, so of 1,000 the third gets what it needs and what is left.
    assert account.windows[0].reserved == 1_000


def test_runs_that_ended_and_are_not_measured_are_bounded_too() -> None:
    """The recorder may be away for hours, and every client's runs end meanwhile."""
    longest = "x" * SEAT_NAME_CHARS_MAX
    waiting = tuple(
        OpenReservation(
            run_id=f"run_{number:048}",
            chat_id=f"chat_{number:030}",
            window="2026-01-01",
            model="a-model-with-a-long-name-of-many-billion-parameters",
            tier=Tier.FREE.value,
            input_tokens=1_000_000,
            output_tokens=1_000_000,
            ended=True,
            assistant_message_id=f"msg_{number:030}",
            after_run_id=f"run_{number:048}",
            queued_ms=NOON_MS,
            deadline_ms=7_200_000,
            seat=longest,
            seat_counted=True,
        )
        for number in range(OPEN_RESERVATIONS_MAX)
    )
    uses = tuple(
        SeatUse(seat=longest, settled=1_000_000_000, reserved=10_000_000) for _ in range(SEATS_MAX)
    )
    full = AccountState(
        account_id=ACCOUNT, open=waiting, seats=Seats(window="2026-01-01", uses=uses)
    )
    outputs = decide(full, command(prompt("r1")), Facts(), limits())
    assert refusal(outputs).reason is RefusalReason.OVERLOADED
    assert refusal(outputs).retry_after_ms is not None
    value, _ = encode(snapshot(full), event_id="e")
    assert len(value) < ACCOUNT_SNAPSHOTS.record_bytes_max - RECORD_OVERHEAD_BYTES


@pytest.mark.parametrize("chars", [1, SEAT_NAME_CHARS_MAX, SEAT_NAME_CHARS_MAX + 1, 64])
def test_a_seats_name_is_kept_or_its_digest_and_never_longer(chars: int) -> None:
    name = seat_name("a" * chars)
    assert len(name) <= SEAT_NAME_CHARS_MAX
    assert (name == "a" * chars) is (chars <= SEAT_NAME_CHARS_MAX)
    assert name != seat_name("b" + "a" * (chars - 1))


def test_ended_runs_count_even_where_the_prompt_is_refused() -> None:
    account = after(command(prompt("r1", chat="c")))
    told = command(prompt("r2", chat="c", ended_runs=("r1",), model="large"), offset=1)
    account, outputs = judge(account, told, Facts(), limits())
    assert reason(outputs) is RefusalReason.MODEL_NOT_ALLOWED
    assert account.open[0].ended


def test_a_model_outside_the_tier_or_without_a_token_count_is_refused() -> None:
    for event in (prompt("r", model="large"), prompt("r", prompt_tokens={})):
        outputs = decide(NEW, command(event), Facts(), limits())
        assert reason(outputs) is RefusalReason.MODEL_NOT_ALLOWED


@pytest.mark.parametrize(
    ("needed", "expected"), [(300, None), (301, RefusalReason.CONTEXT_TOO_LONG)]
)
def test_a_prompt_beyond_the_input_maximum_is_refused(
    needed: int, expected: RefusalReason | None
) -> None:
    outputs = decide(NEW, command(prompt("r", needed=needed)), Facts(), limits())
    assert (None if isinstance(outputs[0], QuotaReserved) else reason(outputs)) is expected


def test_an_exhausted_quota_is_refused_with_the_end_of_its_window() -> None:
    tight = limits(tokens_per_window=10)
    found = refusal(decide(NEW, command(prompt("r", needed=10)), Facts(), tight))
    assert found.reason is RefusalReason.QUOTA_EXHAUSTED
    assert found.window_ends_ms == NOON_MS + DAY_MS // 2


def test_a_grant_cut_by_the_quota_says_so() -> None:
    tight = limits(tokens_per_window=60)
    outputs = decide(NEW, command(prompt("r", needed=10)), Facts(), tight)
    queued = outputs[1]
    assert isinstance(queued, RunQueued)
    assert (queued.input_budget_tokens, queued.granted_output_tokens) == (10, 50)
    assert queued.quota_limited


@pytest.mark.parametrize(
    ("wait_ms", "pressure", "admitted"),
    [(5_000, 3, True), (5_001, 0, False), (0, 4, False), (90_000, 4, False)],
)
def test_a_view_of_load_beyond_the_tiers_patience_is_refused_with_the_wait(
    wait_ms: int, pressure: int, admitted: bool
) -> None:
    event = command(prompt("r", wait_ms=wait_ms, pressure=pressure))
    outputs = decide(NEW, event, Facts(), limits())
    if admitted:
        assert isinstance(outputs[1], RunQueued)
        assert outputs[1].wait_ms == wait_ms
    else:
        found = refusal(outputs)
        assert (found.reason, found.wait_ms) == (RefusalReason.OVERLOADED, wait_ms)
        assert 1_000 <= (found.retry_after_ms or 0) <= 60_000


def test_the_wait_for_another_lane_does_not_count() -> None:
    event = command(prompt("r", tier=Tier.PLUS, wait_ms=90_000))
    assert isinstance(decide(NEW, event, Facts(), limits())[1], RunQueued)


def test_measured_use_settles_the_run_and_releases_the_rest() -> None:
    account = after(command(prompt("r")))
    account, outputs = judge(account, command(usage("r"), offset=1), Facts(), limits())
    settled, released = outputs
    assert isinstance(settled, UsageSettled)
    assert (settled.input_tokens, settled.output_tokens) == (10, 5)
    assert isinstance(released, QuotaReleased)
    assert released.tokens == 385
    assert account.open == ()
    assert (account.windows[0].settled, account.windows[0].reserved) == (15, 0)


def test_a_run_is_settled_once_and_an_unknown_one_never() -> None:
    account = after(command(prompt("r")), command(usage("r"), offset=1))
    for run in ("r", "unknown"):
        _, outputs = judge(account, command(usage(run), offset=2), Facts(), limits())
        assert outputs == []


def test_settlement_belongs_to_the_window_of_the_reservation() -> None:
    account = after(command(prompt("r"), appended_ms=NOON_MS))
    later = command(usage("r"), offset=1, appended_ms=NOON_MS + DAY_MS)
    account, outputs = judge(account, later, Facts(), limits())
    assert isinstance(outputs[0], UsageSettled)
    assert outputs[0].window == account.windows[0].window
    assert account.windows[0].settled == 15


@pytest.mark.parametrize(("input_tokens", "output_tokens"), [(301, 0), (0, 101), (-1, 0)])
def test_use_beyond_its_reservation_is_a_defect(input_tokens: int, output_tokens: int) -> None:
    account = after(command(prompt("r")))
    event = command(usage("r", input_tokens=input_tokens, output_tokens=output_tokens), offset=1)
    with pytest.raises(AssertionError, match="N5"):
        judge(account, event, Facts(), limits())


def test_ids_of_outputs_depend_on_the_record_and_the_type_alone() -> None:
    outputs = decide(NEW, command(prompt("r"), offset=3), Facts(), limits())
    again = decide(NEW, command(prompt("r"), offset=3), Facts(), limits())
    ids = [output_id("e3", output) for output in outputs]
    assert ids == [output_id("e3", output) for output in again]
    assert len(set(ids)) == len(ids)
    assert ids != [output_id("e4", output) for output in outputs]


def test_a_state_survives_its_snapshot() -> None:
    account = after(command(prompt("r")), command(prompt("s", ended_runs=("r",)), offset=1))
    assert restored(snapshot(account)) == account


def test_a_tier_without_limits_is_refused() -> None:
    bare = LimitsChanged(version="v", tiers={}, changed_by="test")
    outputs = decide(NEW, command(prompt("r")), Facts(), bare)
    assert reason(outputs) is RefusalReason.MODEL_NOT_ALLOWED
