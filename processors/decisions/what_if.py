"""What other limits would have done with the prompts that were recorded: the account fold again, over the same log.

It is possible because deciding is a pure fold of one partition: nothing that a decision depends on lies anywhere else. The edge's view of
load is in each prompt, too, so the ladder is folded again. What the log cannot know is guessed, and named here:

  X1  A run that was really measured uses what was measured, as far as its grant allows.
  X2  A run that was refused in truth and would have been admitted uses its prompt and the mean answer of its tier, and ends after the
      mean time of its tier (guesses where none was measured).
  X3  Load is as it was: what more or fewer admitted runs would have done to the queues is not seen. Neither is what clients would have
      sent instead.
  X4  A run that would have been cancelled uses what it was measured to use all the same.
  X5  A log that does not begin at its first record begins with accounts that have used nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, assert_never

from processors.decisions.account_partition import AccountPartition, limits_below
from processors.decisions.account_state import AccountOutput
from schemas.events.accounts import (
    AccountEvent,
    LimitsChanged,
    PromptSubmitted,
    TierLimits,
    UsageMeasured,
)
from schemas.events.admissions import PromptAdmitted, PromptRefused
from schemas.events.quotas import QuotaReleased, QuotaReserved
from schemas.events.tokens import RunCancelled, RunEnded, RunQueued, RunRedirected
from schemas.events.usage import UsageSettled
from schemas.vocabulary import CancelReason, FinishReason, Tier

ADMITTED: Final = "admitted"
REDIRECTED: Final = "redirected"
RUN_MS_GUESS: Final = 5_000
ANSWER_TOKENS_GUESS: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A record of the account log. Of the text of a prompt only this is looked at: whether it holds a blocked phrase."""

    offset: int
    appended_ms: int
    event_id: str
    event: AccountEvent


@dataclass(slots=True)
class Tally:
    """What limits did, or would have done, with the prompts of one tier. Tokens are settled ones; `cost` is in hundredths of a token."""

    decisions: Counter[str] = field(default_factory=Counter)
    downgraded: int = 0
    shortened: int = 0
    cancelled: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: int = 0

    def add(self, other: Tally) -> None:
        """Both together."""
        self.decisions.update(other.decisions)
        self.downgraded += other.downgraded
        self.shortened += other.shortened
        self.cancelled += other.cancelled
        self.input_tokens += other.input_tokens
        self.output_tokens += other.output_tokens
        self.cost += other.cost


@dataclass(slots=True)
class Report:
    """The recorded decisions beside the others. `changes` counts prompts by tier and what became of them, was and would be."""

    was: dict[Tier, Tally] = field(default_factory=lambda: {tier: Tally() for tier in Tier})
    would_be: dict[Tier, Tally] = field(default_factory=lambda: {tier: Tally() for tier in Tier})
    changes: Counter[tuple[Tier, str, str]] = field(default_factory=Counter)

    def add(self, other: Report) -> None:
        """Another partition's report."""
        for tier in Tier:
            self.was[tier].add(other.was[tier])
            self.would_be[tier].add(other.would_be[tier])
        self.changes.update(other.changes)


@dataclass(slots=True)
class _Means:
    """What measured runs of a tier used, and how long they took."""

    runs: int = 0
    answer_tokens: int = 0
    run_ms: int = 0

    @property
    def answer(self) -> int:
        return self.answer_tokens // self.runs if self.runs else ANSWER_TOKENS_GUESS

    @property
    def duration_ms(self) -> int:
        return self.run_ms // self.runs if self.runs else RUN_MS_GUESS


class _Fold:
    """The account fold of one partition, with a tally of what it decides. Offsets are counted anew."""

    def __init__(self, price: Callable[[str], int]) -> None:
        self.state = AccountPartition()
        self.tally: dict[Tier, Tally] = {tier: Tally() for tier in Tier}
        self.fates: dict[str, str] = {}
        self.open: dict[str, RunQueued] = {}
        self.tier_of: dict[str, Tier] = {}
        self.set_aside: set[int] = set()
        self._price = price
        self._offset = -1

    def take(self, record: Recorded, event: AccountEvent) -> tuple[AccountOutput, ...]:
        self._offset += 1
        if isinstance(event, PromptSubmitted):
            self.tier_of.setdefault(event.run_id, event.tier)
        decided = self.state.take(
            offset=self._offset,
            appended_ms=record.appended_ms,
            event_id=record.event_id,
            event=event,
        )
        if decided.unfit:
            self.set_aside.add(record.offset)
        for output in decided.outputs:
            self._count(output, event)
        return decided.outputs

    def _count(self, output: AccountOutput, event: AccountEvent) -> None:
        tally = self.tally[self.tier_of[output.run_id]]
        match output:
            case RunQueued():
                assert isinstance(event, PromptSubmitted), "only a prompt opens a run"
                self._decided(output.run_id, ADMITTED, tally)
                self.open[output.run_id] = output
                tally.downgraded += output.downgraded_from is not None
                tally.shortened += output.granted_output_tokens < self._wished(event)
            case PromptRefused():
                by = f"{output.reason} ({output.limit})" if output.limit else output.reason.value
                self._decided(output.run_id, by, tally)
            case RunRedirected():
                self._decided(output.run_id, REDIRECTED, tally)
            case RunCancelled():
                tally.cancelled += output.reason is CancelReason.LIMITS
            case UsageSettled():
                used = output.input_tokens + output.output_tokens
                tally.input_tokens += output.input_tokens
                tally.output_tokens += output.output_tokens
                tally.cost += used * self._price(output.model)
                self.open.pop(output.run_id, None)
            case QuotaReserved() | QuotaReleased() | PromptAdmitted() | RunEnded():
                pass
            case _:
                assert_never(output)

    def _decided(self, run_id: str, fate: str, tally: Tally) -> None:
        self.fates[run_id] = fate
        tally.decisions[fate] += 1

    def _wished(self, prompt: PromptSubmitted) -> int:
        limits = limits_below(self.state.limits, self._offset)
        tier: TierLimits | None = limits.tiers.get(prompt.tier) if limits is not None else None
        most = tier.output_tokens_max if tier is not None else 0
        return min(most, prompt.max_output_tokens or most)


class WhatWas:
    """The recorded decisions, made again. Give it every record of a partition, in order."""

    def __init__(self, limits: LimitsChanged) -> None:
        """`limits` are the others: both sides are priced by them."""
        self.limits = limits
        self.fold = _Fold(self.price)
        self.measured: set[str] = set()
        self.means: dict[Tier, _Means] = {tier: _Means() for tier in Tier}
        self._admitted_ms: dict[str, int] = {}

    def price(self, model: str) -> int:
        policy = self.limits.models.get(model)
        return policy.cost_percent if policy is not None else 100

    def take(self, record: Recorded) -> None:
        """The next record."""
        for output in self.fold.take(record, record.event):
            match output:
                case RunQueued():
                    self._admitted_ms[output.run_id] = record.appended_ms
                case UsageSettled():
                    means = self.means[output.tier]
                    means.runs += 1
                    means.answer_tokens += output.output_tokens
                    admitted_ms = self._admitted_ms.pop(output.run_id)
                    means.run_ms += max(0, record.appended_ms - admitted_ms)
                    self.measured.add(output.run_id)
                case _:
                    pass


class WhatIf:
    """The same prompts under other limits. Give it every record once more, then `report`."""

    def __init__(self, was: WhatWas) -> None:
        self._was = was
        self.fold = _Fold(was.price)
        self._due: list[tuple[int, str, UsageMeasured]] = []
        self._began = False

    def take(self, record: Recorded) -> None:
        """The next record."""
        if not self._began:
            self._began = True
            self.fold.take(record, self._was.limits)
        self._settle(record)
        match record.event:
            case LimitsChanged():
                return
            case UsageMeasured() as usage:
                run = self.fold.open.get(usage.run_id)
                if run is not None and record.offset not in self._was.fold.set_aside:
                    self.fold.take(record, _fitted(usage, run))
            case PromptSubmitted() as prompt:
                for output in self.fold.take(record, prompt):
                    if isinstance(output, RunQueued) and output.run_id not in self._was.measured:
                        self._guess(record, prompt, output)
            case _:
                assert_never(record.event)

    def _guess(self, record: Recorded, prompt: PromptSubmitted, run: RunQueued) -> None:
        """X2."""
        if self._was.fold.fates.get(run.run_id) == ADMITTED:
            return  # It has not ended in truth either.
        means = self._was.means[prompt.tier]
        usage = UsageMeasured(
            run_id=run.run_id,
            account_id=run.account_id,
            input_tokens=prompt.prompt_tokens.get(run.model, 0),
            output_tokens=means.answer,
            finish_reason=FinishReason.STOP,
        )
        due_ms = record.appended_ms + means.duration_ms
        heapq.heappush(self._due, (due_ms, run.run_id, _fitted(usage, run)))

    def _settle(self, record: Recorded, *, all_of_them: bool = False) -> None:
        while self._due and (all_of_them or self._due[0][0] <= record.appended_ms):
            _, run_id, usage = heapq.heappop(self._due)
            at = Recorded(
                offset=record.offset,
                appended_ms=record.appended_ms,
                event_id=f"guessed {run_id}",
                event=usage,
            )
            self.fold.take(at, usage)

    def report(self, last: Recorded | None) -> Report:
        """Both sides, after the `last` record."""
        if last is not None:
            self._settle(last, all_of_them=True)
        changes: Counter[tuple[Tier, str, str]] = Counter()
        for run_id, was in self._was.fold.fates.items():
            tier = self._was.fold.tier_of[run_id]
            changes[tier, was, self.fold.fates[run_id]] += 1
        return Report(was=self._was.fold.tally, would_be=self.fold.tally, changes=changes)


def _fitted(usage: UsageMeasured, run: RunQueued) -> UsageMeasured:
    """X1. What was measured, within what would have been granted."""
    return UsageMeasured(
        run_id=usage.run_id,
        account_id=usage.account_id,
        input_tokens=min(usage.input_tokens, run.input_budget_tokens),
        output_tokens=min(usage.output_tokens, run.granted_output_tokens),
        finish_reason=usage.finish_reason,
    )


def what_if(records: Iterable[Recorded], limits: LimitsChanged) -> Report:
    """The records of one partition, from its first, under other limits."""
    kept = list(records)
    was = WhatWas(limits)
    for record in kept:
        was.take(record)
    other = WhatIf(was)
    for record in kept:
        other.take(record)
    return other.report(kept[-1] if kept else None)
