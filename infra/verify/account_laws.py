"""Laws of the account log, added up by a few lines of their own, apart from the fold that admission uses (I7, I14)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from infra.verify.account_audit import AccountAudit, Measured, Prompt
from infra.verify.findings import Findings, Record
from infra.verify.run_audit import RunAudit
from schemas.events.quotas import QuotaReserved
from schemas.run_fold import Ending

KEY_BOUND_MS: Final = 24 * 3_600_000


def judge_limits(
    findings: Findings, accounts: AccountAudit, reservations: Mapping[str, list[Record]]
) -> None:
    """I7: at the moment of each reservation, settled + reserved stayed within the limit of that moment."""
    for inputs in accounts.inputs.values():
        used: dict[tuple[str, str], int] = defaultdict(int)
        held: dict[str, QuotaReserved] = {}
        for entry in inputs:
            match entry:
                case Measured(usage=usage):
                    reserved = held.pop(usage.run_id, None)
                    if reserved is not None:
                        back = reserved.input_tokens + reserved.output_tokens
                        back -= usage.input_tokens + usage.output_tokens
                        used[reserved.account_id, reserved.window] -= back
                case Prompt():
                    _reserve(findings, entry, reservations, used, held)


def _reserve(
    findings: Findings,
    prompt: Prompt,
    reservations: Mapping[str, list[Record]],
    used: dict[tuple[str, str], int],
    held: dict[str, QuotaReserved],
) -> None:
    for record in reservations.get(prompt.run_id, [])[:1]:
        event = record.event
        assert isinstance(event, QuotaReserved), "the books keep them apart"
        account = (event.account_id, event.window)
        used[account] += event.input_tokens + event.output_tokens
        held[prompt.run_id] = event
        if prompt.limits is None:
            findings.counts["reservations without known limits"] += 1
            continue
        if used[account] > prompt.limits.tokens_per_window:
            findings.broken(
                "I7",
                prompt.run_id,
                f"{used[account]} tokens in use, limit {prompt.limits.tokens_per_window}",
            )
        if event.window != _window(prompt.limits.window, prompt.appended_ms):
            findings.broken("I7", prompt.run_id, f"it was reserved in {event.window}")


def _window(kind: str, appended_ms: int) -> str:
    return f"{datetime.fromtimestamp(appended_ms / 1000, UTC):{'%Y-%m-%d' if kind == 'day' else '%Y-%m'}}"


def judge_idempotency(findings: Findings, accounts: AccountAudit, runs: RunAudit) -> None:
    """I14: one key and body, one run; another body, a conflict."""
    for inputs in accounts.inputs.values():
        bound: dict[tuple[str, str], Prompt] = {}
        for prompt in inputs:
            if not isinstance(prompt, Prompt) or prompt.idempotency_key is None:
                continue
            run = runs.runs.get(prompt.run_id)
            if run is None or not run.whole:
                continue
            key = (prompt.account_id, prompt.idempotency_key)
            first = bound.get(key)
            if first is None or prompt.appended_ms - first.appended_ms >= KEY_BOUND_MS:
                if run.state.queued is not None:
                    bound[key] = prompt
                continue
            wanted = first.run_id if prompt.fingerprint == first.fingerprint else None
            if run.state.queued is not None:
                findings.broken("I14", prompt.run_id, f"its key belongs to {first.run_id}")
            elif run.state.ending is Ending.REDIRECTED and run.state.redirected_to != wanted:
                findings.broken(
                    "I14", prompt.run_id, f"it was not sent to {wanted or 'a conflict'}"
                )
            elif run.state.ending is Ending.REFUSED:
                findings.broken("I14", prompt.run_id, "its key was bound, and it was refused")
