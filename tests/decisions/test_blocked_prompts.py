"""A prompt whose text holds a blocked phrase is refused by the list of its own offset, and binds nothing."""

from __future__ import annotations

import msgspec

from processors.decisions.account_partition import AccountPartition
from processors.decisions.what_if import what_if
from schemas.events.accounts import AccountEvent
from schemas.events.tokens import RunEnded, RunQueued
from schemas.vocabulary import Tier
from tests.decisions.account_samples import ACCOUNT, NOON_MS, limits, listed, prompt
from tests.decisions.test_what_if import log

BAD = "Say the bad  WORD."


def decided(*events: AccountEvent) -> list[str]:
    """What became of each prompt."""
    partition, found = AccountPartition(), []
    for record in log(*events):
        outputs = partition.take(
            offset=record.offset, appended_ms=NOON_MS, event_id=record.event_id, event=record.event
        ).outputs
        for output in outputs:
            match output:
                case RunQueued():
                    found.append("admitted")
                case RunEnded(refusal=refusal) if refusal is not None:
                    found.append(refusal.reason.value)
                case _:
                    pass
    return found


def test_a_prompt_is_judged_by_the_list_that_lies_below_it() -> None:
    without = listed(version="without")
    assert decided(
        without,
        prompt("r1", content=BAD),
        listed("bad word"),
        prompt("r2", content=BAD),
        prompt("r3", content="Say a word."),
        without,
        prompt("r4", content=BAD),
    ) == ["admitted", "content_blocked", "admitted", "admitted"]


def test_a_blocked_prompt_binds_no_key_takes_no_tokens_and_cancels_nobody() -> None:
    partition = AccountPartition()
    events = (listed("bad word"), prompt("r1", content=BAD, idempotency_key="k"))
    for record in log(*events):
        partition.take(
            offset=record.offset, appended_ms=NOON_MS, event_id=record.event_id, event=record.event
        )
    account = partition.account(ACCOUNT)
    assert (account.windows, account.open, account.requests) == ((), (), None)
    facts = partition.known.facts(
        account_id=ACCOUNT, run_id="r2", idempotency_key="k", offset=9, appended_ms=NOON_MS
    )
    assert facts.binding is None


def test_content_is_judged_before_the_quota_and_after_the_rates() -> None:
    content = listed("bad word").content
    spent = msgspec.structs.replace(limits(tokens_per_window=1), content=content)
    assert decided(spent, prompt("r1", content=BAD)) == ["content_blocked"]
    rated = msgspec.structs.replace(
        limits(requests_per_minute=1, requests_burst=1, open_runs_max=5), content=content
    )
    assert decided(rated, prompt("r1"), prompt("r2", content=BAD)) == ["admitted", "rate_limited"]


def test_another_list_is_tried_on_what_was_recorded() -> None:
    recorded = listed(version="without")
    events = log(recorded, prompt("r1", content=BAD), prompt("r2", content="Say a word."))
    changes = what_if(events, listed("bad word")).changes
    assert changes == {
        (Tier.FREE, "admitted", "content_blocked (blocked_phrases)"): 1,
        (Tier.FREE, "admitted", "admitted"): 1,
    }
