"""Whether a prompt is answered: the judgement of one PromptSubmitted, in the order that the protocol fixes.

The rules go on from those of `account.py` (Q1 to Q4 and the settlement are there; Q13 is told in `lane_room.py`):

  Q5  No limits known in this partition yet: refused as overloaded. A tier without limits: refused, model_not_allowed.
  Q6  Runs of the same chat are open and have not ended. `reject`: refused, run_in_progress. `enqueue`: the prompt waits behind the newest
      of them, of which at most `enqueued_runs_max` may wait. `interrupt`: if it is admitted, all of them are cancelled first, those that
      wait too, and it comes behind the newest. Either way that one's answer is its parent, unless the client named another, and it
      starts when all of them have ended: one in the middle may be cancelled, and those before it go on.
  Q7  Rates (rules V1 to V4), requests before tokens: refused, rate_limited.
  Q8  As many runs may generate at once as the tier allows: refused, too_many_runs. One that waits for another adds none. As many are not
      measured, ended or not, as a snapshot can hold: refused, overloaded; it takes an outage of the recorder to come to that.
  Q9  The same for the seat; and in this window no more than `seats_max` seats.
  Q10 The model is not one of the tier's, or the edge counted no tokens for it: refused, model_not_allowed. Who names none gets the first
      of the tier's that was counted. The ladder may put the model's smaller one in its place (rules L1 to L4), but not where the wait for
      that is longer: it would take work from idle workers to busy ones.
  Q11 The prompt alone exceeds the tier's input maximum: refused, context_too_long. (The edge refuses these before.) Its text holds a
      blocked phrase (rules B1 to B4): refused, content_blocked.
  Q12 Quota (rules N1 to N4) of the account and of the seat, whichever leaves less; the ladder may shorten the answer that is wished:
      refused, quota_exhausted.
  Q13 Its lane has no room for it: refused, overloaded.
  Q14 Else admitted: reserved, queued, handed on with the user's message; model and lane are fixed here, nobody chooses again.
      A refusal binds nothing, except that its run id is known: no key, no rate, no cancel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from processors.decisions.account_state import (
    AccountOutput,
    AccountState,
    Command,
    may_generate,
)
from processors.decisions.ladder import Step, step
from processors.decisions.lane_room import (
    RETRY_OVERLOADED_MS_MAX,
    RETRY_OVERLOADED_MS_MIN,
    ahead_of,
    no_room,
)
from processors.decisions.quota import TokenGrant, Window, grant, headroom, window_at
from processors.decisions.seats import in_window, seat_name, use_of
from schemas.blocked_phrases import blocked_phrases
from schemas.events.account_snapshots import OPEN_RESERVATIONS_MAX, OpenReservation
from schemas.events.accounts import LimitsChanged, PromptSubmitted, TierLimits
from schemas.events.admissions import PromptAdmitted, PromptRefused
from schemas.events.quotas import QuotaReserved
from schemas.events.tokens import Refusal, RunCancelled, RunEnded, RunQueued
from schemas.rates import burst, filled, wait_ms
from schemas.topics import RUN_DEADLINE_MS_MAX
from schemas.vocabulary import (
    CancelReason,
    EndCause,
    EndWriter,
    Lane,
    OnBusy,
    RefusalReason,
    lane_of,
)

RETRY_OPEN_RUNS_MS: Final = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A prompt before its judges. `live` are the account's runs that would still be open beside it."""

    account: AccountState
    command: Command
    prompt: PromptSubmitted
    limits: LimitsChanged
    tier: TierLimits
    lane: Lane
    level: int
    step: Step
    live: list[OpenReservation]
    of_chat: list[OpenReservation]
    after: OpenReservation | None
    interrupted: list[OpenReservation]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """The model that would answer, and the prompt's tokens for it."""

    model: str
    needed: int
    downgraded_from: str | None


def decide_prompt(
    account: AccountState,
    command: Command,
    prompt: PromptSubmitted,
    limits: LimitsChanged | None,
    level: int,
) -> list[AccountOutput]:
    """Q5 to Q14, for a run that is new and a key that is not bound."""
    if limits is None:  # Q5
        refusal = Refusal(
            reason=RefusalReason.OVERLOADED,
            retry_after_ms=RETRY_OVERLOADED_MS_MIN,
            wait_ms=RETRY_OVERLOADED_MS_MIN,
            detail="the limits are not known yet",
        )
        return _refused(prompt, refusal, 0)
    tier = limits.tiers.get(prompt.tier)
    if tier is None:
        refusal = Refusal(reason=RefusalReason.MODEL_NOT_ALLOWED, detail="a tier without limits")
        return _refused(prompt, refusal, level)
    live = [run for run in account.open if not run.ended]
    of_chat = [run for run in live if run.chat_id == prompt.chat_id]
    interrupted = of_chat if prompt.on_busy is OnBusy.INTERRUPT else []
    case = _Case(
        account=account,
        command=command,
        prompt=prompt,
        limits=limits,
        tier=tier,
        lane=lane_of(prompt.tier, prompt.service_tier),
        level=level,
        step=step(limits, level, prompt.tier, prompt.load),
        live=[run for run in live if run not in interrupted] if interrupted else live,
        of_chat=of_chat,
        # A run without an answer's id was admitted before runs could wait for it.
        after=of_chat[-1] if of_chat and of_chat[-1].assistant_message_id else None,
        interrupted=interrupted,
    )
    choice = _choice(case)
    for refused in (
        _busy(case),
        _rate(case, choice),
        _open_runs(case),
        _seats(case),
    ):
        if refused is not None:
            return _refused(prompt, refused, level)
    if choice is None:  # Q10
        return _refused(prompt, Refusal(reason=RefusalReason.MODEL_NOT_ALLOWED), level)
    if not 0 <= choice.needed <= tier.input_tokens_max:  # Q11
        refusal = Refusal(reason=RefusalReason.CONTEXT_TOO_LONG, limit="input_tokens_max")
        return _refused(prompt, refusal, level)
    if blocked_phrases(limits.content.blocked_phrases).in_text(prompt.content):
        refusal = Refusal(reason=RefusalReason.CONTENT_BLOCKED, limit="blocked_phrases")
        return _refused(prompt, refusal, level)
    window = window_at(tier.window, command.appended_ms)
    given = _grant(case, choice, window)
    if isinstance(given, Refusal):
        return _refused(prompt, given, level)
    ahead = ahead_of(prompt, choice.model)
    if (full := no_room(prompt, ahead, limits, case.step)) is not None:
        return _refused(prompt, full, level)
    return _admitted(case, choice, window, given, ahead.wait_ms)


def _choice(case: _Case) -> _Choice | None:
    """Q10. The model, and by how much it is replaced; None where it may not be used."""
    prompt, tier = case.prompt, case.tier
    served = (name for name in tier.models if name in prompt.prompt_tokens)
    asked = prompt.model or next(served, tier.models[0])
    needed = prompt.prompt_tokens.get(asked)
    if asked not in tier.models or needed is None:
        return None
    policy = case.limits.models.get(asked)
    if case.step.downgrade and policy is not None and policy.smaller is not None:
        fewer = prompt.prompt_tokens.get(policy.smaller)
        if (
            fewer is not None
            and 0 <= fewer <= tier.input_tokens_max
            and ahead_of(prompt, policy.smaller).wait_ms <= ahead_of(prompt, asked).wait_ms
        ):
            return _Choice(model=policy.smaller, needed=fewer, downgraded_from=asked)
    return _Choice(model=asked, needed=needed, downgraded_from=None)


def _busy(case: _Case) -> Refusal | None:
    """Q6."""
    if not case.of_chat or case.interrupted:
        return None
    if case.prompt.on_busy is OnBusy.REJECT or case.after is None:
        return Refusal(reason=RefusalReason.RUN_IN_PROGRESS)
    if len(case.of_chat) > case.tier.enqueued_runs_max:
        return Refusal(
            reason=RefusalReason.TOO_MANY_RUNS,
            retry_after_ms=RETRY_OPEN_RUNS_MS,
            limit="enqueued_runs_max",
        )
    return None


def _rate(case: _Case, choice: _Choice | None) -> Refusal | None:
    """Q7."""
    tier, account, now_ms = case.tier, case.account, case.command.appended_ms
    rates = (
        ("requests_per_minute", tier.requests_per_minute, tier.requests_burst, account.requests, 1),
        (
            "tokens_per_minute",
            tier.tokens_per_minute,
            tier.tokens_burst,
            account.tokens,
            choice.needed + 1 if choice is not None else 0,
        ),
    )
    for name, per_minute, of_burst, bucket, amount in rates:
        if per_minute is None:
            continue
        most = burst(per_minute, of_burst)
        now = filled(bucket, per_minute=per_minute, most=most, appended_ms=now_ms)
        wait = wait_ms(now, per_minute=per_minute, most=most, amount=amount)
        if wait > 0:
            return Refusal(reason=RefusalReason.RATE_LIMITED, retry_after_ms=wait, limit=name)
    return None


def _open_runs(case: _Case) -> Refusal | None:
    """Q8."""
    if not _waits(case) and may_generate(case.live) >= case.tier.open_runs_max:
        return Refusal(
            reason=RefusalReason.TOO_MANY_RUNS,
            retry_after_ms=RETRY_OPEN_RUNS_MS,
            limit="open_runs_max",
        )
    if len(case.account.open) >= OPEN_RESERVATIONS_MAX:
        return Refusal(
            reason=RefusalReason.OVERLOADED,
            retry_after_ms=RETRY_OVERLOADED_MS_MAX,
            wait_ms=RETRY_OVERLOADED_MS_MAX,
            detail="too many reservations wait for their settlement",
        )
    return None


def _waits(case: _Case) -> bool:
    """Whether the prompt would wait behind a run that goes on, and so add none that generates."""
    return case.after is not None and not case.interrupted


def _seats(case: _Case) -> Refusal | None:
    """Q9."""
    tier, seat = case.tier, seat_name(case.prompt.seat_id)
    if tier.seat_open_runs_max is not None and not _waits(case):
        of_seat = [run for run in case.live if run.seat == seat]
        if may_generate(of_seat) >= tier.seat_open_runs_max:
            return Refusal(
                reason=RefusalReason.TOO_MANY_RUNS,
                retry_after_ms=RETRY_OPEN_RUNS_MS,
                limit="seat_open_runs_max",
            )
    if tier.seats_max is not None:
        window = window_at(tier.window, case.command.appended_ms)
        seats = in_window(case.account.seats, window.name)
        if seats is not None and len(seats.uses) >= tier.seats_max and not use_of(seats, seat):
            return Refusal(
                reason=RefusalReason.QUOTA_EXHAUSTED,
                window_ends_ms=window.ends_ms,
                limit="seats_max",
            )
    return None


def _grant(case: _Case, choice: _Choice, window: Window) -> TokenGrant | Refusal:
    """Q12."""
    tier, account = case.tier, case.account
    limit, left = (
        "tokens_per_window",
        headroom(account.windows, window.name, tier.tokens_per_window),
    )
    if tier.seat_tokens_per_window is not None:
        seats = in_window(account.seats, window.name)
        use = use_of(seats, seat_name(case.prompt.seat_id)) if seats is not None else None
        of_seat = tier.seat_tokens_per_window - (use.settled + use.reserved if use else 0)
        if of_seat < left:
            limit, left = "seat_tokens_per_window", of_seat
    given = grant(
        tier,
        needed=choice.needed,
        asked_output=case.prompt.max_output_tokens,
        headroom_tokens=left,
        output_percent=case.step.output_percent,
    )
    if given is not None:
        return given
    return Refusal(reason=RefusalReason.QUOTA_EXHAUSTED, window_ends_ms=window.ends_ms, limit=limit)


def _admitted(
    case: _Case, choice: _Choice, window: Window, given: TokenGrant, wait_ms: int
) -> list[AccountOutput]:
    """Q14."""
    prompt, tier, after = case.prompt, case.tier, case.after
    has_seats = tier.seats_max is not None or tier.seat_tokens_per_window is not None
    parent_id = prompt.parent_id
    deadline_ms = tier.run_deadline_ms
    if after is not None:
        parent_id = parent_id if prompt.parent_given else after.assistant_message_id
        ends_ms = after.queued_ms + after.deadline_ms
        if not case.interrupted:
            # Time to wait for the one before comes on top of its own.
            deadline_ms += max(0, ends_ms - case.command.appended_ms)
        deadline_ms = min(deadline_ms, RUN_DEADLINE_MS_MAX)
    return [
        *(
            RunCancelled(run_id=run.run_id, reason=CancelReason.INTERRUPT)
            for run in case.interrupted
        ),
        QuotaReserved(
            run_id=prompt.run_id,
            account_id=prompt.account_id,
            window=window.name,
            input_tokens=given.input_budget,
            output_tokens=given.output,
            seat_id=seat_name(prompt.seat_id) if has_seats else None,
            ladder_level=case.level,
            downgraded_from=choice.downgraded_from,
        ),
        RunQueued(
            run_id=prompt.run_id,
            account_id=prompt.account_id,
            chat_id=prompt.chat_id,
            user_message_id=prompt.user_message_id,
            assistant_message_id=prompt.assistant_message_id,
            parent_id=parent_id,
            tier=prompt.tier,
            lane=case.lane,
            model=choice.model,
            input_budget_tokens=given.input_budget,
            granted_output_tokens=given.output,
            deadline_ms=deadline_ms,
            wait_ms=wait_ms,
            quota_limited=given.quota_limited,
            after_run_id=after.run_id if after is not None else None,
            ladder_level=case.level,
            downgraded_from=choice.downgraded_from,
            output_percent=case.step.output_percent,
            blocked_phrases=case.limits.content.blocked_phrases,
        ),
        PromptAdmitted(
            run_id=prompt.run_id,
            account_id=prompt.account_id,
            chat_id=prompt.chat_id,
            tier=prompt.tier,
            lane=case.lane,
            model=choice.model,
            user_message_id=prompt.user_message_id,
            assistant_message_id=prompt.assistant_message_id,
            parent_id=parent_id,
            content=prompt.content,
            input_budget_tokens=given.input_budget,
            granted_output_tokens=given.output,
            sampling=prompt.sampling,
            stop=prompt.stop,
            deadline_ms=deadline_ms,
            quota_limited=given.quota_limited,
            after_run_id=after.run_id if after is not None else None,
            after_message_id=after.assistant_message_id if after is not None else None,
            behind_message_ids=tuple(
                run.assistant_message_id for run in case.of_chat if run.assistant_message_id
            ),
            ladder_level=case.level,
            downgraded_from=choice.downgraded_from,
            output_percent=case.step.output_percent,
            optional_work=case.step.optional_work,
        ),
    ]


def _refused(prompt: PromptSubmitted, refusal: Refusal, level: int) -> list[AccountOutput]:
    return [
        PromptRefused(
            run_id=prompt.run_id,
            account_id=prompt.account_id,
            chat_id=prompt.chat_id,
            user_message_id=prompt.user_message_id,
            assistant_message_id=prompt.assistant_message_id,
            reason=refusal.reason,
            limit=refusal.limit,
            ladder_level=level,
        ),
        RunEnded(
            run_id=prompt.run_id,
            cause=EndCause.REFUSED,
            writer=EndWriter.ADMISSION,
            refusal=msgspec.structs.replace(refusal, ladder_level=level) if level else refusal,
        ),
    ]
