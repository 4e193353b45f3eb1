"""The facts held against each other, run by run and account by account. Each check names its invariant."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from infra.verify.account_audit import AccountAudit, Prompt
from infra.verify.account_laws import judge_idempotency, judge_limits
from infra.verify.findings import (
    DEADLINE_SLACK_MS,
    GRACE_MS,
    Copies,
    Findings,
    LogTime,
    Record,
)
from infra.verify.run_audit import RunAudit, RunFacts
from schemas.blocked_phrases import blocked_phrases
from schemas.events.outcomes import RunConcluded
from schemas.events.quotas import QuotaReleased, QuotaReserved
from schemas.events.tokens import RunQueued
from schemas.events.usage import UsageSettled
from schemas.ids import BadId
from schemas.run_fold import Ending
from schemas.topics import ACCOUNTS, ADMISSIONS, OUTCOMES, QUOTAS, USAGE, Topic


@dataclass(slots=True, kw_only=True)
class Books:
    """What the account-keyed topics hold about each run."""

    reserved: dict[str, list[Record]] = field(default_factory=lambda: defaultdict(list))
    released: dict[str, list[Record]] = field(default_factory=lambda: defaultdict(list))
    settled: dict[str, list[Record]] = field(default_factory=lambda: defaultdict(list))
    outcomes: dict[str, list[Record]] = field(default_factory=lambda: defaultdict(list))

    def enter(self, copies: Copies) -> None:
        """Every event once, by run."""
        for record in copies.first.values():
            match record.event:
                case QuotaReserved(run_id=run_id):
                    self.reserved[run_id].append(record)
                case QuotaReleased(run_id=run_id):
                    self.released[run_id].append(record)
                case UsageSettled(run_id=run_id):
                    self.settled[run_id].append(record)
                case RunConcluded(run_id=run_id):
                    self.outcomes[run_id].append(record)
                case _:
                    pass


class Audit:
    """All topics of one system. Feed it with `begins` and `take`; `judge` may be called again and again."""

    def __init__(
        self, *, partitions: int, epoch: int | None = None, grace_ms: int = GRACE_MS
    ) -> None:
        """`partitions` of the account-keyed topics; `epoch` of this cluster's run ids, None for any; `grace_ms`: for what is missing."""
        self._grace_ms = grace_ms
        self.time = LogTime()
        self.runs = RunAudit(self.time, epoch=epoch)
        self.accounts = AccountAudit(self.time, partitions=partitions)
        self.outcomes = Copies()

    def take(self, topic: Topic, record: Record) -> None:
        """A record of any topic but the token log, whose records go to `runs`."""
        if topic is OUTCOMES:
            self.time.saw(record.appended_ms)
            self.outcomes.take(record)
        else:
            self.accounts.take(topic, record)

    def judge(self) -> Findings:
        """Everything that the records say up to now."""
        findings = Findings(grace_ms=self._grace_ms)
        books = Books()
        for copies in (*self.accounts.copies.values(), self.outcomes):
            books.enter(copies)
        self._contradictions(findings)
        for run in self.runs.runs.values():
            if run.whole:
                self._run(findings, run)
                self._money(findings, run, books)
                self._answer(findings, run, books.outcomes.get(run.run_id, []))
        self._strays(findings, books)
        for prompt in self.accounts.prompts.values():
            self._prompt(findings, prompt)
        judge_limits(findings, self.accounts, books.reserved)
        judge_idempotency(findings, self.accounts, self.runs)
        self.accounts.judge(findings, self.runs.admission, on_log=self._judged)
        self._count(findings, books)
        return findings

    def _contradictions(self, findings: Findings) -> None:
        topics = (ACCOUNTS, QUOTAS, USAGE, ADMISSIONS)
        for name, copies in (
            *((topic.name, self.accounts.copies[topic.name]) for topic in topics),
            (OUTCOMES.name, self.outcomes),
        ):
            for record in copies.contradicted:
                findings.broken(
                    "I12",
                    str(getattr(record.event, "run_id", "-")),
                    f"{name}: one event id with two contents",
                )

    def _run(self, findings: Findings, run: RunFacts) -> None:
        """I1 to I3, I11, I12, and the grant of I7."""
        for invariant, detail in run.accepted.broken:
            findings.broken(invariant, run.run_id, detail)
        if run.twice != run.state:
            findings.broken("I12", run.run_id, "its records taken twice give another state")
        if (run.accepted.n, run.accepted.text) != (run.state.n, run.state.text):
            findings.broken("I2", run.run_id, "the fold's text is not what was accepted")
        queued = run.state.queued
        if queued is None:
            return
        if blocked_phrases(queued.blocked_phrases).in_text(run.state.text):
            findings.broken("I11", run.run_id, "its text holds a blocked phrase")
        if run.state.n > queued.granted_output_tokens:
            findings.broken(
                "I7", run.run_id, f"{run.state.n} tokens, granted {queued.granted_output_tokens}"
            )
        if (run.state.input_tokens or 0) > queued.input_budget_tokens:
            findings.broken(
                "I7",
                run.run_id,
                f"{run.state.input_tokens} input tokens, budget {queued.input_budget_tokens}",
            )
        until = run.ended_ms if run.state.ended else self.time.newest_ms
        lived_ms = self.time.between(run.queued_ms, until)
        if not run.state.ended:
            lived_ms += self.time.waited_ms
        if lived_ms > queued.deadline_ms + DEADLINE_SLACK_MS:
            findings.broken(
                "I1",
                run.run_id,
                f"{'ended' if run.state.ended else 'open'} {lived_ms / 1000:.0f} s after it was queued, "
                f"deadline {queued.deadline_ms / 1000:.0f} s",
            )

    def _money(self, findings: Findings, run: RunFacts, books: Books) -> None:
        """I5, I6: the run's reservation, settlement and release, against each other and the token log."""
        reserved = [
            r.event
            for r in books.reserved.get(run.run_id, [])
            if isinstance(r.event, QuotaReserved)
        ]
        settled = [
            r.event for r in books.settled.get(run.run_id, []) if isinstance(r.event, UsageSettled)
        ]
        if len(settled) > 1:
            findings.broken("I5", run.run_id, f"{len(settled)} settlements")
        queued = run.state.queued
        if queued is None:
            entries = [*books.reserved.get(run.run_id, []), *books.settled.get(run.run_id, [])]
            if entries:
                age_ms = self.time.age_ms(max(entry.appended_ms for entry in entries))
                findings.missing(
                    "I6", run.run_id, "it has entries in the books and is not queued", age_ms=age_ms
                )
            return
        self._reservation(findings, run, queued, reserved)
        measured = self.accounts.measured.get(run.run_id)
        if not run.finished:
            if settled or measured is not None:
                findings.missing(
                    "I5",
                    run.run_id,
                    "it was measured, and has not ended",
                    age_ms=self.time.age_ms(run.queued_ms),
                )
            return
        age_ms = self.time.age_ms(run.ended_ms)
        truth = (run.state.input_tokens or 0, run.state.n, run.state.finish_reason)
        if measured is None:
            findings.missing("I5", run.run_id, "it ended and was not measured", age_ms=age_ms)
        else:
            usage = measured.usage
            if (usage.input_tokens, usage.output_tokens, usage.finish_reason) != truth:
                findings.broken("I5", run.run_id, "it was measured otherwise than the token log")
        if not settled:
            findings.missing("I6", run.run_id, "it ended and is not settled", age_ms=age_ms)
            return
        bill = settled[0]
        if (bill.input_tokens, bill.output_tokens, bill.finish_reason) != truth:
            findings.broken("I5", run.run_id, "it was settled otherwise than the token log")
        self._closing(findings, run, bill, books)

    def _reservation(
        self, findings: Findings, run: RunFacts, queued: RunQueued, reserved: list[QuotaReserved]
    ) -> None:
        if len(reserved) != 1:
            detail = f"{len(reserved)} reservations for one queued run"
            if reserved:
                findings.broken("I6", run.run_id, detail)
            else:
                age_ms = self.time.age_ms(run.queued_ms)
                findings.missing("I6", run.run_id, detail, age_ms=age_ms)
            return
        held = (reserved[0].input_tokens, reserved[0].output_tokens)
        if held != (queued.input_budget_tokens, queued.granted_output_tokens):
            findings.broken("I6", run.run_id, "the reservation is not the budget and the grant")

    def _closing(self, findings: Findings, run: RunFacts, bill: UsageSettled, books: Books) -> None:
        """I6: reserved = settled + released, in one window, soon after the terminal."""
        releases = books.released.get(run.run_id, [])
        closed_ms = books.settled[run.run_id][0].appended_ms
        if not releases:
            findings.missing(
                "I6",
                run.run_id,
                "it is settled and nothing is released",
                age_ms=self.time.age_ms(closed_ms),
            )
            return
        took_ms = self.time.between(run.ended_ms, closed_ms)
        if took_ms > self._grace_ms:
            findings.broken(
                "I6", run.run_id, f"its reservation was open {took_ms / 1000:.0f} s after its end"
            )
        if len(releases) > 1:
            findings.broken("I6", run.run_id, f"{len(releases)} releases")
        released = releases[0].event
        for record in books.reserved.get(run.run_id, [])[:1]:
            reserved = record.event
            if not isinstance(released, QuotaReleased) or not isinstance(reserved, QuotaReserved):
                continue
            held = reserved.input_tokens + reserved.output_tokens
            used = bill.input_tokens + bill.output_tokens
            if held != used + released.tokens or released.tokens < 0:
                findings.broken(
                    "I6", run.run_id, f"reserved {held}, settled {used}, released {released.tokens}"
                )
            if not reserved.window == bill.window == released.window:
                findings.broken("I6", run.run_id, "it was settled in another window")

    def _answer(self, findings: Findings, run: RunFacts, outcomes: list[Record]) -> None:
        """I4: the recorded answer is the token log's."""
        if not run.finished:
            if outcomes:
                findings.missing(
                    "I4",
                    run.run_id,
                    "it was concluded, and the token log does not end it",
                    age_ms=self.time.age_ms(outcomes[0].appended_ms),
                )
            return
        if not outcomes:
            findings.missing(
                "I4",
                run.run_id,
                "it ended and was not concluded",
                age_ms=self.time.age_ms(run.ended_ms),
            )
        for record in outcomes:
            outcome = record.event
            assert isinstance(outcome, RunConcluded), "the topic holds nothing else"
            state = run.state
            if outcome.text != state.text:
                findings.broken("I4", run.run_id, "the concluded text is not what was streamed")
            said = (
                outcome.input_tokens,
                outcome.output_tokens,
                outcome.finish_reason,
                outcome.attempts,
                outcome.end_offset,
            )
            if said != (
                state.input_tokens or 0,
                state.n,
                state.finish_reason,
                state.attempt,
                run.end_offset,
            ):
                findings.broken("I5", run.run_id, "it was concluded otherwise than the token log")
        if len(outcomes) > 1:
            findings.broken("I4", run.run_id, f"{len(outcomes)} outcomes under different ids")

    def _strays(self, findings: Findings, books: Books) -> None:
        """Outputs for runs that the token log does not know at all."""
        for invariant, entries in (
            ("I6", books.reserved),
            ("I5", books.settled),
            ("I4", books.outcomes),
        ):
            for run_id, records in entries.items():
                if run_id in self.runs.runs:
                    continue
                if not self._judged(run_id):
                    findings.counts["outputs of runs not judged"] += 1
                    continue
                findings.missing(
                    invariant,
                    run_id,
                    f"{type(records[0].event).__name__}, and the token log has nothing of the run",
                    age_ms=self.time.age_ms(records[0].appended_ms),
                )

    def _judged(self, run_id: str) -> bool:
        try:
            return self.runs.judged(run_id)
        except BadId:
            return True

    def _prompt(self, findings: Findings, prompt: Prompt) -> None:
        """I1: every prompt is decided, once: queued, refused or redirected."""
        run = self.runs.runs.get(prompt.run_id)
        if run is not None and not run.whole:
            return
        if run is None and not self._judged(prompt.run_id):
            return
        if run is None or (run.state.queued is None and not run.state.ended):
            findings.missing(
                "I1",
                prompt.run_id,
                "its prompt was submitted and nothing was decided",
                age_ms=self.time.age_ms(prompt.appended_ms),
            )

    def _count(self, findings: Findings, books: Books) -> None:
        counts = findings.counts
        counts.update(self.runs.counts)
        counts.update(self.accounts.counts)
        counts["prompts"] = len(self.accounts.prompts)
        counts["copies written twice"] = self.outcomes.copies + sum(
            copies.copies for copies in self.accounts.copies.values()
        )
        for run in self.runs.runs.values():
            if not run.whole:
                counts["runs not judged"] += 1
                continue
            counts["runs"] += 1
            state = run.state
            if state.open:
                counts["open runs"] += 1
            elif state.ending is Ending.REFUSED:
                counts["refusals"] += 1
                if state.refusal is not None:
                    counts[f"refusals: {state.refusal.reason}"] += 1
            elif state.ending is Ending.REDIRECTED:
                counts["redirects"] += 1
            elif state.finish_reason is not None:
                counts["finished runs"] += 1
                counts[f"finished: {state.finish_reason}"] += 1
        for (kind, event), number in self.runs.ignored.items():
            counts["ignored records"] += number
            counts[f"ignored: {event} {kind}"] += number
        counts["open reservations"] += len(books.reserved.keys() - books.settled.keys())
