"""The account fold: which prompts are answered, on which model and lane, with how many tokens, and what they cost in the end.

One account is one ordered stream inside one partition of chat.accounts, and everything that a decision depends on is in that
partition: so the same record gives the same outputs with the same ids after a crash, under a zombie, or on a second machine.

A run is unknown, then open (reserved; perhaps *ended* already, as far as an edge or this fold has seen), then settled. Judgement:

  Q1  A record at or below the account's applied offset was decided before, and its outputs were delivered: nothing.
  Q2  The prompt's `ended_runs` free their concurrency slots at once, whatever is decided next. A set, never a counter. Their
      tokens stay reserved until they are measured. A run that this fold cancels has ended as well.
  Q3  Run known: nothing new.
  Q4  Idempotency key bound: redirected to its run where the fingerprint is the same, else a conflict.
  Q5 to Q14  are the judgement of a new prompt, in `admission.py`.
  Q15 Measured use settles its open run, once, in the window of the reservation, for the account and its seat, and releases the rest; what
      flows back into the bucket of tokens is the same. Of any other run: nothing. Use beyond the reservation is no measure: the record
      is unfit, and is set aside (S6).
  Q16 Where new limits lie below what is open, runs are cancelled for it, the newest first, until what is left fits: tokens of their
      window, runs at once, and both for the seat. A run that has ended holds its whole reservation until it is measured.

None of the outputs is an input of this fold.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from processors.decisions import seats
from processors.decisions.account_state import (
    AccountInput,
    AccountOutput,
    AccountState,
    Command,
    ended,
    held_tokens,
)
from processors.decisions.admission import decide_prompt
from processors.decisions.known_ids import Facts
from processors.decisions.lowered_limits import beyond
from processors.decisions.quota import reserved, settled
from schemas import rates
from schemas.events.account_snapshots import OpenReservation, RateBucket
from schemas.events.accounts import LimitsChanged, PromptSubmitted, TierLimits, UsageMeasured
from schemas.events.admissions import PromptAdmitted, PromptRefused
from schemas.events.quotas import QuotaReleased, QuotaReserved
from schemas.events.tokens import RunCancelled, RunEnded, RunQueued, RunRedirected
from schemas.events.usage import UsageSettled
from schemas.vocabulary import CancelReason, Tier


def judge(
    account: AccountState,
    command: Command,
    facts: Facts,
    limits: LimitsChanged | None,
    level: int = 0,
) -> tuple[AccountState, list[AccountOutput]]:
    """Decide and evolve in one step: the account after the record, and what it brings about. `level` is the ladder's."""
    assert command.event.account_id == account.account_id, "one account's record for its state"
    if command.offset <= account.applied_offset:
        return account, []  # Q1
    seen = mark_ended(account, command)
    outputs = decide(seen, command, facts, limits, level)
    after = replace(evolve(seen, command, outputs, limits), applied_offset=command.offset)
    _assert_held(after)
    return after, outputs


def lower(
    account: AccountState, limits: LimitsChanged, *, offset: int
) -> tuple[AccountState, list[RunCancelled]]:
    """Q16. The account after the limits at `offset`, and the cancels that they bring about."""
    if offset <= account.applied_offset:
        return account, []  # Q1
    gone = beyond(account, limits)
    if not gone:
        return account, []
    names = {run.run_id for run in gone}
    after = replace(
        account,
        applied_offset=offset,
        open=tuple(ended(run) if run.run_id in names else run for run in account.open),
    )
    return after, [RunCancelled(run_id=run.run_id, reason=CancelReason.LIMITS) for run in gone]


def _assert_held(account: AccountState) -> None:
    """I6: what is reserved is what open runs hold."""
    held: dict[str, int] = {}
    for run in account.open:  # Of a large team these are hundreds, for each record.
        held[run.window] = held.get(run.window, 0) + run.input_tokens + run.output_tokens
    for use in account.windows:
        assert use.reserved == held.get(use.window, 0), "I6: reserved is what open runs hold"


def mark_ended(account: AccountState, command: Command) -> AccountState:
    """Q2."""
    match command.event:
        case PromptSubmitted(ended_runs=told) if told:
            return _with_ended(account, frozenset(told))
        case _:
            return account


def _with_ended(account: AccountState, runs: frozenset[str]) -> AccountState:
    if not any(run.run_id in runs and not run.ended for run in account.open):
        return account
    return replace(
        account,
        open=tuple(ended(run) if run.run_id in runs else run for run in account.open),
    )


def decide(
    account: AccountState,
    command: Command,
    facts: Facts,
    limits: LimitsChanged | None,
    level: int = 0,
) -> list[AccountOutput]:
    """What the record brings about, in the order in which it is sent."""
    match command.event:
        case PromptSubmitted() as prompt:
            return _decide_prompt(account, command, prompt, facts, limits, level=level)
        case UsageMeasured() as usage:
            return _decide_usage(account, usage)
        case _:
            assert_never(command.event)


def _decide_prompt(
    account: AccountState,
    command: Command,
    prompt: PromptSubmitted,
    facts: Facts,
    limits: LimitsChanged | None,
    *,
    level: int,
) -> list[AccountOutput]:
    if facts.run_known:
        return []  # Q3
    if (bound := facts.binding) is not None:  # Q4
        to = bound.run_id if bound.fingerprint == prompt.fingerprint else None
        return [RunRedirected(run_id=prompt.run_id, account_id=prompt.account_id, to_run_id=to)]
    return decide_prompt(account, command, prompt, limits, level)


def unfit(account: AccountState, event: AccountInput) -> str:
    """Why no decision can use this record, though it decodes (Q15); empty where one can."""
    if not isinstance(event, UsageMeasured) or (run := _open_run(account, event)) is None:
        return ""
    for name, used, held in (
        ("input", event.input_tokens, run.input_tokens),
        ("output", event.output_tokens, run.output_tokens),
    ):
        if not 0 <= used <= held:
            return f"{used} {name} tokens, reserved were {held}"
    return ""


def _open_run(account: AccountState, usage: UsageMeasured) -> OpenReservation | None:
    return next((run for run in account.open if run.run_id == usage.run_id), None)


def _decide_usage(account: AccountState, usage: UsageMeasured) -> list[AccountOutput]:
    """Q15."""
    run = _open_run(account, usage)
    if run is None:
        return []
    assert not unfit(account, usage), "N5, I7: within its budget and its grant"
    used = usage.input_tokens + usage.output_tokens
    return [
        UsageSettled(
            run_id=run.run_id,
            account_id=account.account_id,
            chat_id=run.chat_id,
            tier=Tier(run.tier),
            model=run.model,
            window=run.window,
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            finish_reason=usage.finish_reason,
        ),
        QuotaReleased(
            run_id=run.run_id,
            account_id=account.account_id,
            window=run.window,
            tokens=held_tokens(run) - used,
        ),
    ]


def evolve(
    account: AccountState,
    command: Command,
    outputs: list[AccountOutput],
    limits: LimitsChanged | None,
) -> AccountState:
    """The account after the outputs of one record."""
    after = account
    cancelled = frozenset(o.run_id for o in outputs if isinstance(o, RunCancelled))
    if cancelled:
        after = _with_ended(after, cancelled)
    for output in outputs:
        match output:
            case QuotaReserved():
                after = _reserve(after, command, output, limits)
            case RunQueued():
                held = next(o for o in outputs if isinstance(o, QuotaReserved))
                after = replace(after, open=(*after.open, _opened(after, command, output, held)))
            case UsageSettled():
                after = _settle(after, output)
            case PromptAdmitted() | PromptRefused() | RunEnded() | RunRedirected():
                pass
            case RunCancelled() | QuotaReleased():
                pass  # Done above; and what was not used went back with the settlement.
            case _:
                assert_never(output)
    return after


def _reserve(
    account: AccountState, command: Command, output: QuotaReserved, limits: LimitsChanged | None
) -> AccountState:
    tokens = output.input_tokens + output.output_tokens
    now_ms = command.appended_ms
    kept = account.seats
    if output.seat_id is not None:
        found = seats.in_window(kept, output.window)
        kept = kept if found is None else seats.reserved(found, output.seat_id, tokens)
    assert isinstance(command.event, PromptSubmitted), "only a prompt reserves"
    assert limits is not None, "Q5: without limits nothing is admitted"
    tier = limits.tiers[command.event.tier]
    requests, in_tokens = _taken(account, tier, tokens, now_ms)
    return replace(
        account,
        windows=reserved(account.windows, output.window, tokens, appended_ms=now_ms),
        seats=kept,
        requests=requests,
        tokens=in_tokens,
    )


def _taken(
    account: AccountState, tier: TierLimits, tokens: int, now_ms: int
) -> tuple[RateBucket | None, RateBucket | None]:
    """Both buckets after an admission. One without a rate stays as it was."""
    requests, in_tokens = account.requests, account.tokens
    if tier.requests_per_minute is not None:
        requests = rates.taken(
            rates.filled(
                requests,
                per_minute=tier.requests_per_minute,
                most=rates.burst(tier.requests_per_minute, tier.requests_burst),
                appended_ms=now_ms,
            ),
            1,
        )
    if tier.tokens_per_minute is not None:
        in_tokens = rates.taken(
            rates.filled(
                in_tokens,
                per_minute=tier.tokens_per_minute,
                most=rates.burst(tier.tokens_per_minute, tier.tokens_burst),
                appended_ms=now_ms,
            ),
            tokens,
        )
    return requests, in_tokens


def _opened(
    account: AccountState, command: Command, queued: RunQueued, held: QuotaReserved
) -> OpenReservation:
    prompt = command.event
    assert isinstance(prompt, PromptSubmitted), "only a prompt opens a run"
    counted = held.seat_id is not None and account.seats.window == held.window
    return OpenReservation(
        run_id=queued.run_id,
        chat_id=queued.chat_id,
        window=held.window,
        model=queued.model,
        tier=queued.tier.value,
        input_tokens=queued.input_budget_tokens,
        output_tokens=queued.granted_output_tokens,
        assistant_message_id=queued.assistant_message_id,
        after_run_id=queued.after_run_id,
        queued_ms=command.appended_ms,
        deadline_ms=queued.deadline_ms,
        seat=seats.seat_name(prompt.seat_id),
        seat_counted=counted,
    )


def _settle(account: AccountState, output: UsageSettled) -> AccountState:
    run = next(run for run in account.open if run.run_id == output.run_id)
    used = output.input_tokens + output.output_tokens
    return replace(
        account,
        windows=settled(
            account.windows, run.window, reserved_tokens=held_tokens(run), used_tokens=used
        ),
        open=tuple(other for other in account.open if other is not run),
        tokens=rates.given_back(account.tokens, held_tokens(run) - used),
        seats=seats.settled(
            account.seats,
            run.seat,
            run.window if run.seat_counted else "",
            reserved_tokens=held_tokens(run),
            used_tokens=used,
        ),
    )
