"""A thousand runs that finish, fail, are blocked and are cancelled: each ends once, is settled once, and nothing stays reserved."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections import Counter, defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, cast

import httpx
import pytest

from processors.decisions.account_partition import AccountPartition
from schemas.events.accounts import AccountEvent, PromptSubmitted
from schemas.events.outcomes import RunConcluded
from schemas.events.quotas import QuotaReleased, QuotaReserved
from schemas.events.tokens import PartitionTick, RunEvent
from schemas.events.usage import UsageSettled
from schemas.run_fold import NEW_RUN, RunState, fold
from schemas.topics import ACCOUNTS, OUTCOMES, QUOTAS, TOKENS, USAGE
from schemas.vocabulary import STATUS_OF_FINISH, FinishReason, RunStatus, Tier
from tests.integration.audit import all_records, audited
from tests.integration.conftest import SystemFactory
from tests.integration.people import Person, Reading, person
from tests.integration.processes import turnlog
from tests.integration.refusal_cases import MODEL
from tests.integration.running import RunningSystem
from tests.integration.waiting import eventually_async
from tests.integration.worker_runs import WorkerProcess

SEED: Final = 4
RUNS: Final = 1_000
AT_ONCE: Final = 64
EARLY: Final = 40
LONG_PROMPT_TOKENS: Final = 120
# At ten tokens a second nobody waits for the end of one of these.
LONGEST: Final = 3_000
SHORT: Final = 5
PLAIN: Final = "What is said?"
LONG: Final = "word " * LONG_PROMPT_TOKENS
BLOCKED: Final = "Say something that is not to be said."


class Way(StrEnum):
    """How a run is to end."""

    FINISHED = "finished"
    FAILED = "failed"
    LATE = "late"
    BLOCKED = "blocked"
    CANCELLED = "cancelled"


SHARES: Final = {
    Way.FINISHED: 30,
    Way.FAILED: 15,
    Way.LATE: 5,
    Way.BLOCKED: 20,
    Way.CANCELLED: 30,
}
FINISH: Final = {
    Way.FINISHED: FinishReason.LENGTH,
    Way.FAILED: FinishReason.ERROR,
    Way.LATE: FinishReason.DEADLINE,
    Way.BLOCKED: FinishReason.BLOCKED,
    Way.CANCELLED: FinishReason.CANCELLED,
}
FIELDS: Final[dict[Way, dict[str, Any]]] = {
    Way.FINISHED: {"content": PLAIN, "max_output_tokens": SHORT},
    Way.FAILED: {"content": LONG},
    Way.LATE: {"content": PLAIN},
    Way.BLOCKED: {"content": BLOCKED},
    Way.CANCELLED: {"content": PLAIN, "background": True},
}


def policy(phrases: tuple[str, ...]) -> str:
    """Room for all of it at once. Only the free tier's runs have little time."""
    tier = f"""
tokens_per_window = 1_000_000_000
window = "month"
open_runs_max = 900
enqueued_runs_max = 0
models = ["{MODEL}"]
input_tokens_max = 400
output_tokens_max = {LONGEST}
queue_wait_ms_max = 7_000_000
"""
    deadlines = {Tier.FREE: 1_000, Tier.PLUS: 600_000, Tier.TEAM: 600_000}
    tiers = [f"[tiers.{t}]{tier}run_deadline_ms = {ms}" for t, ms in deadlines.items()]
    return "\n".join([*tiers, "[content]", f"blocked_phrases = {json.dumps(phrases)}"])


@dataclass(slots=True)
class Crowd:
    """Everybody who asks, and how each run has to end: None where a client gave up that could not know whether it was taken."""

    rng: random.Random
    late: Person
    others: list[Person]
    expected: dict[str, FinishReason | None] = field(default_factory=dict)
    asked: Counter[Way] = field(default_factory=Counter)

    async def run(self, way: Way) -> None:
        """One run, from its chat to its end. Where the system is too busy to take it, it is asked again."""
        one = self.late if way is Way.LATE else self.rng.choice(self.others)
        moment = self.rng.randrange(5)
        chat_id = await one.until_answered(one.new_chat)
        answer = await self._taken(one, chat_id, {"stream": False, **FIELDS[way]})
        self.asked[way] += 1
        if way is Way.CANCELLED:
            run_id = await self._cancel(one, chat_id, answer, after_deltas=moment)
        else:
            run_id = self._ended(way, answer)
        self.expected[run_id] = FINISH[way]

    async def _cancel(
        self, one: Person, chat_id: str, answer: httpx.Response, *, after_deltas: int
    ) -> str:
        assert answer.status_code == 202, answer.text
        run_id: str = answer.json()["id"]
        if after_deltas:
            await Reading().read(one.client.follow(chat_id, run_id), deltas=after_deltas)
        await one.cancel(chat_id, run_id)
        return run_id

    def _ended(self, way: Way, answer: httpx.Response) -> str:
        status, found = STATUS_OF_FINISH[FINISH[way]], answer.json()
        if status is RunStatus.FAILED:
            assert answer.status_code == 500, answer.text
            assert found["error"]["code"] == "generation_failed"
            return str(found["error"]["run_id"])
        assert answer.status_code == 200, answer.text
        assert (found["status"], found["finish_reason"]) == (status.value, FINISH[way].value)
        return str(found["run_id"])

    async def _taken(self, one: Person, chat_id: str, body: dict[str, Any]) -> httpx.Response:
        path = f"/v1/chats/{chat_id}/messages"
        found: list[httpx.Response] = []

        async def taken() -> bool:
            answer = await one.http.post(path, json=body, timeout=None)
            found.append(answer)
            if answer.status_code != 503:
                return True
            run_id = answer.json()["error"].get("run_id")
            if run_id is not None:
                self.expected[run_id] = None
            return False

        await eventually_async(taken, what="the message is decided")
        return found[-1]


@pytest.fixture
def running(system: SystemFactory, tmp_path: Path) -> Any:
    """A system whose only worker's engine fails on long prompts, whatever the attempt."""
    file = tmp_path / "policy.toml"
    file.write_text(policy(()))
    running = system({"TURNLOG_WORKERS": "0", "TURNLOG_POLICIES": str(file)})
    worker = WorkerProcess(
        tmp_path,
        bootstrap=running.bootstrap,
        variables={
            "TURNLOG_SCRIPTED_SLOTS": "256",
            "TURNLOG_SCRIPTED_TOKENS": str(LONGEST),
            "TURNLOG_SCRIPTED_DELAY_MS": "100",
        },
        faults=json.dumps(
            {
                "attempts_max": 1_000,
                "prompt_tokens_min": LONG_PROMPT_TOKENS,
                "error_after_tokens": 2,
                "error_is_retryable": False,
            }
        ),
    )
    try:
        worker.wait_ready()
        yield running
    finally:
        worker.end()


async def block_what_is_said(running: RunningSystem, one: Person, tmp_path: Path) -> str:
    """Put a phrase on the list that the engine says in answer to BLOCKED, soon and not at once. The run that told."""
    _, told = await one.ask(BLOCKED, max_output_tokens=SHORT + 2)
    file = tmp_path / "phrases.toml"
    file.write_text(policy((" ".join(told.text.split()[2:6]),)))
    applied = await asyncio.to_thread(
        turnlog,
        *("policy", "apply", str(file)),
        variables={"TURNLOG_HOME": str(running.home), "TURNLOG_KAFKA": running.bootstrap},
    )
    assert applied.returncode == 0, applied.stderr
    return str(told.frames[0].data["run_id"])


async def cancel_before_the_queue(running: RunningSystem, crowd: Crowd) -> None:
    """Admission stands still, so that these runs are cancelled before they are queued."""
    chats = {
        await one.until_answered(one.new_chat): one
        for one in crowd.others
        for _ in range(EARLY // 7 + 1)
    }
    body = FIELDS[Way.CANCELLED]
    running.kill("admission", signal.SIGSTOP)
    try:
        posting = [
            asyncio.create_task(
                one.http.post(f"/v1/chats/{chat_id}/messages", json=body, timeout=None)
            )
            for chat_id, one in chats.items()
        ]

        async def submitted() -> dict[str, str] | None:
            found = {
                record.event.chat_id: record.event.run_id
                for record in await all_records(running, ACCOUNTS)
                if isinstance(record.event, PromptSubmitted) and record.event.chat_id in chats
            }
            return found if len(found) == len(chats) else None

        runs = await eventually_async(submitted, what="all of them lie before admission")
        for chat_id, run_id in runs.items():
            await chats[chat_id].cancel(chat_id, run_id)
            crowd.expected[run_id] = FinishReason.CANCELLED
            crowd.asked[Way.CANCELLED] += 1
    finally:
        running.kill("admission", signal.SIGCONT)
    for answer in await asyncio.gather(*posting):
        # A client that was not answered in 10 s has given up, and its run is cancelled once more.
        assert answer.status_code in {202, 503}, answer.text


async def test_a_thousand_runs_of_every_ending_leave_nothing_reserved(
    running: RunningSystem, tmp_path: Path
) -> None:
    """I1, I5, I6 at rest, I8, I11; turnlog verify finds no violation of any."""
    rng = random.Random(SEED)
    async with AsyncExitStack() as stack:

        async def come(account: str, tier: Tier, seat: str | None = None) -> Person:
            return await stack.enter_async_context(person(running, account, tier=tier, seat=seat))

        late = await come("late", Tier.FREE)
        teams = [
            await come(team, Tier.TEAM, seat)
            for team in ("team-1", "team-2")
            for seat in ("s1", "s2", "s3")
        ]
        crowd = Crowd(rng, late, [*teams, await come("plus", Tier.PLUS)])
        told = await block_what_is_said(running, teams[0], tmp_path)
        crowd.expected[told] = FinishReason.LENGTH
        await cancel_before_the_queue(running, crowd)
        ways = [way for way, share in SHARES.items() for _ in range(RUNS * share // 100)]
        for _ in range(crowd.asked.total()):
            ways.remove(Way.CANCELLED)
        rng.shuffle(ways)
        turns = asyncio.Semaphore(AT_ONCE)

        async def in_turn(way: Way) -> None:
            async with turns:
                await crowd.run(way)

        async with asyncio.TaskGroup() as tasks:
            for way in ways:
                tasks.create_task(in_turn(way))
        assert crowd.asked == {way: RUNS * share // 100 for way, share in SHARES.items()}
        accounts = {"late": late, "team-1": teams[0], "team-2": teams[3], "plus": crowd.others[-1]}
        await eventually_async(
            lambda: all_are_billed(running, crowd.expected),
            what="every run has its outcome and bill",
        )
        await check_the_log(running, crowd.expected)
        settled = await eventually_async(
            lambda: settled_by_account(running), what="what was reserved is settled or released"
        )
        for account, one in accounts.items():
            await one.settles_at(settled[account])
    counts = (await asyncio.to_thread(audited, running)).counts
    assert counts["open reservations"] == 0
    assert counts["blocked"] == RUNS * SHARES[Way.BLOCKED] // 100


async def all_are_billed(running: RunningSystem, expected: dict[str, FinishReason | None]) -> bool:
    """Whether the recorder and admission have done their part for every run. What an edge tells of an account may be older than its
    last run, so it cannot say.
    """
    concluded = {getattr(r.event, "run_id", None) for r in await all_records(running, OUTCOMES)}
    billed = {getattr(r.event, "run_id", None) for r in await all_records(running, USAGE)}
    return expected.keys() <= concluded & billed


async def check_the_log(running: RunningSystem, expected: dict[str, FinishReason | None]) -> None:
    """Each run has ended as it had to, and has one outcome and one settlement."""
    runs: dict[str, RunState] = {}
    early = 0
    for record in await all_records(running, TOKENS):
        if isinstance(record.event, PartitionTick):
            continue
        event = cast("RunEvent", record.event)
        state, _ = fold(runs.get(event.run_id, NEW_RUN), event)
        early += state.queued is None and state.cancelled_early is not None
        runs[event.run_id] = state
    assert set(runs) == set(expected)
    assert early >= EARLY
    wrong = {
        run_id: (state.finish_reason, expected[run_id])
        for run_id, state in runs.items()
        if not state.ended
        or (expected[run_id] is not None and state.finish_reason is not expected[run_id])
    }
    assert wrong == {}
    for topic, kind in ((OUTCOMES, RunConcluded), (USAGE, UsageSettled)):
        events = {
            record.envelope.event_id: record.event
            for record in await all_records(running, topic)
            if isinstance(record.event, kind)
        }
        once = Counter(event.run_id for event in events.values())
        assert once == dict.fromkeys(expected, 1), topic.name


async def settled_by_account(running: RunningSystem) -> dict[str, int]:
    """What each account has used by its bills, which is what its reservations and its own fold say."""
    used: Counter[str] = Counter()
    for event in {r.envelope.event_id: r.event for r in await all_records(running, USAGE)}.values():
        assert isinstance(event, UsageSettled)
        used[event.account_id] += event.input_tokens + event.output_tokens
    held: Counter[str] = Counter()
    for event in {
        r.envelope.event_id: r.event for r in await all_records(running, QUOTAS)
    }.values():
        match event:
            case QuotaReserved():
                held[event.account_id] += event.input_tokens + event.output_tokens
            case QuotaReleased():
                held[event.account_id] -= event.tokens
            case _:
                pass
    assert held == used, "what was reserved is settled or released"
    partitions: dict[int, AccountPartition] = defaultdict(AccountPartition)
    for record in await all_records(running, ACCOUNTS):
        partitions[record.partition].take(
            offset=record.offset,
            appended_ms=record.appended_ms,
            event_id=record.envelope.event_id,
            event=cast("AccountEvent", record.event),
        )
    for account_id in used:
        (account,) = [
            partition.account(account_id)
            for partition in partitions.values()
            if partition.account(account_id).windows
        ]
        assert account.open == ()
        assert [(use.settled, use.reserved) for use in account.windows] == [(used[account_id], 0)]
    return dict(used)
