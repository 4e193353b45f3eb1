"""What must hold of accounts and runs, kept apart from the code that decides it and compared with it (I1, I5, I6, I7, and caps)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from infra.capacity.runs import Run
from infra.capacity.scenario import Scenario
from processors.decisions.account_state import AccountOutput, AccountState
from processors.decisions.recorder import Seen
from schemas.events.accounts import PromptSubmitted
from schemas.events.quotas import QuotaReleased, QuotaReserved
from schemas.events.tokens import RunQueued
from schemas.events.usage import UsageSettled

TOLD_MAX: Final = 5
"""Breaches of a law that are told in words; the others are counted."""


class Breaches:
    """What was broken: how often, and the first few in words."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.told: dict[str, list[str]] = {}

    def add(self, law: str, says: str) -> None:
        self.counts[law] += 1
        told = self.told.setdefault(law, [])
        if len(told) < TOLD_MAX:
            told.append(says)


@dataclass(slots=True, kw_only=True)
class _Hold:
    """One reservation."""

    account_id: str
    tokens: int
    input_tokens: int
    output_tokens: int
    event_id: str
    settled: str | None = None


class Ledger:
    """Every reservation and settlement that admission said, once each; and how many runs of an account generate at once."""

    def __init__(self, scenario: Scenario, breaches: Breaches) -> None:
        self._policy = scenario.policy
        self._breaches = breaches
        self._holds: dict[str, _Hold] = {}
        self._open: Counter[str] = Counter()
        self._spent: Counter[str] = Counter()
        self._generating: Counter[str] = Counter()
        self._counted: set[str] = set()
        self._runs: dict[str, Run] = {}
        self._behind: dict[str, list[Run]] = {}
        self.ended: Counter[str] = Counter()
        self.settlements = 0
        self.queued_runs = 0
        self.open_runs = 0

    def began(self, past: AccountState) -> None:
        """The account had used so much before."""
        self._spent[past.account_id] = sum(use.settled for use in past.windows)

    # What admission says.

    def reserved(self, output: QuotaReserved, event_id: str) -> None:
        known = self._holds.get(output.run_id)
        if known is not None:
            if known.event_id != event_id:
                self._breaches.add("I6", f"{output.run_id} was reserved twice")
            return
        tokens = output.input_tokens + output.output_tokens
        self._holds[output.run_id] = _Hold(
            account_id=output.account_id,
            tokens=tokens,
            input_tokens=output.input_tokens,
            output_tokens=output.output_tokens,
            event_id=event_id,
        )
        self._open[output.account_id] += tokens

    def settled(self, output: UsageSettled, event_id: str) -> None:
        hold = self._holds.get(output.run_id)
        if hold is None:
            self._breaches.add("I5", f"{output.run_id} was settled and never reserved")
            return
        if hold.settled is not None:
            if hold.settled != event_id:
                self._breaches.add("I5", f"{output.run_id} was settled twice")
            return
        hold.settled = event_id
        self.settlements += 1
        used = output.input_tokens + output.output_tokens
        if output.input_tokens > hold.input_tokens or output.output_tokens > hold.output_tokens:
            self._breaches.add("I5", f"{output.run_id} was settled for more than was reserved")
        run = self._runs.get(output.run_id)
        if run is not None:
            true = ((run.state.input_tokens or 0), run.state.n)
            if (output.input_tokens, output.output_tokens) != true:
                self._breaches.add("I5", f"{output.run_id} was settled for what was not said")
        self._open[hold.account_id] -= hold.tokens
        self._spent[hold.account_id] += used

    def released(self, output: QuotaReleased, event_id: str) -> None:
        if output.tokens < 0:
            self._breaches.add("I6", f"{event_id}: released less than nothing")

    def judged(
        self, prompt: PromptSubmitted, outputs: Sequence[AccountOutput], account: AccountState
    ) -> None:
        """A prompt was decided: I7 where it was admitted."""
        if not any(isinstance(output, QuotaReserved) for output in outputs):
            return
        limit = self._policy.tiers[prompt.tier].tokens_per_window
        held = sum(use.settled + use.reserved for use in account.windows)
        if held > limit:
            self._breaches.add("I7", f"{account.account_id} holds {held} of {limit} tokens")

    def decided(self, account: AccountState) -> None:
        """I6, when a record was decided for the first time: what is reserved and settled is what was said to the outside."""
        reserved = sum(use.reserved for use in account.windows)
        settled = sum(use.settled for use in account.windows)
        held = sum(run.input_tokens + run.output_tokens for run in account.open)
        if reserved != held:
            self._breaches.add("I6", f"{account.account_id} reserved {reserved}, open runs {held}")
        said = self._open[account.account_id], self._spent[account.account_id]
        if (reserved, settled) != said:
            says = f"{account.account_id} reserved {reserved} and settled {settled}, said {said}"
            self._breaches.add("I6", says)

    # What the token log says.

    def watch(self, run: Run, seen: Seen, counts: bool) -> None:
        """Told every record as it is appended."""
        if not counts:
            return
        state = run.state
        if isinstance(seen.event, RunQueued):
            self._queued(run, seen.event)
        if state.ended and state.queued is not None:
            self.ended[run.run_id] += 1
            self.open_runs -= 1
            if self.ended[run.run_id] > 1:
                self._breaches.add("I1", f"{run.run_id} ended twice")
            if state.n > run.grant:
                self._breaches.add("I7", f"{run.run_id} said {state.n} of {run.grant} tokens")
            self._end(run)

    def _queued(self, run: Run, queued: RunQueued) -> None:
        self.queued_runs += 1
        self.open_runs += 1
        self._runs[run.run_id] = run
        self._begins(run, run)

    def _begins(self, run: Run, behind: Run) -> None:
        """It generates from now on, unless the one that `behind` waited for goes on."""
        queued = behind.state.queued
        before = self._runs.get((queued.after_run_id if queued is not None else None) or "")
        if before is not None and not before.state.ended:
            self._behind.setdefault(before.run_id, []).append(run)
            return
        self._generates(run)

    def _generates(self, run: Run) -> None:
        account = run.ask.account_id
        self._generating[account] += 1
        self._counted.add(run.run_id)
        cap = self._policy.tiers[run.ask.tier].open_runs_max
        if self._generating[account] > cap:
            self._breaches.add(
                "caps", f"{account} has {self._generating[account]} runs of {cap} at once"
            )

    def _end(self, run: Run) -> None:
        if run.run_id in self._counted:
            self._counted.discard(run.run_id)
            self._generating[run.ask.account_id] -= 1
        for waiting in self._behind.pop(run.run_id, []):
            if not waiting.state.ended:
                self._begins(waiting, run)

    def at_rest(self) -> None:
        """Nobody sends, everything has ended: nothing is open, everything is settled once."""
        for run_id, hold in self._holds.items():
            if hold.settled is None:
                self._breaches.add("I6", f"{run_id} is still reserved at rest")
        for account, tokens in self._open.items():
            if tokens:
                self._breaches.add("I6", f"{account} has {tokens} tokens reserved at rest")
        for run_id in self._runs:
            if not self.ended[run_id]:
                self._breaches.add("I1", f"{run_id} was admitted and never ended")
