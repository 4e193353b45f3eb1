"""Limits over HTTP with a real broker, edge and admission: changed while running, refused with a reason, held under concurrency."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from edge.auth import mint_admin_token
from infra.command.policy import read_policy, sync_policy
from infra.command.topics import apply_topics
from infra.log.records import LogRecord
from infra.log.span_reader import SpanReader
from infra.models import MODELS
from infra.policies import PACKAGED, parse_policies, policy_text, read_policies
from schemas.events.admissions import PromptAdmitted
from schemas.events.quotas import QuotaReserved
from schemas.topics import ADMISSIONS, QUOTAS, Topic
from schemas.vocabulary import Tier
from tests.integration.edge_peers import MODEL, EdgeProcess, ScriptedPeer, new_chat, scripted_peer
from tests.integration.processes import turnlog
from tests.integration.recording import PARTITIONS, PartProcess
from tests.integration.running import RunningBroker
from tests.integration.waiting import PATIENCE_S, eventually_async

ADMISSION: Final = "processors.admission_app"
SUBMISSIONS: Final = 200
ROOM: Final = 10
FIELDS: Final[dict[str, object]] = {
    "tokens_per_window": 1_000_000,
    "window": '"month"',
    "open_runs_max": 500,
    "models": f'["{MODEL}"]',
    "input_tokens_max": 200,
    "output_tokens_max": 50,
    "run_deadline_ms": 600_000,
    "queue_wait_ms_max": 3_600_000,
}


def policy(**changes: object) -> str:
    """A file in which every tier has the same limits."""
    fields = "\n".join(f"{name} = {value}" for name, value in (FIELDS | changes).items())
    return "\n".join(f"[tiers.{tier}]\n{fields}" for tier in Tier)


@dataclass(slots=True, kw_only=True)
class Rationed:
    """One edge and its broker; the test starts admission."""

    bootstrap: str
    home: Path
    edge: EdgeProcess
    peer: ScriptedPeer
    account: str = ""
    """Of the newest client."""

    def admin(self) -> httpx.AsyncClient:
        token = mint_admin_token(
            key=self.peer.secrets.token_key, name="olga", ttl=timedelta(hours=1)
        )
        headers = {"authorization": f"Bearer {token}"}
        return httpx.AsyncClient(base_url=self.edge.url, headers=headers, timeout=PATIENCE_S)

    async def limit(self, **changes: object) -> str:
        """Change the policy, and wait until the edge has seen it. The version."""
        async with self.admin() as client:
            answer = await client.put("/v1/admin/policy", content=policy(**changes))
            assert answer.status_code == 200, answer.text
            version: str = answer.json()["version"]

            async def seen() -> bool:
                found = await client.get("/v1/admin/policy")
                return found.status_code == 200 and found.json()["version"] == version

            await eventually_async(seen, what="the edge knows the policy")
        return version

    def client(self) -> httpx.AsyncClient:
        """A client of a new account."""
        self.account = f"account-{secrets.token_hex(4)}"
        return self.peer.client(self.edge, self.account)

    def admission(self) -> PartProcess:
        return PartProcess(ADMISSION, self.home, bootstrap=self.bootstrap)

    def turnlog(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        variables = {"TURNLOG_HOME": str(self.home), "TURNLOG_KAFKA": self.bootstrap}
        return turnlog(*arguments, variables=variables)

    async def events(self, topic: Topic) -> list[Any]:
        """Every event of the topic, once."""
        found: dict[str, Any] = {}
        async with SpanReader(bootstrap=self.bootstrap, client_id="test") as reader:
            for number, kept in (await reader.bounds(topic, list(range(PARTITIONS)))).items():
                async for batch in reader.span(topic, number, kept.first, kept.end):
                    for record in batch:
                        if isinstance(record, LogRecord):
                            found[record.envelope.event_id] = record.event
        return list(found.values())


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    running = RunningBroker(tmp_path_factory.mktemp("broker"))
    running.start()
    asyncio.run(apply_topics(running.bootstrap, models=(MODEL,), partitions=PARTITIONS))
    yield running.bootstrap
    running.end()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def edge(home: Path, bootstrap: str) -> Iterator[EdgeProcess]:
    running = EdgeProcess(home=home, bootstrap=bootstrap)
    yield running.wait_ready()
    running.end()


@pytest.fixture
async def rationed(home: Path, bootstrap: str, edge: EdgeProcess) -> AsyncIterator[Rationed]:
    async with scripted_peer(home, bootstrap) as peer:
        yield Rationed(bootstrap=bootstrap, home=home, edge=edge, peer=peer)


async def post(
    client: httpx.AsyncClient, chat: str, *, key: str | None = None, **fields: object
) -> httpx.Response:
    """Post a message and wait for the decision only."""
    body = {"content": "hello", "background": True, "max_output_tokens": 5, **fields}
    headers = {} if key is None else {"idempotency-key": key}
    return await client.post(f"/v1/chats/{chat}/messages", json=body, headers=headers)


def refused(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    for kind in ("requests", "tokens"):
        for name in ("limit", "remaining", "reset"):
            assert f"x-ratelimit-{name}-{kind}" in answer.headers
    return answer.status_code, error["code"], error.get("limit")


async def test_an_operator_changes_the_limits_while_running_and_nobody_else_can(
    rationed: Rationed, tmp_path: Path
) -> None:
    with rationed.admission() as admission:
        admission.wait_ready()
        version = await rationed.limit(open_runs_max=7)
        async with rationed.admin() as client, rationed.client() as user:
            found = (await client.get("/v1/admin/policy")).json()
            assert (found["version"], found["changed_by"]) == (version, "olga")
            assert found["tiers"]["plus"]["open_runs_max"] == 7
            for method, content in (("GET", None), ("PUT", policy())):
                denied = await user.request(method, "/v1/admin/policy", content=content)
                assert (denied.status_code, denied.json()["error"]["code"]) == (
                    401,
                    "invalid_token",
                )
            assert (await client.get("/v1/quota")).status_code == 401, "nor the other way round"
            wrong = await client.put("/v1/admin/policy", content=policy(open_runs_max=0))
            assert wrong.status_code == 422
            assert "tiers.free.open_runs_max must be" in wrong.json()["error"]["message"]
            huge = await client.put("/v1/admin/policy", content="#" * 70_000)
            assert huge.status_code == 413
            assert (await user.get("/v1/quota")).json()["open_runs_max"] == 7
        shown = rationed.turnlog("policy", "show")
        assert shown.returncode == 0, shown.stderr
        windows = {name: spec.context_window for name, spec in MODELS.items()}
        file = tmp_path / "limits.toml"
        file.write_text(shown.stdout)
        assert read_policies(file, models=windows, changed_by="x").version == version
        again = rationed.turnlog("policy", "apply", str(file), "--by", "ben")
        assert f"Version {version} by ben: already there." in again.stdout, again.stderr
        file.write_text(policy(open_runs_max=8))
        applied = rationed.turnlog("policy", "apply", str(file), "--by", "ben")
        assert f"by ben: written to {PARTITIONS} partitions." in applied.stdout, applied.stderr
        file.write_text(policy(open_runs_max='"many"'))
        broken = rationed.turnlog("policy", "apply", str(file))
        assert broken.returncode == 2
        assert "limits.toml: tiers.free.open_runs_max: Expected `int`, got `str`" in broken.stderr


async def test_policies_that_are_applied_at_the_same_time_end_alike_in_every_partition(
    rationed: Rationed,
) -> None:
    windows = {name: spec.context_window for name, spec in MODELS.items()}
    files = [policy(open_runs_max=number) for number in range(2, 8)]
    by_command = parse_policies(files[0].encode(), source="x", models=windows, changed_by="ben")
    with rationed.admission() as admission:
        admission.wait_ready()
        async with rationed.admin() as client, asyncio.TaskGroup() as tasks:
            puts = [
                tasks.create_task(client.put("/v1/admin/policy", content=file)) for file in files
            ]
            tasks.create_task(sync_policy(rationed.bootstrap, by_command))
        assert {put.result().status_code for put in puts} == {200}

        async def alike() -> bool:
            newest = await read_policy(rationed.bootstrap)
            return len({limits.version if limits else "" for limits in newest.values()}) == 1

        await eventually_async(alike, what="the partitions agree")


async def test_each_reason_to_refuse_reaches_the_client(rationed: Rationed) -> None:
    with rationed.admission() as admission:
        admission.wait_ready()
        await rationed.limit(enqueued_runs_max=1)
        async with rationed.client() as client:
            chat = await new_chat(client)
            first = await post(client, chat)
            assert first.status_code == 202, first.text
            busy = await post(client, chat)
            assert refused(busy) == (409, "run_in_progress", None)
            behind = await post(client, chat, on_busy="enqueue")
            assert behind.status_code == 202, behind.text
            full = await post(client, chat, on_busy="enqueue")
            assert refused(full) == (429, "too_many_runs", "enqueued_runs_max")
            assert full.headers["retry-after"] == "2"
            instead = await post(client, chat, on_busy="interrupt")
            assert instead.status_code == 202, instead.text
            for answer in (first, behind):
                await until_cancelled(client, chat, answer.json()["id"])
            unknown = await post(client, chat, model="gpt")
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "unknown_model")
            long = await post(client, chat, content="word " * 400, on_busy="enqueue")
            assert (long.status_code, long.json()["error"]["code"]) == (422, "context_too_long")
        runs = [answer.json() for answer in (first, behind, instead)]
        parents = await parents_of(rationed, {run["id"] for run in runs})
        assert parents[runs[0]["id"]] == (None, None)
        assert parents[runs[1]["id"]] == (runs[0]["message_id"], runs[0]["id"])
        assert parents[runs[2]["id"]] == (runs[1]["message_id"], runs[1]["id"])
        for changes, code, limit, status in (
            ({"open_runs_max": 1}, "too_many_runs", "open_runs_max", 429),
            ({"requests_per_minute": 1}, "rate_limited", "requests_per_minute", 429),
            ({"tokens_per_minute": 201}, "rate_limited", "tokens_per_minute", 429),
            ({"tokens_per_window": 60}, "quota_exhausted", "tokens_per_window", 429),
            ({"queue_wait_ms_max": 0}, "overloaded", "queue_wait_ms_max", 503),
        ):
            await rationed.limit(**changes)
            async with rationed.client() as client:
                for _ in range(5):
                    answer = await post(client, await new_chat(client))
                    if answer.status_code != 202:
                        break
                assert refused(answer) == (status, code, limit)
                if code == "quota_exhausted":
                    assert answer.headers["x-should-retry"] == "false"
                    assert answer.json()["error"]["window_ends_at"].endswith("T00:00:00.000Z")
                else:
                    assert int(answer.headers["retry-after"]) >= 1
                if code == "overloaded":
                    assert answer.json()["error"]["wait_ms"] > 0


async def until_cancelled(client: httpx.AsyncClient, chat: str, run_id: str) -> None:
    """Admission cancels a run in that run's partition and queues the next one in another: nothing orders the two."""

    async def cancelled() -> bool:
        run = await client.get(f"/v1/chats/{chat}/runs/{run_id}")
        return bool(run.json()["status"] == "cancelled")

    await eventually_async(cancelled, what=f"{run_id} is cancelled")


async def parents_of(
    rationed: Rationed, runs: set[str]
) -> dict[str, tuple[str | None, str | None]]:
    """What these runs follow, once all of their admissions are on the log, which is after their clients know of them."""

    async def all_told() -> dict[str, tuple[str | None, str | None]] | None:
        found = {
            event.run_id: (event.parent_id, event.after_run_id)
            for event in await rationed.events(ADMISSIONS)
            if isinstance(event, PromptAdmitted)
        }
        return found if runs <= found.keys() else None

    return await eventually_async(all_told, what="each admission is on the log")


@pytest.mark.parametrize("processes", [1, 2])
async def test_of_many_submissions_at_once_exactly_as_many_are_admitted_as_there_is_room_for(
    rationed: Rationed, processes: int
) -> None:
    async with AsyncExitStack() as stack:
        parts = [stack.enter_context(rationed.admission()) for _ in range(processes)]
        for part in parts:
            part.wait_ready()
        await rationed.limit(open_runs_max=ROOM)
        async with rationed.client() as client:
            account = rationed.account
            chats = await asyncio.gather(*(new_chat(client) for _ in range(SUBMISSIONS)))
            # With a key: an edge that gives up on a prompt without one cancels it, and that makes room.
            sending = [asyncio.create_task(post(client, chat, key=chat)) for chat in chats]
            if processes > 1:
                await asyncio.wait(sending, return_when=asyncio.FIRST_COMPLETED)
                parts[0].kill()
            answers = await asyncio.gather(*sending)

        async def decided() -> bool:
            return await reserved(rationed, account) >= ROOM

        await eventually_async(decided, what="the survivor decides what is left")
        assert await reserved(rationed, account) == ROOM
        statuses = Counter(answer.status_code for answer in answers)
        assert statuses[202] <= ROOM
        # Who was not told in time was told so, and what he asked for was decided all the same.
        assert statuses[429] + statuses[503] + statuses[202] == SUBMISSIONS
        if processes == 1 and not statuses[503]:
            assert statuses[202] == ROOM


async def reserved(rationed: Rationed, account: str) -> int:
    return sum(
        1
        for event in await rationed.events(QUOTAS)
        if isinstance(event, QuotaReserved) and event.account_id == account
    )


async def test_what_other_limits_would_have_done_is_told_from_the_log_alone(
    rationed: Rationed, tmp_path: Path
) -> None:
    with rationed.admission() as admission:
        admission.wait_ready()
        await rationed.limit()
        async with rationed.client() as client:
            for _ in range(3):
                assert (await post(client, await new_chat(client))).status_code == 202
    file = tmp_path / "tight.toml"
    file.write_text(policy(open_runs_max=1))
    tried = rationed.turnlog("policy", "try", str(file))
    assert tried.returncode == 0, tried.stderr
    assert "too_many_runs (open_runs_max)" in tried.stdout
    packaged = rationed.turnlog("policy", "try", str(PACKAGED), "--json")
    assert packaged.returncode == 0, packaged.stderr
    assert '"would_be"' in packaged.stdout


def test_a_policy_survives_being_shown_and_read_again(tmp_path: Path) -> None:
    windows = {name: spec.context_window for name, spec in MODELS.items()}
    packaged = read_policies(Path(), models=windows, changed_by="x")
    file = tmp_path / "copy.toml"
    file.write_text(policy_text(packaged))
    assert read_policies(file, models=windows, changed_by="x") == packaged
