"""The account fold: which prompts are answered, on which model and lane, with how many tokens, and what they cost in the end.

One account is one ordered stream inside one partition of chat.accounts, and everything that a decision depends on is in that
partition: so the same record gives the same outputs with the same ids after a crash, under a zombie, or on a second machine.

A run is unknown, then open (reserved; perhaps *ended* already, as far as an edge has seen), then settled. Order of judgement:

  Q1  A record at or below the account's applied offset was decided before, and its outputs were delivered: nothing.
  Q2  The prompt's `ended_runs` free their concurrency slots at once, whatever is decided next. A set, never a counter. Their
      tokens stay reserved until they are measured.
  Q3  Run known: nothing new.
  Q4  Idempotency key bound: redirected to its run where the fingerprint is the same, else a conflict.
  Q5  No limits known in this partition yet: refused as overloaded.
  Q6  A run of the same chat is open and has not ended: refused, run_in_progress.
  Q7  As many runs are open and not ended as the tier allows: refused, too_many_runs. As many are not measured, ended or not, as a
      snapshot can hold: refused, overloaded; it takes an outage of the recorder to come to that.
  Q8  The model is not one of the tier's, or the edge counted no tokens for it: refused, model_not_allowed.
  Q9  The prompt alone exceeds the tier's input maximum: refused, context_too_long. (The edge refuses these before.)
  Q10 Quota (rules N1 to N4): refused, quota_exhausted.
  Q11 The edge's view of load says shed, or a wait for the model and lane beyond the tier's maximum: refused, overloaded.
  Q12 Else admitted: reserved, queued, handed on with the user's message; model and lane are fixed here, nobody chooses again.
      The idempotency key is bound. A refusal binds nothing, except that its run id is known.
  Q13 Measured use settles its open run, once, in the window of the reservation, and releases the rest. Of any other run: nothing.

None of the outputs is an input of this fold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, assert_never

from processors.decisions.known_ids import Facts
from processors.decisions.quota import TokenGrant, grant, headroom, reserved, settled, window_at
from schemas.events.account_snapshots import (
    OPEN_RESERVATIONS_MAX,
    AccountSnapshot,
    OpenReservation,
    WindowUse,
)
from schemas.events.accounts import LimitsChanged, PromptSubmitted, TierLimits, UsageMeasured
from schemas.events.admissions import PromptAdmitted, PromptRefused
from schemas.events.quotas import QuotaReleased, QuotaReserved
from schemas.events.tokens import Refusal, RunEnded, RunQueued, RunRedirected
from schemas.events.usage import UsageSettled
from schemas.ids import derived_event_id
from schemas.vocabulary import EndCause, EndWriter, Lane, RefusalReason, Tier

PRESSURE_SHED: Final = 4
RETRY_OPEN_RUNS_MS: Final = 2_000
RETRY_OVERLOADED_MS_MIN: Final = 1_000
RETRY_OVERLOADED_MS_MAX: Final = 60_000

LANE_OF_TIER: Final = {Tier.TEAM: Lane.TEAM, Tier.PLUS: Lane.PLUS, Tier.FREE: Lane.FREE}

AccountInput = PromptSubmitted | UsageMeasured
AccountOutput = (
    QuotaReserved
    | RunQueued
    | PromptAdmitted
    | PromptRefused
    | RunEnded
    | RunRedirected
    | UsageSettled
    | QuotaReleased
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountState:
    """An account after the record at `applied_offset`. Immutable: a reference is a copy as of that offset."""

    account_id: str
    applied_offset: int = -1
    windows: tuple[WindowUse, ...] = ()
    open: tuple[OpenReservation, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One record of the account log, as it lies there. `appended_ms` is the broker's stamp."""

    offset: int
    appended_ms: int
    event_id: str
    event: AccountInput


def output_id(command: Command, output: AccountOutput) -> str:
    """The id of an output: the same whenever and wherever it is decided. No record has two outputs of one type."""
    return derived_event_id(command.event_id, type(output).__name__)


def judge(
    account: AccountState, command: Command, facts: Facts, limits: LimitsChanged | None
) -> tuple[AccountState, list[AccountOutput]]:
    """Decide and evolve in one step: the account after the record, and what it brings about."""
    assert command.event.account_id == account.account_id, "one account's record for its state"
    if command.offset <= account.applied_offset:
        return account, []  # Q1
    seen = mark_ended(account, command)
    outputs = decide(seen, command, facts, limits)
    after = replace(evolve(seen, command, outputs), applied_offset=command.offset)
    for use in after.windows:
        held = sum(r.input_tokens + r.output_tokens for r in after.open if r.window == use.window)
        assert use.reserved == held, "I6: what is reserved is what open runs hold"
    return after, outputs


def mark_ended(account: AccountState, command: Command) -> AccountState:
    """Q2."""
    match command.event:
        case PromptSubmitted(ended_runs=ended) if ended:
            runs = frozenset(ended)
            return replace(
                account,
                open=tuple(
                    _ended(run) if run.run_id in runs and not run.ended else run
                    for run in account.open
                ),
            )
        case _:
            return account


def _ended(run: OpenReservation) -> OpenReservation:
    return OpenReservation(
        run_id=run.run_id,
        chat_id=run.chat_id,
        window=run.window,
        model=run.model,
        tier=run.tier,
        input_tokens=run.input_tokens,
        output_tokens=run.output_tokens,
        ended=True,
    )


def decide(
    account: AccountState, command: Command, facts: Facts, limits: LimitsChanged | None
) -> list[AccountOutput]:
    """What the record brings about, in the order in which it is sent."""
    match command.event:
        case PromptSubmitted() as prompt:
            return _decide_prompt(account, command, prompt, facts, limits)
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
) -> list[AccountOutput]:
    if facts.run_known:
        return []  # Q3
    if (bound := facts.binding) is not None:  # Q4
        to = bound.run_id if bound.fingerprint == prompt.fingerprint else None
        return [
            RunRedirected(run_id=prompt.run_id, account_id=prompt.account_id, to_run_id=to),
        ]
    if limits is None:  # Q5
        return _refused(
            prompt,
            Refusal(
                reason=RefusalReason.OVERLOADED,
                retry_after_ms=RETRY_OVERLOADED_MS_MIN,
                wait_ms=RETRY_OVERLOADED_MS_MIN,
                detail="the limits are not known yet",
            ),
        )
    tier = limits.tiers.get(prompt.tier)
    running = [run for run in account.open if not run.ended]
    if any(run.chat_id == prompt.chat_id for run in running):  # Q6
        return _refused(prompt, Refusal(reason=RefusalReason.RUN_IN_PROGRESS))
    if tier is None:
        return _refused(
            prompt, Refusal(reason=RefusalReason.MODEL_NOT_ALLOWED, detail="a tier without limits")
        )
    if len(running) >= tier.open_runs_max:  # Q7
        return _refused(
            prompt,
            Refusal(reason=RefusalReason.TOO_MANY_RUNS, retry_after_ms=RETRY_OPEN_RUNS_MS),
        )
    if len(account.open) >= OPEN_RESERVATIONS_MAX:  # Q7
        return _refused(
            prompt,
            Refusal(
                reason=RefusalReason.OVERLOADED,
                retry_after_ms=RETRY_OVERLOADED_MS_MAX,
                wait_ms=RETRY_OVERLOADED_MS_MAX,
                detail="too many reservations wait for their settlement",
            ),
        )
    return _decide_tokens(account, command, prompt, tier)


def _decide_tokens(
    account: AccountState, command: Command, prompt: PromptSubmitted, tier: TierLimits
) -> list[AccountOutput]:
    model = prompt.model or tier.models[0]
    needed = prompt.prompt_tokens.get(model)
    if model not in tier.models or needed is None:  # Q8
        return _refused(prompt, Refusal(reason=RefusalReason.MODEL_NOT_ALLOWED))
    if not 0 <= needed <= tier.input_tokens_max:  # Q9
        return _refused(prompt, Refusal(reason=RefusalReason.CONTEXT_TOO_LONG))
    window = window_at(tier.window, command.appended_ms)
    given = grant(
        tier,
        needed=needed,
        asked_output=prompt.max_output_tokens,
        headroom_tokens=headroom(account.windows, window.name, tier.tokens_per_window),
    )
    if given is None:  # Q10
        return _refused(
            prompt,
            Refusal(reason=RefusalReason.QUOTA_EXHAUSTED, window_ends_ms=window.ends_ms),
        )
    wait_ms = _wait_ms(prompt, model, LANE_OF_TIER[prompt.tier])
    if prompt.load.pressure >= PRESSURE_SHED or wait_ms > tier.queue_wait_ms_max:  # Q11
        return _refused(
            prompt,
            Refusal(
                reason=RefusalReason.OVERLOADED,
                retry_after_ms=max(RETRY_OVERLOADED_MS_MIN, min(wait_ms, RETRY_OVERLOADED_MS_MAX)),
                wait_ms=wait_ms,
            ),
        )
    return _admitted(prompt, tier, given, model=model, window=window.name, wait_ms=wait_ms)


def _admitted(
    prompt: PromptSubmitted,
    tier: TierLimits,
    given: TokenGrant,
    *,
    model: str,
    window: str,
    wait_ms: int,
) -> list[AccountOutput]:
    """Q12."""
    lane = LANE_OF_TIER[prompt.tier]
    return [
        QuotaReserved(
            run_id=prompt.run_id,
            account_id=prompt.account_id,
            window=window,
            input_tokens=given.input_budget,
            output_tokens=given.output,
        ),
        RunQueued(
            run_id=prompt.run_id,
            account_id=prompt.account_id,
            chat_id=prompt.chat_id,
            user_message_id=prompt.user_message_id,
            assistant_message_id=prompt.assistant_message_id,
            parent_id=prompt.parent_id,
            tier=prompt.tier,
            lane=lane,
            model=model,
            input_budget_tokens=given.input_budget,
            granted_output_tokens=given.output,
            deadline_ms=tier.run_deadline_ms,
            wait_ms=wait_ms,
            quota_limited=given.quota_limited,
        ),
        PromptAdmitted(
            run_id=prompt.run_id,
            account_id=prompt.account_id,
            chat_id=prompt.chat_id,
            tier=prompt.tier,
            lane=lane,
            model=model,
            user_message_id=prompt.user_message_id,
            assistant_message_id=prompt.assistant_message_id,
            parent_id=prompt.parent_id,
            content=prompt.content,
            input_budget_tokens=given.input_budget,
            granted_output_tokens=given.output,
            sampling=prompt.sampling,
            stop=prompt.stop,
            deadline_ms=tier.run_deadline_ms,
            quota_limited=given.quota_limited,
        ),
    ]


def _wait_ms(prompt: PromptSubmitted, model: str, lane: Lane) -> int:
    waits = (wait for wait in prompt.load.waits if wait.model == model and wait.lane == lane.value)
    return max((wait.wait_ms for wait in waits), default=0)


def _refused(prompt: PromptSubmitted, refusal: Refusal) -> list[AccountOutput]:
    return [
        PromptRefused(
            run_id=prompt.run_id,
            account_id=prompt.account_id,
            chat_id=prompt.chat_id,
            user_message_id=prompt.user_message_id,
            assistant_message_id=prompt.assistant_message_id,
            reason=refusal.reason,
        ),
        RunEnded(
            run_id=prompt.run_id,
            cause=EndCause.REFUSED,
            writer=EndWriter.ADMISSION,
            refusal=refusal,
        ),
    ]


def _decide_usage(account: AccountState, usage: UsageMeasured) -> list[AccountOutput]:
    """Q13."""
    run = next((run for run in account.open if run.run_id == usage.run_id), None)
    if run is None:
        return []
    assert 0 <= usage.input_tokens <= run.input_tokens, "N5: input within its budget"
    assert 0 <= usage.output_tokens <= run.output_tokens, "N5, I7: output within its grant"
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
            tokens=run.input_tokens + run.output_tokens - used,
        ),
    ]


def evolve(account: AccountState, command: Command, outputs: list[AccountOutput]) -> AccountState:
    """The account after the outputs of one record."""
    windows, open_runs = account.windows, account.open
    for output in outputs:
        match output:
            case QuotaReserved():
                tokens = output.input_tokens + output.output_tokens
                windows = reserved(windows, output.window, tokens, appended_ms=command.appended_ms)
            case RunQueued():
                windows_of = {o.run_id: o.window for o in outputs if isinstance(o, QuotaReserved)}
                open_runs = (*open_runs, _opened(output, windows_of[output.run_id]))
            case UsageSettled():
                run = next(run for run in open_runs if run.run_id == output.run_id)
                windows = settled(
                    windows,
                    run.window,
                    reserved_tokens=run.input_tokens + run.output_tokens,
                    used_tokens=output.input_tokens + output.output_tokens,
                )
                open_runs = tuple(other for other in open_runs if other is not run)
            case PromptAdmitted() | PromptRefused() | RunEnded() | RunRedirected():
                pass
            case QuotaReleased():
                pass  # What was not used went back with the settlement.
            case _:
                assert_never(output)
    return replace(account, windows=windows, open=open_runs)


def _opened(queued: RunQueued, window: str) -> OpenReservation:
    return OpenReservation(
        run_id=queued.run_id,
        chat_id=queued.chat_id,
        window=window,
        model=queued.model,
        tier=queued.tier.value,
        input_tokens=queued.input_budget_tokens,
        output_tokens=queued.granted_output_tokens,
    )


def snapshot(account: AccountState) -> AccountSnapshot:
    """The row that keeps this state."""
    return AccountSnapshot(
        account_id=account.account_id,
        applied_offset=account.applied_offset,
        windows=account.windows,
        open=account.open,
    )


def restored(row: AccountSnapshot) -> AccountState:
    """The state that the row keeps."""
    return AccountState(
        account_id=row.account_id,
        applied_offset=row.applied_offset,
        windows=row.windows,
        open=row.open,
    )
