"""The degradation ladder on a running system: real load takes it up step by step, and it clears by itself when the load is gone."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from edge.auth import mint_admin_token
from edge.decisions.load_view import pace, used_tokens
from infra.models import ModelFileMissingError, model_spec
from infra.secrets import load_secrets
from processors.decisions.lane_room import RETRY_OVERLOADED_MS_MAX
from schemas.events.admissions import PromptAdmitted, PromptRefused
from schemas.events.workers import WorkerLoadReported
from schemas.topics import ADMISSIONS, WORKERS
from schemas.vocabulary import Lane, Tier
from tests.integration.audit import all_records, audited
from tests.integration.conftest import SystemFactory
from tests.integration.people import Person, person
from tests.integration.running import RunningSystem
from tests.integration.waiting import eventually_async

SMALL: Final = "smollm2-135m"
LARGE: Final = "gemma3-270m"
LONGEST: Final = 32
CLIMB_S: Final = 400.0
CLEAR_S: Final = 120.0
ENTER_RUNS: Final = (4.0, 10.0, 25.0, 62.0)
"""Levels are entered at the time for so many waiting runs, as the worker's measured pace tells it: no test may depend on a machine's."""
WARM_RUNS: Final = 6
MORE_RUNS: Final = 3
MORE_SHARE: Final = 0.2
"""So much load is added between two looks, of what waits already: too little to jump over a level."""
STEPS: Final = ("shorter", "smaller", "no optional work", "shed")

TIER: Final = f"""
tokens_per_window = 100_000_000
window = "month"
open_runs_max = 900
input_tokens_max = 200
output_tokens_max = {LONGEST}
run_deadline_ms = 600_000
queue_wait_ms_max = 3_600_000
"""
LEVELS: Final = (
    "output_percent_free = 50",
    "output_percent_free = 50\ndowngrade_free = true",
    "output_percent_free = 25\ndowngrade_free = true\noptional_work = false",
    "output_percent_free = 25\ndowngrade_free = true\noptional_work = false\nshed_free = true",
)
PERCENT_FREE: Final = {0: 100, 1: 50, 2: 50, 3: 25}


def installed(model: str) -> bool:
    try:
        model_spec(model).path()
    except ModelFileMissingError:
        return False
    return True


def policy(models: tuple[str, ...], *, run_ms: int | None = None) -> str:
    """Nobody is refused but by the ladder, which takes from the free tier alone. `run_ms`: time for a run; None: no ladder."""
    parts = ["[ladder]\nhold_ms = 500"]
    if run_ms is not None:
        for runs, step in zip(ENTER_RUNS, LEVELS, strict=True):
            bounds = f"enter_ms = {int(runs * run_ms)}\nleave_ms = {int(runs * run_ms / 2)}"
            parts.append(f"[[ladder.levels]]\n{bounds}\n{step}")
    parts += [f"[tiers.{tier}]\n{TIER}models = {json.dumps(models)}" for tier in Tier]
    if len(models) > 1:
        parts.append(f'[models.{models[0]}]\ncontext_tokens = 4_096\nsmaller = "{models[1]}"')
    return "\n".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the client was told: the queued run, or the refusal with its headers."""

    status: int
    queued: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)
    retry_after: str | None = None


async def asked(one: Person, given_up: set[str], **fields: object) -> Told:
    """Post a message, take what is told of its place in the queue, and let the run go again.

    Comes back where the machine was too busy to decide on it in time; what became of those runs nobody was told.
    """

    async def decided() -> Told | None:
        chat_id = await one.until_answered(one.new_chat)
        path = f"/v1/chats/{chat_id}/messages"
        async with one.http.stream("POST", path, json={"content": "Hello", **fields}) as response:
            if response.is_error:
                error = json.loads(await response.aread())["error"]
                if response.status_code == 503 and "limit" not in error:
                    given_up.add(error.get("run_id", ""))
                    return None
                headers = response.headers
                return Told(
                    status=response.status_code, error=error, retry_after=headers.get("retry-after")
                )
            lines = response.aiter_lines()
            first = await anext(line async for line in lines if line.startswith("data: "))
            queued = json.loads(first.removeprefix("data: "))
        await one.cancel(chat_id, queued["run_id"])
        return Told(status=response.status_code, queued=queued)

    return await eventually_async(decided, what="the message is decided on")


@dataclass(slots=True, kw_only=True)
class Climb:
    """A crowd of a team that asks more and more, and two people who look at what the ladder does to them meanwhile."""

    running: RunningSystem
    crowd: Person
    free: Person
    plus: Person
    models: tuple[str, ...]
    seen: list[str] = field(default_factory=list)
    waiting: list[tuple[str, str]] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    given_up: set[str] = field(default_factory=set)

    async def measured(self) -> int:
        """Let the worker learn its pace and what requests use. The time for one of them, in ms."""
        await self._start(WARM_RUNS)

        async def known() -> int:
            last = {
                record.event.worker_id: record.event
                for record in await all_records(self.running, WORKERS)
                if isinstance(record.event, WorkerLoadReported)
            }
            for report in last.values():
                told = report.full_tokens_per_s and used_tokens(report, Lane.TEAM)
                if told and report.model == self.models[0] and not report.busy:
                    return int(1_000 * told / pace(report))
            return 0

        return await eventually_async(known, within_s=CLIMB_S, what="the worker's pace is measured")

    async def _start(self, runs: int) -> None:
        async def one() -> None:
            chat_id = await self.crowd.until_answered(self.crowd.new_chat)
            # The ladder takes from the free tier alone: who refuses this one is an edge that is late.
            run = await self.crowd.until_answered(
                lambda: self.crowd.start(chat_id, "Tell me a long story.")
            )
            self.waiting.append((chat_id, run["id"]))

        await asyncio.gather(*(one() for _ in range(runs)))

    async def limit(self, run_ms: int) -> None:
        """The ladder, from now on."""
        key = load_secrets(self.running.home).token_key
        token = mint_admin_token(key=key, name="olga", ttl=timedelta(hours=1))
        changed = await self.crowd.http.put(
            "/v1/admin/policy",
            content=policy(self.models, run_ms=run_ms),
            headers={"authorization": f"Bearer {token}"},
        )
        assert changed.status_code == 200, changed.text

    async def up(self) -> None:
        """Add load until the free tier is shed. Paid prompts are admitted in full all the while."""

        async def shed() -> bool:
            await self._start(max(MORE_RUNS, int(MORE_SHARE * len(self.waiting))))
            await self._look()
            return "shed" in self.seen

        await eventually_async(shed, within_s=CLIMB_S, what="the free tier is shed")

        async def paid() -> bool:
            await self._start(1)
            top = {"decision": "admitted", "level": str(len(LEVELS))}
            return counted(await self._metrics(), "decisions", tier="team", **top) > 0

        await eventually_async(paid, within_s=CLIMB_S, what="a paid prompt is admitted up there")

    async def _metrics(self) -> str:
        return (await self.crowd.http.get("/metrics")).text

    async def _look(self) -> None:
        """One look of each; steps in the order in which they are mild."""
        free = await asked(self.free, self.given_up)
        flex = await asked(self.plus, self.given_up, service_tier="flex")
        paid = await asked(self.plus, self.given_up)
        assert (paid.status, paid.queued["granted_output_tokens"]) == (200, LONGEST)
        assert paid.queued["model"] == self.models[0]
        now: set[str] = set()
        if flex.status == 200:
            assert flex.queued["granted_output_tokens"] == LONGEST
        else:
            now.add("no optional work")
            self._is_honest(flex, limit="optional_work")
        if free.status == 200:
            if self._shortened(free):
                now.add("shorter")
            if free.queued["model"] != self.models[0]:
                now.add("smaller")
        else:
            now.add("shed")
            self._is_honest(free, limit="ladder")
        self.seen += [step for step in STEPS if step in now and step not in self.seen]

    @staticmethod
    def _shortened(told: Told) -> bool:
        return bool(told.queued["granted_output_tokens"] < LONGEST)

    def _is_honest(self, told: Told, *, limit: str) -> None:
        assert (told.status, told.error["code"], told.error["limit"]) == (503, "overloaded", limit)
        assert told.retry_after is not None
        come_back_ms = min(max(told.error["wait_ms"], 1), RETRY_OVERLOADED_MS_MAX)
        assert come_back_ms <= 1_000 * int(told.retry_after) < come_back_ms + 1_000
        self.refused[limit] += 1

    async def down(self) -> None:
        """The load goes away; nobody touches the ladder. Then all is as it was, for flex prompts too."""
        await asyncio.gather(
            *(self.crowd.cancel(chat_id, run_id) for chat_id, run_id in self.waiting)
        )

        async def calm() -> bool:
            free = await asked(self.free, self.given_up)
            flex = await asked(self.plus, self.given_up, service_tier="flex")
            if free.status != 200:
                self._is_honest(free, limit="ladder")
            if flex.status != 200:
                self._is_honest(flex, limit="optional_work")
            if not free.status == flex.status == 200 or self._shortened(free):
                return False
            assert free.queued["model"] == self.models[0]
            return "turnlog_edge_ladder_level 0.0" in await self._metrics()

        await eventually_async(calm, within_s=CLEAR_S, what="the ladder clears by itself")
        _, reading = await self.plus.ask("Hello", service_tier="flex", max_output_tokens=8)
        assert reading.end["status"] == "done", "where nobody else waits a flex prompt is answered"


async def climbed(running: RunningSystem, models: tuple[str, ...]) -> None:
    """Up and down again, and then the log and the metrics say the same as the clients were told."""
    async with AsyncExitStack() as stack:
        crowd, free, plus = [
            await stack.enter_async_context(person(running, tier.value, tier=tier))
            for tier in (Tier.TEAM, Tier.FREE, Tier.PLUS)
        ]
        climb = Climb(running=running, crowd=crowd, free=free, plus=plus, models=models)
        await eventually_async(
            lambda: limits_known(free), within_s=CLEAR_S, what="the limits are known"
        )
        await climb.limit(await climb.measured())
        await climb.up()
        assert climb.seen == [step for step in STEPS if step != "smaller" or len(models) > 1]
        await climb.down()
        metrics = (await crowd.http.get("/metrics")).text
    # Once each, also where admission was away for a moment and decided some again.
    records = await all_records(running, ADMISSIONS)
    events = list({record.envelope.event_id: record.event for record in records}.values())
    check_log(events, models)
    check_metrics(metrics, events, climb)
    audited(running)


async def limits_known(one: Person) -> bool:
    return (await one.http.get("/v1/quota")).status_code == 200


def check_log(events: list[Any], models: tuple[str, ...]) -> None:
    """Every decision says its level, and what that took from the prompt."""
    levels = set()
    for event in events:
        if isinstance(event, PromptAdmitted):
            levels.add((event.tier, event.ladder_level))
            if event.tier is not Tier.FREE:
                assert (event.output_percent, event.downgraded_from) == (100, None), "free first"
                if event.lane is Lane.BACKGROUND:
                    assert event.optional_work
                continue
            percent = PERCENT_FREE[event.ladder_level]
            assert event.output_percent == percent
            assert event.granted_output_tokens == LONGEST * percent // 100
            downgraded = event.ladder_level >= 2 and len(models) > 1
            assert event.downgraded_from == (models[0] if downgraded else None)
            assert event.model == models[int(downgraded)]
        elif isinstance(event, PromptRefused):
            level = {"ladder": event.ladder_level == 4, "optional_work": event.ladder_level >= 3}
            assert level[event.limit]
    assert {(Tier.FREE, 0), (Tier.TEAM, len(LEVELS))} <= levels
    assert any(isinstance(e, PromptAdmitted) and e.lane is Lane.BACKGROUND for e in events)


def check_metrics(text: str, events: list[Any], climb: Climb) -> None:
    """The one edge counted what it was told, by tier."""
    refused = climb.refused
    admitted = [
        event
        for event in events
        if isinstance(event, PromptAdmitted) and event.run_id not in climb.given_up
    ]
    shorter = sum(event.output_percent < 100 for event in admitted)
    assert shorter > 0
    assert counted(text, "shortened", tier="free") == shorter
    assert counted(text, "shortened", tier="plus") == 0
    smaller = sum(event.downgraded_from is not None for event in admitted)
    assert counted(text, "downgrades", tier="free") == smaller
    shed = {"decision": "overloaded", "limit": "ladder"}
    assert counted(text, "decisions", tier="free", **shed) == refused["ladder"] > 0
    assert counted(text, "decisions", tier="plus", **shed) == 0
    optional = {"decision": "overloaded", "limit": "optional_work"}
    assert (
        counted(text, "decisions", tier="plus", service_tier="flex", **optional)
        == refused["optional_work"]
        > 0
    )
    assert counted(text, "decisions", service_tier="default", **optional) == 0
    assert "turnlog_edge_ladder_level 0.0" in text, "it is calm again"
    assert 'turnlog_edge_run_wait_seconds_count{lane="background"' in text


def counted(text: str, name: str, **labels: str) -> float:
    """The sum of a counter's values with these labels."""
    total = 0.0
    for line in text.splitlines():
        if line.startswith(f"turnlog_edge_{name}_total{{"):
            found = dict(re.findall(r'(\w+)="([^"]*)"', line))
            if labels.items() <= found.items():
                total += float(line.rsplit(" ", 1)[1])
    return total


async def test_load_takes_the_ladder_up_step_by_step_free_before_paid_and_it_clears_by_itself(
    system: SystemFactory, tmp_path: Path
) -> None:
    """The smaller model is one of the steps where a second one is installed."""
    models = (LARGE, SMALL) if installed(LARGE) else (SMALL,)
    file = tmp_path / "ladder.toml"
    file.write_text(policy(models))
    # Two slots that make ten tokens a second each: an answer takes 3 s.
    running = system(
        {
            "TURNLOG_MODELS": ",".join(models),
            "TURNLOG_POLICIES": str(file),
            "TURNLOG_SCRIPTED_SLOTS": "2",
            "TURNLOG_SCRIPTED_TOKENS": str(LONGEST),
            "TURNLOG_SCRIPTED_DELAY_MS": "100",
        }
    )
    await climbed(running, models)


@pytest.mark.skipif(
    not installed(LARGE), reason=f"{LARGE} is not installed: make setup-models (253 MB)"
)
async def test_with_two_real_models_load_takes_the_ladder_up_and_it_clears_by_itself(
    system: SystemFactory, tmp_path: Path
) -> None:
    models = (LARGE, SMALL)
    file = tmp_path / "ladder.toml"
    file.write_text(policy(models))
    running = system(
        {
            "TURNLOG_ENGINE": "llama",
            "TURNLOG_MODELS": ",".join(models),
            "TURNLOG_POLICIES": str(file),
        }
    )
    await climbed(running, models)
