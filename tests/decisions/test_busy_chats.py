"""A second message while a run of the chat is open: refused, behind it, or instead of it."""

from __future__ import annotations

import pytest

from processors.decisions.account import judge
from processors.decisions.account_state import AccountOutput, AccountState, output_id
from processors.decisions.known_ids import Facts
from schemas.events.account_snapshots import OpenReservation
from schemas.events.accounts import LimitsChanged
from schemas.events.admissions import PromptAdmitted
from schemas.events.quotas import QuotaReserved
from schemas.events.tokens import Refusal, RunCancelled, RunEnded, RunQueued
from schemas.topics import RUN_DEADLINE_MS_MAX
from schemas.vocabulary import CancelReason, OnBusy, RefusalReason
from tests.decisions.account_samples import ACCOUNT, NOON_MS, command, limits, prompt, usage

ROOMY = limits(tokens_per_window=1_000_000, open_runs_max=2, enqueued_runs_max=2)


class Chat:
    """An account whose prompts, unless said otherwise, go into one chat."""

    def __init__(self, limits_: LimitsChanged = ROOMY) -> None:
        self.state = AccountState(account_id=ACCOUNT)
        self.limits = limits_
        self.offset = -1

    def say(
        self, run: str, on_busy: OnBusy = OnBusy.REJECT, *, after_ms: int = 0, **changes: object
    ) -> list[AccountOutput]:
        self.offset += 1
        event = prompt(run, chat=str(changes.pop("chat", "c")), on_busy=on_busy, **changes)  # type: ignore[arg-type]
        at = command(event, offset=self.offset, appended_ms=NOON_MS + after_ms)
        self.state, outputs = judge(self.state, at, Facts(), self.limits)
        return outputs

    def measure(self, run: str) -> None:
        self.offset += 1
        self.state, _ = judge(
            self.state, command(usage(run), offset=self.offset), Facts(), self.limits
        )

    def run(self, run: str) -> OpenReservation:
        return next(each for each in self.state.open if each.run_id == run)


def queued(outputs: list[AccountOutput]) -> RunQueued:
    return next(output for output in outputs if isinstance(output, RunQueued))


def admitted(outputs: list[AccountOutput]) -> PromptAdmitted:
    return next(output for output in outputs if isinstance(output, PromptAdmitted))


def refusal(outputs: list[AccountOutput]) -> Refusal:
    ended = next(output for output in outputs if isinstance(output, RunEnded))
    assert ended.refusal is not None
    return ended.refusal


@pytest.mark.parametrize("on_busy", list(OnBusy))
def test_in_a_chat_without_an_open_run_all_three_are_the_same(on_busy: OnBusy) -> None:
    outputs = Chat().say("r1", on_busy, parent_id="p")
    assert [type(each) for each in outputs] == [QuotaReserved, RunQueued, PromptAdmitted]
    assert (queued(outputs).parent_id, queued(outputs).after_run_id) == ("p", None)
    assert admitted(outputs).after_message_id is None


def test_an_enqueued_message_is_queued_at_once_behind_the_open_run_whose_answer_is_its_parent() -> (
    None
):
    chat = Chat()
    chat.say("r1")
    outputs = chat.say("r2", OnBusy.ENQUEUE, parent_id="what the edge saw")
    assert [type(each) for each in outputs] == [QuotaReserved, RunQueued, PromptAdmitted]
    for output in (queued(outputs), admitted(outputs)):
        assert (output.parent_id, output.after_run_id) == ("a-r1", "r1")
    assert admitted(outputs).after_message_id == "a-r1"


def test_a_parent_that_the_client_named_stays_and_the_run_waits_all_the_same() -> None:
    chat = Chat()
    chat.say("r1")
    outputs = chat.say("r2", OnBusy.ENQUEUE, parent_id="p", parent_given=True)
    assert (admitted(outputs).parent_id, admitted(outputs).after_run_id) == ("p", "r1")


def test_enqueued_messages_wait_for_one_another_in_order_and_no_more_than_the_tier_allows() -> None:
    chat = Chat()
    chat.say("r1")
    assert queued(chat.say("r2", OnBusy.ENQUEUE)).after_run_id == "r1"
    assert queued(chat.say("r3", OnBusy.ENQUEUE)).after_run_id == "r2"
    found = refusal(chat.say("r4", OnBusy.ENQUEUE))
    assert (found.reason, found.limit) == (RefusalReason.TOO_MANY_RUNS, "enqueued_runs_max")
    chat.measure("r1")
    assert queued(chat.say("r5", OnBusy.ENQUEUE)).after_run_id == "r3"


def test_a_message_waits_for_every_open_run_of_its_chat_so_that_none_may_be_cancelled_from_under_it() -> (
    None
):
    chat = Chat()
    chat.say("r1")
    chat.say("elsewhere", chat="other")
    assert admitted(chat.say("r2", OnBusy.ENQUEUE)).behind_message_ids == ("a-r1",)
    third = admitted(chat.say("r3", OnBusy.ENQUEUE, parent_id="p", parent_given=True))
    assert third.behind_message_ids == ("a-r1", "a-r2")
    instead = admitted(chat.say("r4", OnBusy.INTERRUPT))
    assert instead.behind_message_ids == ("a-r1", "a-r2", "a-r3")


def test_of_a_chat_one_run_generates_whatever_became_of_those_between() -> None:
    chat = Chat()
    chat.say("r1")
    chat.say("r2", OnBusy.ENQUEUE)
    chat.say("r3", OnBusy.ENQUEUE)
    queued(chat.say("r4", chat="other", ended_runs=("r2",)))
    found = refusal(chat.say("r5", chat="third"))
    assert (found.reason, found.limit) == (RefusalReason.TOO_MANY_RUNS, "open_runs_max")


def test_a_run_that_waits_takes_no_place_of_those_that_may_generate_at_once() -> None:
    chat = Chat()
    chat.say("r1")
    chat.say("r2", OnBusy.ENQUEUE)
    chat.say("r3", chat="other")
    found = refusal(chat.say("r4", chat="third"))
    assert (found.reason, found.limit) == (RefusalReason.TOO_MANY_RUNS, "open_runs_max")
    assert queued(chat.say("r5", OnBusy.ENQUEUE)).after_run_id == "r2"


def test_the_deadline_of_a_run_that_waits_leaves_it_its_own_time_after_the_one_before() -> None:
    chat = Chat()
    chat.say("r1")
    assert queued(chat.say("r2", OnBusy.ENQUEUE, after_ms=20_000)).deadline_ms == 40_000 + 60_000
    assert queued(chat.say("r3", OnBusy.ENQUEUE, after_ms=20_000)).deadline_ms == 100_000 + 60_000


def test_no_deadline_goes_beyond_what_retention_covers() -> None:
    chat = Chat(limits(tokens_per_window=10**6, run_deadline_ms=RUN_DEADLINE_MS_MAX))
    chat.say("r1")
    assert queued(chat.say("r2", OnBusy.ENQUEUE)).deadline_ms == RUN_DEADLINE_MS_MAX


def test_an_interrupt_cancels_every_open_run_of_the_chat_and_comes_behind_the_newest() -> None:
    chat = Chat()
    chat.say("r1")
    chat.say("r2", OnBusy.ENQUEUE)
    chat.say("elsewhere", chat="other")
    outputs = chat.say("r3", OnBusy.INTERRUPT, parent_id="what the edge saw")
    assert outputs[:2] == [
        RunCancelled(run_id="r1", reason=CancelReason.INTERRUPT),
        RunCancelled(run_id="r2", reason=CancelReason.INTERRUPT),
    ]
    assert (admitted(outputs).parent_id, admitted(outputs).after_run_id) == ("a-r2", "r2")
    ended = {run.run_id: run.ended for run in chat.state.open}
    assert ended == {"r1": True, "r2": True, "elsewhere": False, "r3": False}
    assert len({output_id("e", output) for output in outputs}) == len(outputs)


def test_an_interrupt_needs_no_free_place_but_keeps_the_tokens_until_they_are_measured() -> None:
    chat = Chat(limits(tokens_per_window=1_200, open_runs_max=1))
    chat.say("r1")
    chat.say("r2", OnBusy.INTERRUPT)
    chat.say("r3", OnBusy.INTERRUPT)
    assert chat.state.windows[0].reserved == 1_200
    found = refusal(chat.say("r4", OnBusy.INTERRUPT))
    assert found.reason is RefusalReason.QUOTA_EXHAUSTED


def test_an_interrupt_that_is_refused_cancels_nothing() -> None:
    chat = Chat()
    chat.say("r1")
    outputs = chat.say("r2", OnBusy.INTERRUPT, model="large")
    assert refusal(outputs).reason is RefusalReason.MODEL_NOT_ALLOWED
    assert not any(isinstance(output, RunCancelled) for output in outputs)
    assert not chat.run("r1").ended


def test_an_interrupt_gives_its_run_no_time_to_wait() -> None:
    chat = Chat()
    chat.say("r1")
    assert queued(chat.say("r2", OnBusy.INTERRUPT)).deadline_ms == 60_000


def test_a_run_that_was_seen_to_end_is_no_longer_in_the_way() -> None:
    chat = Chat()
    chat.say("r1")
    outputs = chat.say("r2", OnBusy.ENQUEUE, parent_id="a-r1", ended_runs=("r1",))
    assert (queued(outputs).parent_id, queued(outputs).after_run_id) == ("a-r1", None)


def test_behind_a_run_of_before_runs_could_wait_none_is_enqueued() -> None:
    chat = Chat()
    old = OpenReservation(
        run_id="old",
        chat_id="c",
        window="2026-06",
        model="small",
        tier="free",
        input_tokens=0,
        output_tokens=0,
    )
    chat.state = AccountState(account_id=ACCOUNT, open=(old,))
    found = refusal(chat.say("r1", OnBusy.ENQUEUE))
    assert found.reason is RefusalReason.RUN_IN_PROGRESS
    outputs = chat.say("r2", OnBusy.INTERRUPT, parent_id="p")
    assert outputs[0] == RunCancelled(run_id="old", reason=CancelReason.INTERRUPT)
    assert (queued(outputs).parent_id, queued(outputs).after_run_id) == ("p", None)
