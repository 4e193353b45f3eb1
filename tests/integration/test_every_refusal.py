"""Every refusal over HTTP against the whole system: status, headers and body as the contract says; and an answer that ends as blocked."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import count
from typing import Any, Final

import httpx
import pytest

from edge.auth import mint_admin_token, mint_token
from edge.decisions.account_bounds import bound_of
from infra.log.span_reader import SpanReader
from infra.secrets import load_secrets
from schemas.blocked_phrases import blocked_phrases
from schemas.events.account_snapshots import LimitsKept
from schemas.events.accounts import PromptSubmitted, TierLimits
from schemas.ids import partition_for_key
from schemas.topics import ACCOUNT_SNAPSHOTS, ACCOUNTS
from schemas.vocabulary import RefusalReason, Tier
from tests.integration.audit import all_records, audited
from tests.integration.people import Person, Reading, person
from tests.integration.refusal_cases import (
    FLOODED,
    OUTPUT_TOKENS,
    PROMPTS,
    RIM,
    TIER,
    Answer,
    Post,
    PromptCase,
    RimCase,
    policy_file,
)
from tests.integration.running import RunningSystem
from tests.integration.waiting import PATIENCE_S, eventually_async

HEADERS: Final = ("retry-after", "retry-after-ms", "x-should-retry", "www-authenticate")
FOUR: Final = {"message", "type", "param", "code"}
QUESTION: Final = "What is said before the phrase?"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    """Two slots, and answers that last until they are cancelled."""
    running = RunningSystem(tmp_path_factory.mktemp("refusals") / "home")
    try:
        running.start(
            {
                "TURNLOG_SCRIPTED_SLOTS": "2",
                "TURNLOG_SCRIPTED_TOKENS": str(OUTPUT_TOKENS),
                "TURNLOG_SCRIPTED_DELAY_MS": "250",
            }
        )
        running.wait_ready()
        yield running
    finally:
        running.end()


async def limit(running: RunningSystem, phrases: tuple[str, ...] = (), **changes: Any) -> str:
    """Change the policy, and wait until the edge has seen it; its version. Admission judges by it from the next message on."""
    key = load_secrets(running.home).token_key
    token = mint_admin_token(key=key, name="olga", ttl=timedelta(hours=1))
    headers = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(
        base_url=running.url, headers=headers, timeout=PATIENCE_S
    ) as client:
        answer = await client.put("/v1/admin/policy", content=policy_file(phrases, **changes))
        assert answer.status_code == 200, answer.text
        version = answer.json()["version"]

        async def seen() -> bool:
            found = await client.get("/v1/admin/policy")
            return found.status_code == 200 and found.json()["version"] == version

        await eventually_async(seen, what="the edge knows the policy")
    return str(version)


async def kept_everywhere(running: RunningSystem, version: str) -> None:
    """Wait until admission has said of each partition that this policy holds there: no row of an older one comes any more."""
    partitions = set(await account_partitions(running))

    async def kept() -> bool:
        newest = {
            record.partition: record.event.versions[-1].limits.version
            for record in await all_records(running, ACCOUNT_SNAPSHOTS)
            if isinstance(record.event, LimitsKept)
        }
        return newest == dict.fromkeys(partitions, version)

    await eventually_async(kept, what="every partition has the policy")


async def account_partitions(running: RunningSystem) -> list[int]:
    async with SpanReader(bootstrap=running.bootstrap, client_id="test") as reader:
        return await reader.partitions(ACCOUNTS)


class Account:
    """A new account: its seats, its chats, and what it has started."""

    def __init__(self, running: RunningSystem, name: str, stack: AsyncExitStack) -> None:
        self._running = running
        self._name = name
        self._stack = stack
        self._seats: dict[str, Person] = {}
        self._chats: dict[str, str] = {}
        self._started: list[tuple[str, str]] = []

    async def seat(self, name: str) -> Person:
        """The person of this seat."""
        if name not in self._seats:
            self._seats[name] = await self._stack.enter_async_context(
                person(self._running, self._name, tier=Tier.TEAM, seat=name)
            )
        return self._seats[name]

    async def make_chats(self, posts: tuple[Post, ...], fields: dict[str, Any]) -> None:
        """The chats that the posts name."""
        for post in posts:
            if post.chat not in self._chats:
                self._chats[post.chat] = await (await self.seat("a")).new_chat(**fields)

    async def post(self, post: Post, *, new_chat: bool = False) -> httpx.Response:
        """Post the message and wait for its decision only."""
        seat = await self.seat(post.seat)
        chat_id = await seat.new_chat() if new_chat else self._chats[post.chat]
        answer = await seat.http.post(
            f"/v1/chats/{chat_id}/messages",
            json={"content": "Hello", "background": True, **post.fields},
            headers={} if post.key is None else {"idempotency-key": post.key},
        )
        if answer.status_code == 202:
            self._started.append((chat_id, answer.json()["id"]))
        return answer

    async def cancel_all(self) -> None:
        """Free the slots for who comes next."""
        for chat_id, run_id in self._started:
            await (await self.seat("a")).cancel(chat_id, run_id)


@asynccontextmanager
async def new_account(running: RunningSystem, name: str) -> AsyncIterator[Account]:
    async with AsyncExitStack() as stack:
        account = Account(running, name, stack)
        yield account
        await account.cancel_all()


def check(response: httpx.Response, answer: Answer) -> None:
    """The whole answer, but for the words of its message."""
    assert response.status_code == answer.status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == FOUR | set(answer.members)
    assert (error["type"], error["code"], error["param"]) == (
        answer.type,
        answer.code,
        answer.param,
    )
    assert error["message"].endswith(".")
    for name, pattern in answer.members.items():
        assert re.fullmatch(pattern, str(error[name])), (name, error[name])
    found = {name: response.headers[name] for name in HEADERS if name in response.headers}
    assert set(found) == set(answer.headers), found
    for name, value in found.items():
        assert re.fullmatch(answer.headers[name], value), (name, value)
    if "retry-after-ms" in found:
        assert int(found["retry-after-ms"]) == 1_000 * int(found["retry-after"])
    for kind in ("requests", "tokens"):
        for name in ("limit", "remaining", "reset"):
            assert (f"x-ratelimit-{name}-{kind}" in response.headers) is answer.allowance


def test_every_reason_of_the_vocabulary_and_every_status_of_the_contract_has_a_case() -> None:
    codes = {case.answer.code for case in PROMPTS}
    assert codes >= {reason.value for reason in RefusalReason}
    statuses = {
        answer.status for answer in (*(c.answer for c in PROMPTS), *(c.answer for c in RIM))
    }
    assert statuses == {400, 401, 404, 409, 413, 422, 429, 503}


@pytest.mark.parametrize("case", PROMPTS, ids=lambda case: case.name)
async def test_a_prompt_is_refused_as_the_contract_says(
    running: RunningSystem, case: PromptCase
) -> None:
    async with new_account(running, f"case-{PROMPTS.index(case)}") as account:
        await limit(running)
        await account.make_chats((*case.before, case.last), dict(case.chat))
        await limit(running, **case.limits)
        for post in case.before:
            admitted = await account.post(post)
            assert admitted.status_code == 202, admitted.text
        answer = await account.post(case.last, new_chat=case.tries > 1)
        for _ in range(case.tries - 1):
            if answer.status_code == 202:
                answer = await account.post(case.last, new_chat=True)
        check(answer, case.answer)


@pytest.mark.parametrize("case", RIM, ids=lambda case: case.name)
async def test_a_request_that_is_no_prompt_is_refused_as_the_contract_says(
    running: RunningSystem, case: RimCase
) -> None:
    async with person(running, "rim") as one, person(running, "somebody") as other:
        path = case.path.format(chat=await one.new_chat(), foreign_chat=await other.new_chat())
        token = _token(running, case.token)
        headers = {"authorization": f"Bearer {token}"} if token is not None else {}
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
            answer = await client.request(case.method, path, content=case.body, headers=headers)
        check(answer, case.answer)


def _token(running: RunningSystem, kind: str) -> str | None:
    key = load_secrets(running.home).token_key
    match kind:
        case "missing":
            return None
        case "forged":
            key = bytes(len(key))
        case _:
            pass
    hours = -1 if kind == "expired" else 1
    return mint_token(
        key=key, account_id="rim", seat_id=None, tier=Tier.TEAM, ttl=timedelta(hours=hours)
    )


async def test_a_flood_is_refused_before_the_log_and_its_neighbours_are_answered(
    running: RunningSystem,
) -> None:
    """One admitted message in a minute; all that follow are refused, by admission only as many as the edge lets through (E1 to E3)."""
    partitions = len(await account_partitions(running))
    place = partition_for_key("flood", partitions)
    names = (f"neighbour-{n}" for n in count())
    neighbour = next(name for name in names if partition_for_key(name, partitions) == place)
    once: dict[str, Any] = {"requests_per_minute": 1, "requests_burst": 1}
    # An edge that hears of an older policy again lets a burst of that one pass: these two have the same bound.
    await kept_everywhere(running, await limit(running, **once, open_runs_max=400))
    await limit(running, **once)
    first, more = Post(key="first"), Post(chat="two")
    async with (
        new_account(running, "flood") as account,
        person(running, neighbour) as other,
    ):
        await account.make_chats((first, more), {})
        began = time.monotonic()
        admitted = await account.post(first)
        assert admitted.status_code == 202, admitted.text
        refused, over, passed = Counter[str](), asyncio.Event(), 1

        async def flood() -> None:
            nonlocal passed
            while not over.is_set():
                answer = await account.post(more)
                passed += answer.status_code == 202
                # Where the machine is so slow that the edge or the decision is late, or that a minute has passed: then one more is
                # admitted, and its chat is busy.
                if answer.status_code in {202, 409, 503}:
                    continue
                name = answer.json()["error"]["limit"]
                check(answer, replace(FLOODED, members={"limit": name}))
                refused[name] += 1

        async def much() -> bool:
            return refused["flood"] >= 50

        async def attached() -> bool:
            again = await account.post(
                first
            )  # The edge may not have read yet that its key is bound.
            return again.status_code == 202 and again.json()["id"] == admitted.json()["id"]

        async with asyncio.TaskGroup() as group:
            # As many as it takes to be quicker than what flows into the account's bucket, though each answer takes long.
            for _ in range(40):
                group.create_task(flood())
            await eventually_async(much, what="the edge refuses the flood")
            _, told = await other.ask_until_answered("Hello?", max_output_tokens=2)
            assert told.end["status"] == "done"
            await eventually_async(attached, what="a repeat of the bound key attaches")
            over.set()
        bound = bound_of(TierLimits(**TIER, **once))
        flowed = (time.monotonic() - began) * bound.per_minute / 60
        sent = [
            record.event
            for record in await all_records(running, ACCOUNTS)
            if isinstance(record.event, PromptSubmitted) and record.event.account_id == "flood"
        ]
        assert len(sent) <= bound.tries + flowed + passed
        assert set(refused) <= {"flood", "requests_per_minute"}
        counted = (await other.http.get("/metrics")).text
        [metric] = re.findall(r'flood_refused_total{tier="team",what="prompt"} (\S+)', counted)
        assert float(metric) >= refused["flood"]


async def test_an_answer_ends_as_blocked_before_it_says_a_phrase(running: RunningSystem) -> None:
    await limit(running)
    async with person(running, "reader") as reader:
        chat_id = await reader.new_chat()
        free = Reading()
        await free.read(reader.client.say(chat_id, {"content": QUESTION}), deltas=6)
        await reader.cancel(chat_id, free.frames[0].data["run_id"])
        words = free.text.split()[:-1]
        phrase = " ".join(words[-2:]).upper()
        await limit(running, phrases=("never said", phrase))
        # With the same prompt the scripted engine says the same.
        chat_id, told = await reader.ask(QUESTION)
        assert (told.end["status"], told.end["finish_reason"]) == ("blocked", "blocked")
        assert told.end["usage"]["output_tokens"] == told.tokens
        assert free.text.startswith(told.text)
        assert blocked_phrases((phrase,)).in_text(free.text[len(told.text) :])
        stored = await reader.stored_answer(chat_id)
        assert (stored["content"], stored["status"]) == (told.text, "blocked")
        waited = await reader.http.post(
            f"/v1/chats/{await reader.new_chat()}/messages",
            json={"content": QUESTION, "stream": False},
        )
        assert (waited.status_code, waited.json()["status"]) == (200, "blocked")
        assert waited.json()["finish_reason"] == "blocked"
        # The chat goes on after it.
        await limit(running)
        again = await Reading().read(
            reader.client.say(chat_id, {"content": "Go on.", "max_output_tokens": 3})
        )
        assert again.end["status"] == "done"
        await reader.is_settled()


def test_verify_finds_every_reason_on_the_log_and_nothing_wrong(running: RunningSystem) -> None:
    counts = audited(running).counts
    # An edge that knows the limits refuses a message that is too long before admission would.
    by_admission = set(RefusalReason) - {RefusalReason.CONTEXT_TOO_LONG}
    for reason in by_admission:
        assert counts[reason.value] >= 1
    assert counts["blocked"] == 2
