"""Admission over a real broker: what it decides is what the pure fold decides, whatever happens to its processes."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from infra.command.policy import sync_policy
from infra.command.topics import apply_topics
from infra.log.records import LogRecord
from infra.process import DEFECT_EXIT
from processors.decisions.account_partition import AccountPartition
from processors.decisions.account_state import (
    AccountOutput,
    AccountState,
    output_id,
    restored,
)
from producers.log_writer import acknowledged
from producers.parking import H_REASON
from schemas.events import Event
from schemas.events.account_snapshots import AccountSnapshot, LimitsKept
from schemas.events.accounts import LimitsChanged, PromptSubmitted, TierLimits, UsageMeasured
from schemas.events.admissions import PromptAdmitted, PromptRefused
from schemas.events.quotas import QuotaReleased, QuotaReserved
from schemas.events.tokens import RunEnded, RunQueued, RunRedirected
from schemas.events.usage import UsageSettled
from schemas.ids import RANDOM_BYTES, RunAddress, mint_run_id, partition_for_key
from schemas.topics import ACCOUNT_SNAPSHOTS, ACCOUNTS, ADMISSIONS, QUOTAS, TOKENS, USAGE
from schemas.vocabulary import FinishReason, RefusalReason, Tier
from tests.integration.recording import ID_KEY, PARTITIONS, STEADY, Log, PartProcess
from tests.integration.running import RunningBroker
from tests.integration.waiting import eventually_async

ADMISSION: Final = "processors.admission_app"
MODEL: Final = "m"
PROMPTS: Final = 200
OUTPUT_TOPICS: Final = (QUOTAS, TOKENS, ADMISSIONS, USAGE)
TIER: Final = TierLimits(
    tokens_per_window=100_000,
    window="month",
    open_runs_max=3,
    models=(MODEL,),
    input_tokens_max=1_000,
    output_tokens_max=500,
    run_deadline_ms=60_000,
    queue_wait_ms_max=5_000,
)
LIMITS: Final = LimitsChanged(version="v1", tiers=dict.fromkeys(Tier, TIER), changed_by="test")


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker for this module: its admission must meet no other test's prompts."""
    running = RunningBroker(tmp_path_factory.mktemp("broker"))
    running.start()
    asyncio.run(apply_topics(running.bootstrap, models=(MODEL,), partitions=PARTITIONS))
    yield running.bootstrap
    running.end()


@pytest.fixture
async def log(bootstrap: str) -> AsyncIterator[Log]:
    opened = await Log.open(bootstrap)
    yield opened
    await opened.close()


def prompt(account: str, **changes: object) -> PromptSubmitted:
    """A prompt in a chat of its own."""
    name = secrets.token_hex(6)
    made = PromptSubmitted(
        run_id=mint_run_id(
            key=ID_KEY,
            account_id=account,
            address=RunAddress(epoch=1, partition=secrets.randbelow(PARTITIONS), mint_offset=0),
            random=secrets.token_bytes(RANDOM_BYTES),
        ),
        account_id=account,
        tier=Tier.PLUS,
        chat_id=f"chat-{name}",
        user_message_id=f"u-{name}",
        assistant_message_id=f"a-{name}",
        parent_id=None,
        content="hello",
        prompt_tokens={MODEL: 10},
    )
    return msgspec.structs.replace(made, **changes)


async def decision(log: Log, run_id: str) -> Event:
    """RunQueued, RunEnded or RunRedirected of this run: exactly one, by event id."""

    async def decided() -> Event | None:
        found = [
            events[0]
            for events in (await log.events(TOKENS)).values()
            if getattr(events[0], "run_id", "") == run_id
        ]
        assert len(found) <= 1, found
        return found[0] if found else None

    return await eventually_async(decided, what=f"{run_id} is decided")


async def fold(log: Log) -> tuple[dict[str, AccountOutput], dict[str, AccountState]]:
    """What one undisturbed fold makes of the account log: outputs by id, and the accounts."""
    partitions = [AccountPartition() for _ in range(PARTITIONS)]
    outputs: dict[str, AccountOutput] = {}
    accounts: dict[str, AccountState] = {}
    for record in await log.read(ACCOUNTS):
        if not isinstance(record, LogRecord):
            continue
        event = record.event
        assert isinstance(event, PromptSubmitted | UsageMeasured | LimitsChanged)
        state = partitions[record.partition]
        decided = state.take(
            offset=record.offset,
            appended_ms=record.appended_ms,
            event_id=record.envelope.event_id,
            event=event,
        )
        for output in decided.outputs:
            outputs[output_id(decided.event_id, output)] = output
        for account in decided.accounts:
            accounts[account.account_id] = account
    return outputs, accounts


async def written(log: Log) -> dict[str, Event]:
    """Admission's outputs on the log by id; every copy of one says the same."""
    found: dict[str, Event] = {}
    for topic in OUTPUT_TOPICS:
        for event_id, copies in (await log.events(topic)).items():
            assert all(copy == copies[0] for copy in copies)
            found[event_id] = copies[0]
    return found


async def saved(log: Log) -> dict[str, AccountState]:
    """The newest snapshot of each account."""
    found: dict[str, AccountState] = {}
    for record in await log.read(ACCOUNT_SNAPSHOTS):
        if isinstance(record, LogRecord) and isinstance(record.event, AccountSnapshot):
            state = restored(record.event)
            known = found.get(state.account_id)
            if known is None or known.applied_offset <= state.applied_offset:
                found[state.account_id] = state
    return found


async def test_before_any_limits_prompts_are_refused_and_later_admitted(
    log: Log, bootstrap: str, tmp_path: Path
) -> None:
    with PartProcess(ADMISSION, tmp_path, bootstrap=bootstrap) as admission:
        admission.wait_ready()
        early = prompt("early")
        await log.append(ACCOUNTS, early)
        ended = await decision(log, early.run_id)
        assert isinstance(ended, RunEnded)
        assert ended.refusal is not None
        assert ended.refusal.reason is RefusalReason.OVERLOADED
        assert await sync_policy(bootstrap, LIMITS) == PARTITIONS
        later = prompt("early")
        await log.append(ACCOUNTS, later)
        queued = await decision(log, later.run_id)
        assert isinstance(queued, RunQueued)

        async def told() -> bool:
            """Nothing orders two topics."""
            admitted = [e[0] for e in (await log.events(ADMISSIONS)).values()]
            assert {type(event) for event in admitted} == {PromptRefused, PromptAdmitted}
            return True

        await eventually_async(told, what="both decisions are on the chats' topic")
        assert admission.stop() == 0, admission.log()


async def test_a_policy_is_written_where_it_differs_only(
    log: Log, bootstrap: str, tmp_path: Path
) -> None:
    await sync_policy(bootstrap, LIMITS)
    # Known from the records alone, and then from the row that admission keeps.
    assert await sync_policy(bootstrap, LIMITS) == 0
    with PartProcess(ADMISSION, tmp_path, bootstrap=bootstrap) as admission:
        admission.wait_ready()
        await until_saved(log)
        assert admission.stop() == 0, admission.log()
    assert await sync_policy(bootstrap, LIMITS) == 0
    other = msgspec.structs.replace(LIMITS, version="v2")
    assert await sync_policy(bootstrap, other) == PARTITIONS
    assert await sync_policy(bootstrap, LIMITS) == PARTITIONS


async def until_saved(log: Log) -> None:
    """Wait until the snapshots are those of the whole account log, and the limits are kept."""

    async def all_saved() -> bool:
        _, accounts = await fold(log)
        kept = {
            record.partition
            for record in await log.read(ACCOUNT_SNAPSHOTS)
            if isinstance(record, LogRecord) and isinstance(record.event, LimitsKept)
        }
        return await saved(log) == accounts and len(kept) == PARTITIONS

    await eventually_async(all_saved, what="every account is saved")


async def test_processes_killed_in_mid_stream_decide_every_prompt_once(
    log: Log, bootstrap: str, tmp_path: Path
) -> None:
    """I5, I6, I7, I13, I14: kill -9, a second process that joins, and one that is paused past its session and wakes."""
    await sync_policy(bootstrap, LIMITS)
    submitted: list[PromptSubmitted] = []
    sent = 0

    async def submit() -> None:
        nonlocal sent
        for number in range(PROMPTS):
            account = f"account-{number % 20}"
            before = [p for p in submitted if p.account_id == account]
            key = f"k{number % 40}" if number % 3 == 0 else None
            made = prompt(
                account,
                idempotency_key=key,
                fingerprint="f",
                ended_runs=tuple(p.run_id for p in before[:-1]),
            )
            submitted.append(made)
            future = await log.writer.send(ACCOUNTS, made, event_id=secrets.token_hex(8))
            await acknowledged(future)
            sent += 1

    async def until_sent(count: int) -> None:
        async def reached() -> bool:
            return sent >= count

        await eventually_async(reached, what=f"{count} prompts are sent")

    with PartProcess(ADMISSION, tmp_path, bootstrap=bootstrap) as first:
        first.wait_ready()
        submitting = asyncio.create_task(submit())
        await until_sent(60)
        first.kill()
        with (
            PartProcess(ADMISSION, tmp_path, bootstrap=bootstrap) as second,
            PartProcess(ADMISSION, tmp_path, bootstrap=bootstrap) as third,
        ):
            # Not in this loop: what it has sent would look unacknowledged for as long as they take to start.
            await asyncio.gather(*map(asyncio.to_thread, (second.wait_ready, third.wait_ready)))
            await submitting
            third.send(signal.SIGSTOP)
            runs = {p.run_id for p in submitted}

            async def all_decided() -> bool:
                found = (await written(log)).values()
                kinds = (RunQueued, RunEnded, RunRedirected)
                return runs <= {event.run_id for event in found if isinstance(event, kinds)}

            await eventually_async(all_decided, what="every prompt is decided")
            third.send(signal.SIGCONT)
            for event in (await written(log)).values():
                if isinstance(event, RunQueued) and event.run_id in runs:
                    usage = UsageMeasured(
                        run_id=event.run_id,
                        account_id=event.account_id,
                        input_tokens=event.input_budget_tokens // 2,
                        output_tokens=event.granted_output_tokens // 2,
                        finish_reason=FinishReason.STOP,
                    )
                    await log.append(ACCOUNTS, usage, f"usage-{event.run_id}")
            second.kill()
            await until_saved(log)
            expected, accounts = await fold(log)
            assert await written(log) == expected
            assert any(isinstance(event, RunRedirected) for event in expected.values())
            check_tokens(expected, runs)
            assert all(not accounts[f"account-{n}"].open for n in range(20))
            assert third.stop() == 0, third.log()


def check_tokens(outputs: dict[str, AccountOutput], runs: set[str]) -> None:
    reserved: dict[str, int] = {}
    for event in outputs.values():
        if isinstance(event, QuotaReserved) and event.run_id in runs:
            assert event.run_id not in reserved, "a run is reserved once"
            reserved[event.run_id] = event.input_tokens + event.output_tokens
    assert reserved
    for event in outputs.values():
        if isinstance(event, QuotaReleased) and event.run_id in runs:
            reserved[event.run_id] -= event.tokens
    settled = {
        event.run_id: event.input_tokens + event.output_tokens
        for event in outputs.values()
        if isinstance(event, UsageSettled) and event.run_id in runs
    }
    assert reserved == settled, "I6 at rest"


async def test_bad_records_are_parked_and_the_partition_goes_on(
    log: Log, bootstrap: str, tmp_path: Path
) -> None:
    await sync_policy(bootstrap, LIMITS)
    home = partition_for_key("poisoned", PARTITIONS)
    parked_before = len(await log.read_dead(ACCOUNTS))
    with PartProcess(ADMISSION, tmp_path, bootstrap=bootstrap, variables=STEADY) as admission:
        admission.wait_ready()
        for value in (b"{", None, b"\xff\xfe"):
            await acknowledged(
                await log.writer.send_raw(
                    ACCOUNTS.name, value, key=b"k", partition=home, headers=[("t", b"Nothing")]
                )
            )
        await log.append(ACCOUNTS, prompt("poisoned", run_id="run_no"))
        nowhere = mint_run_id(
            key=ID_KEY,
            account_id="poisoned",
            address=RunAddress(epoch=1, partition=999, mint_offset=0),
            random=secrets.token_bytes(RANDOM_BYTES),
        )
        await log.append(ACCOUNTS, prompt("poisoned", run_id=nowhere))
        stray = prompt("poisoned")
        await log.writer.append(
            ACCOUNTS, stray, event_id="stray", partition=(home + 1) % PARTITIONS, key="poisoned"
        )
        good = prompt("poisoned")
        await log.append(ACCOUNTS, good)
        queued = await decision(log, good.run_id)
        assert isinstance(queued, RunQueued)
        beyond = UsageMeasured(
            run_id=good.run_id,
            account_id="poisoned",
            input_tokens=10,
            output_tokens=queued.granted_output_tokens + 1,
            finish_reason=FinishReason.STOP,
        )
        await log.append(ACCOUNTS, beyond)
        right = msgspec.structs.replace(beyond, output_tokens=queued.granted_output_tokens)
        await log.append(ACCOUNTS, right)

        async def settled() -> bool:
            return good.run_id in {
                event.run_id
                for event in (await written(log)).values()
                if isinstance(event, UsageSettled)
            }

        await eventually_async(settled, what="the measure that fits is settled")
        held = queued.granted_output_tokens
        reasons = [dict(each.headers)[H_REASON].decode() for each in await log.read_dead(ACCOUNTS)]
        assert reasons.count(f"{held + 1} output tokens, reserved were {held}") == 1, (
            "it is parked before what comes after it is decided"
        )

        async def all_parked() -> bool:
            return len(await log.read_dead(ACCOUNTS)) == parked_before + 7

        await eventually_async(all_parked, what="seven records are parked")
        assert stray.run_id not in {getattr(e, "run_id", "") for e in (await written(log)).values()}
        assert admission.stop() == 0, admission.log()


async def test_a_process_that_finds_a_hole_in_its_log_ends_without_going_on(
    log: Log, bootstrap: str, tmp_path: Path
) -> None:
    """The last test: it leaves a partition that nobody can decide any more."""
    await sync_policy(bootstrap, LIMITS)
    home = partition_for_key("holey", PARTITIONS)
    for _ in range(5):
        await log.append(ACCOUNTS, prompt("holey"))
    end = (await log.reader.bounds(ACCOUNTS, [home]))[home].end
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    source = TopicPartition(ACCOUNTS.name, home)
    await admin.delete_records({source: RecordsToDelete(before_offset=end - 1)})
    await admin.close()
    with PartProcess(ADMISSION, tmp_path, bootstrap=bootstrap) as admission:
        code = await asyncio.to_thread(admission.ended)
        assert code == DEFECT_EXIT
        assert "HoleInLog" in admission.log()
