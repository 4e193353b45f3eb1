"""Real worker processes on a real broker with the scripted engine: whatever happens to a worker, a run is answered once and whole."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from inference_workers.decisions.generation import BARREN_WORKERS_MAX, ENGINE_FAILURES_MAX
from inference_workers.decisions.repetition import REPEATED_TOKENS_MIN
from inference_workers.decisions.request_book import Queue
from inference_workers.decisions.script import LOOP_FROM, Script
from inference_workers.membership import Membership
from infra.embedded.kafka import wait_until_serving
from schemas.events.tokens import AttemptStarted, RunEnded, TokensGenerated
from schemas.vocabulary import EndCause, FinishReason, Lane
from tests.integration.running import RunningBroker
from tests.integration.waiting import PATIENCE_S, eventually, eventually_async
from tests.integration.worker_runs import (
    MODEL,
    PARTITIONS,
    SESSION_S,
    Runs,
    WorkerProcess,
    script_text,
    settled,
)

StartWorker = Callable[..., WorkerProcess]
# Beyond the session.
TAKEOVER_S_MAX = 2.0
TRIES_MAX = 3
FALLS_SILENT = '{"mute_after_tokens": 20, "attempts_max": 100, "stalled_after_s": 600}'


@pytest.fixture(scope="module")
def worker_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    """A broker of these tests' own: other tests' workers would take part otherwise."""
    running = RunningBroker(tmp_path_factory.mktemp("worker-broker"))
    running.start()
    yield running
    running.end()


@pytest.fixture
async def runs(worker_broker: RunningBroker) -> AsyncIterator[Runs]:
    async with Runs(worker_broker.bootstrap) as entered:
        yield entered


@pytest.fixture
def worker(worker_broker: RunningBroker, tmp_path: Path, runs: Runs) -> Iterator[StartWorker]:
    """Start a worker: `worker(delay_ms=20, tokens=200)`. Topics exist before the first one starts."""
    started: list[WorkerProcess] = []

    def start(
        *,
        delay_ms: float = 0,
        tokens: int = 64,
        slots: int = 8,
        faults: str = "",
        wait: bool = True,
    ) -> WorkerProcess:
        process = WorkerProcess(
            tmp_path,
            bootstrap=worker_broker.bootstrap,
            variables={
                "TURNLOG_SCRIPTED_DELAY_MS": str(delay_ms),
                "TURNLOG_SCRIPTED_TOKENS": str(tokens),
                "TURNLOG_SCRIPTED_SLOTS": str(slots),
            },
            faults=faults,
        )
        started.append(process)
        if wait:
            process.wait_ready()
        return process

    yield start
    for process in started:
        process.end()


async def test_a_request_becomes_one_attempt_dense_deltas_and_one_end(
    runs: Runs, worker: StartWorker
) -> None:
    one = worker(tokens=40)
    run_id = await runs.start(prompt_ids=(5, 6, 7, 8))
    log = await runs.until_ended(run_id)
    assert log.state.finish_reason is FinishReason.STOP
    assert log.state.text == script_text((5, 6, 7, 8), 40)
    assert (log.state.n, log.state.input_tokens) == (40, 4)
    assert log.state.attempt - 1 <= len(one.losses(run_id)), "no attempt without a reason"
    first = log.of(TokensGenerated)[0].event
    assert isinstance(first, TokensGenerated)
    assert first.ids is not None
    assert len(first.ids) == first.count


async def test_the_grant_is_reached_exactly_and_named_for_what_it_was(
    runs: Runs, worker: StartWorker
) -> None:
    worker(tokens=64)
    ends = []
    for quota_limited in (False, True):
        run_id = await runs.mint(1)
        await runs.queue(run_id, grant=20)
        await runs.request(run_id, grant=20, quota_limited=quota_limited)
        log = await runs.until_ended(run_id)
        assert log.state.n == 20
        ends.append(log.state.finish_reason)
    assert ends == [FinishReason.LENGTH, FinishReason.QUOTA_REACHED]


async def test_a_request_that_comes_before_its_run_is_queued_waits_for_it(
    runs: Runs, worker: StartWorker
) -> None:
    worker()
    run_id, other = await runs.mint(2), await runs.mint(2)
    await runs.request(run_id)
    await runs.queue(other)
    await runs.request(other)
    await runs.until_ended(other)
    assert (await runs.read(run_id)).state.attempt == 0
    await runs.queue(run_id)
    assert (await runs.until_ended(run_id)).state.finish_reason is FinishReason.STOP


async def test_requests_that_waited_while_no_worker_was_alive_are_answered_once_each(
    runs: Runs, worker: StartWorker
) -> None:
    run_ids = [await runs.start(partition % 4, (partition,)) for partition in range(12)]
    for run_id in run_ids:
        await runs.request(run_id, (99,))  # A replay of context: the lowest offset counts.
    one = worker(tokens=30, slots=3)
    for place, run_id in enumerate(run_ids):
        log = await runs.until_ended(run_id)
        assert log.state.text == script_text((place,), 30)
        assert log.state.attempt - 1 <= len(one.losses(run_id)), "no attempt without a reason"


async def test_a_run_cancelled_before_it_is_queued_or_started_is_never_attempted(
    runs: Runs, worker: StartWorker
) -> None:
    early, waiting = await runs.mint(0), await runs.mint(0)
    await runs.cancel(early)
    await runs.queue(early)
    await runs.request(early)
    await runs.queue(waiting)
    await runs.request(waiting)
    await runs.cancel(waiting)
    worker()
    last = await runs.start(0)
    await runs.until_ended(last)
    for run_id in (early, waiting):
        log = await runs.read(run_id)
        assert log.state.finish_reason is FinishReason.CANCELLED
        assert not log.of(AttemptStarted)
        assert not log.of(AttemptStarted, accepted=False)


async def test_a_cancel_in_mid_answer_ends_it_in_place_and_frees_the_slot_for_the_next(
    runs: Runs, worker: StartWorker
) -> None:
    # Eight minutes, if nobody ended it.
    worker(delay_ms=500, tokens=1_000, slots=1)
    run_id = await runs.start(0)
    await runs.until_said(run_id, 3)
    waiting = await runs.start(0, (4,))
    await runs.cancel(run_id)
    await runs.cancel(run_id)
    await runs.until_said(waiting, 1)
    log = await runs.read(run_id)
    log.check()
    assert log.state.finish_reason is FinishReason.CANCELLED
    assert not log.of(RunEnded, accepted=False)
    await runs.cancel(waiting)  # It is no other test's.


async def test_a_takeover_that_finds_the_grant_used_up_only_ends_the_run(
    runs: Runs, worker: StartWorker
) -> None:
    run_id = await runs.mint(0)
    await runs.queue(run_id, grant=20)
    await runs.request(run_id, grant=20)
    await runs.pretend(run_id, attempt=1, said=20)
    one = worker()
    log = await runs.until_ended(run_id)
    assert (log.state.finish_reason, log.state.n) == (FinishReason.LENGTH, 20)
    assert 2 <= log.state.attempt <= 2 + len(one.losses(run_id))


async def test_a_run_older_than_the_tail_is_read_back_and_continued_or_left_alone(
    runs: Runs, worker: StartWorker
) -> None:
    begun, over = await runs.mint(0), await runs.mint(0)
    for run_id in (begun, over):
        await runs.queue(run_id)
        await runs.pretend(run_id, attempt=1, said=7)
    await runs.cancel(over)
    one = worker(tokens=30)  # Finds no request, so its tail begins behind all this.
    await runs.request(over)
    await runs.request(begun)
    log = await runs.until_ended(begun)
    assert log.state.text == script_text((1, 2, 3), 30)
    assert 2 <= log.state.attempt <= 2 + len(one.losses(begun))
    assert (await runs.read(over)).state.attempt == 1


async def test_everything_done_is_committed_and_a_new_worker_does_none_of_it_again(
    runs: Runs, worker: StartWorker
) -> None:
    first = worker()
    run_ids = [await runs.start(place % 4, (place, 3)) for place in range(8)]
    ends = [(await runs.until_ended(run_id)).seen[-1].offset for run_id in run_ids]
    await runs.all_committed()
    assert first.stop() == 0
    worker()
    for place, run_id in enumerate(run_ids):
        await runs.request(run_id, (place, 3))  # A replay of context, after the end.
    await runs.until_ended(await runs.start(0))
    await runs.all_committed()
    for run_id, end in zip(run_ids, ends, strict=True):
        assert (await runs.read(run_id)).seen[-1].offset == end


async def test_a_worker_killed_in_mid_answer_is_replaced_and_the_client_sees_one_answer(
    runs: Runs, worker: StartWorker
) -> None:
    """And soon: the quickest of some tries counts, since what another takes more may be the machine's."""
    survivor = worker(tokens=150, slots=16)
    soon: list[bool] = []
    while len(soon) < TRIES_MAX and not any(soon):
        began = time.monotonic()
        # It says nothing more in the middle of an answer, so it is killed there, whenever that is.
        victim = worker(tokens=150, slots=16, faults=FALLS_SILENT)
        await settled([survivor, victim])
        joined_s = time.monotonic() - began
        run_ids = await start_in_every_queue(runs)
        for run_id in run_ids:
            await runs.until_said(run_id, 20)
        cut_short = [run_id for run_id in run_ids if not (await runs.read(run_id)).state.ended]
        assert cut_short, "the victim owns some of the queues"
        before = (await runs.read(cut_short[0])).state
        killed = time.monotonic()
        victim.send(signal.SIGKILL)
        await runs.until_said(cut_short[0], before.n + 1, attempt=before.attempt + 1)
        took_s = time.monotonic() - killed
        # Where starting a worker and sharing the queues takes longer, so does a takeover.
        soon.append(took_s <= SESSION_S + max(TAKEOVER_S_MAX, joined_s / 2))
        for run_id in run_ids:
            log = await runs.until_ended(run_id)
            assert log.state.text == script_text((7, 7), 150)
            assert (log.state.attempt >= 2) or run_id not in cut_short
    assert any(soon), "takeovers took too long"


async def start_in_every_queue(runs: Runs) -> list[str]:
    """A run in each partition of each lane, so that every worker that owns anything has one."""
    run_ids = []
    for lane in Lane:
        for partition in range(PARTITIONS):
            run_id = await runs.mint(partition)
            await runs.queue(run_id, lane=lane)
            await runs.request(run_id, (7, 7), lane=lane)
            run_ids.append(run_id)
    return run_ids


async def test_a_worker_paused_past_its_session_leaves_nothing_visible_when_it_wakes(
    runs: Runs, worker: StartWorker
) -> None:
    # More than three minutes for an answer: it is paused in the middle of it, whenever that is.
    zombie = worker(delay_ms=500, tokens=400, slots=16)
    survivor = worker(delay_ms=5, tokens=400, slots=16)
    await settled([zombie, survivor])
    run_ids = await start_in_every_queue(runs)
    cut_short: list[str] = []
    for run_id in run_ids:
        log = await runs.until_said(run_id, 2)
        if not log.state.ended and runs.writer_of(log).startswith(zombie.name):
            cut_short.append(run_id)
    assert cut_short, "the zombie owns some of the queues"
    zombie.send(signal.SIGSTOP)
    before = (await runs.read(cut_short[0])).state
    await runs.until_said(cut_short[0], before.n + 1, attempt=before.attempt + 1)
    zombie.send(signal.SIGCONT)
    # It comes back into the group, takes some of them back and works.
    await settled([zombie, survivor])
    assert zombie.process.poll() is None
    run_ids += await start_in_every_queue(runs)
    for run_id in run_ids:
        await runs.until_said(run_id, 2)
        await runs.cancel(run_id)
        log = await runs.until_ended(run_id)
        whole = script_text((7, 7), 400)
        assert log.state.text == whole[: len(log.state.text)]
        if log.state.finish_reason is not FinishReason.CANCELLED:
            assert log.state.text == whole


async def test_a_worker_told_to_stop_leaves_its_runs_to_others_and_exits_soon(
    runs: Runs, worker: StartWorker
) -> None:
    first = worker(delay_ms=500, tokens=1_000)
    run_id = await runs.start(0, (3, 1))
    await runs.until_said(run_id, 3)
    second = worker(delay_ms=500, tokens=1_000)
    await settled([first, second])
    assert first.stop() == 0
    log = await runs.read(run_id)
    assert not log.state.ended, "it did not stay for the eight minutes of its answer"
    await runs.until_said(run_id, log.state.n + 3)
    await runs.cancel(run_id)
    log = await runs.until_ended(run_id)
    assert script_text((3, 1), 1_000).startswith(log.state.text)
    assert second.process.poll() is None


async def test_members_that_come_and_go_cost_no_run_its_answer(
    runs: Runs, worker: StartWorker
) -> None:
    worker(delay_ms=10, tokens=400)
    run_ids = [await runs.start(partition, (partition, 5)) for partition in range(4)]
    for run_id in run_ids:
        await runs.until_said(run_id, 1)
    for _ in range(3):
        passing = worker(delay_ms=10, tokens=400)
        eventually(passing.takes_part, what="it takes part")
        assert passing.stop() == 0
    for place, run_id in enumerate(run_ids):
        log = await runs.until_ended(run_id)
        assert log.state.text == script_text((place, 5), 400)


async def test_nothing_is_committed_while_the_group_is_being_joined(
    runs: Runs, worker_broker: RunningBroker
) -> None:
    assigned: list[frozenset[Queue]] = []
    member = Membership(
        bootstrap=worker_broker.bootstrap,
        client_id="member",
        model=MODEL,
        session_ms=30_000,  # However long this process stands still: nothing of the group's own interferes.
        on_revoked=lambda: None,
        on_assigned=assigned.append,
    )
    async with member:
        queue = Queue(lane=Lane.BACKGROUND, partition=3)
        assert queue in assigned[-1]

        async def commits() -> bool:
            return await member.commit({queue: 0})

        await eventually_async(commits, what="a member commits")
        await member.on_partitions_revoked(set())
        assert not await commits()
        await member.on_partitions_assigned(set())
        await eventually_async(commits, what="a member commits after the join")


async def test_a_poison_request_is_parked_and_the_queue_goes_on(
    runs: Runs, worker: StartWorker
) -> None:
    before = await runs.parked(Lane.PLUS, 3)
    await runs.poison(Lane.PLUS, 3)
    one = worker()
    run_id = await runs.mint(3)
    await runs.queue(run_id, lane=Lane.PLUS)
    await runs.request(run_id, lane=Lane.PLUS)
    await runs.until_ended(run_id)

    async def parked() -> bool:
        # What a rebalance makes it read again is parked again.
        times = one.log().count("request_parked")
        return 0 < times == await runs.parked(Lane.PLUS, 3) - before

    await eventually_async(parked, what="the poison is parked")


async def test_a_request_that_the_engine_refuses_ends_with_an_error(
    runs: Runs, worker: StartWorker
) -> None:
    worker()
    run_id = await runs.start(0, tuple(range(5_000)))
    log = await runs.until_ended(run_id)
    assert log.state.finish_reason is FinishReason.ERROR
    ended = log.of(RunEnded)[0].event
    assert isinstance(ended, RunEnded)
    assert ended.cause is EndCause.ERROR


async def test_an_engine_that_fails_once_is_asked_again_and_goes_on_where_it_was(
    runs: Runs, worker: StartWorker
) -> None:
    one = worker(tokens=60, faults='{"error_after_tokens": 20}')
    run_id = await runs.start(0, (2, 2))
    log = await runs.until_ended(run_id)
    assert 2 <= log.state.attempt <= 1 + len(one.losses(run_id))
    assert log.state.text == script_text((2, 2), 60)


async def test_an_engine_that_keeps_failing_is_asked_a_few_times_and_the_run_ends_with_an_error(
    runs: Runs, worker: StartWorker
) -> None:
    one = worker(tokens=60, faults='{"error_after_tokens": 5, "attempts_max": 100}')
    run_id = await runs.start(0)
    log = await runs.until_ended(run_id)
    assert log.state.finish_reason is FinishReason.ERROR
    losses = one.losses(run_id)
    assert losses.count("engine_failed") == ENGINE_FAILURES_MAX - 1, "the last one ends the run"
    others = len(losses) - losses.count("engine_failed")
    assert ENGINE_FAILURES_MAX <= log.state.attempt <= ENGINE_FAILURES_MAX + others
    assert 5 * ENGINE_FAILURES_MAX <= log.state.n <= 5 * (ENGINE_FAILURES_MAX + others)
    assert log.state.text == script_text((1, 2, 3), log.state.n)


async def test_an_error_that_no_retry_cures_ends_the_run_at_once(
    runs: Runs, worker: StartWorker
) -> None:
    faults = '{"error_after_tokens": 5, "error_is_retryable": false, "attempts_max": 100}'
    one = worker(faults=faults)
    run_id = await runs.start(0)
    log = await runs.until_ended(run_id)
    assert log.state.finish_reason is FinishReason.ERROR
    losses = one.losses(run_id)
    assert "engine_failed" not in losses
    assert log.state.attempt <= 1 + len(losses)


async def test_an_answer_that_goes_in_circles_is_ended_also_by_the_worker_that_takes_it_over(
    runs: Runs, worker: StartWorker
) -> None:
    loop = '{"script": "loop", "error_after_tokens": 100}'
    one = worker(delay_ms=2, tokens=5_000, faults=loop)
    run_id = await runs.start(0)
    log = await runs.until_ended(run_id)
    assert log.state.finish_reason is FinishReason.REPETITION
    assert 2 <= log.state.attempt <= 1 + len(one.losses(run_id))
    assert LOOP_FROM + REPEATED_TOKENS_MIN <= log.state.n < 900, "ended soon, long before its grant"
    assert log.state.text == script_text((1, 2, 3), log.state.n, Script.LOOP)


async def test_a_worker_whose_engine_dies_ends_itself_and_another_goes_on_by_text_where_ids_are_not_exact(
    runs: Runs, worker: StartWorker
) -> None:
    unicode = (
        '{"die_after_tokens": 40, "attempts_max": 100, "script": "unicode", "exact_ids": false}'
    )
    first = worker(delay_ms=10, tokens=120, faults=unicode)
    run_id = await runs.start(0, (6, 6))
    await runs.until_said(run_id, 5)
    second = worker(delay_ms=10, tokens=120, faults='{"script": "unicode", "exact_ids": false}')
    assert first.ended() == 70
    log = await runs.until_ended(run_id)
    losses = [*first.losses(run_id), *second.losses(run_id)]
    assert 2 <= log.state.attempt <= 2 + len(losses)
    assert log.state.text == script_text((6, 6), 120, Script.UNICODE)
    assert any(s.event.ids is None for s in log.of(TokensGenerated))  # type: ignore[attr-defined]


async def test_a_worker_whose_engine_falls_silent_ends_itself(
    runs: Runs, worker: StartWorker
) -> None:
    mute = worker(faults='{"mute_after_tokens": 5, "stalled_after_s": 1.0, "attempts_max": 100}')
    run_id = await runs.start(0)
    assert mute.ended() == 70
    worker()
    log = await runs.until_ended(run_id)
    assert log.state.text == script_text((1, 2, 3), 64)


async def test_a_prompt_that_kills_every_engine_is_given_up_after_a_few(
    runs: Runs, worker: StartWorker
) -> None:
    run_id = await runs.start(0)
    deadly = '{"die_after_tokens": 0, "attempts_max": 100}'
    for _ in range(BARREN_WORKERS_MAX):
        # Not waited for until it serves: it dies as soon as it does.
        assert worker(faults=deadly, wait=False).ended() == 70
    survivor = worker(faults=deadly)
    log = await runs.until_ended(run_id)
    assert log.state.finish_reason is FinishReason.ERROR
    assert log.state.attempt - BARREN_WORKERS_MAX - 1 in range(1 + len(survivor.losses(run_id)))
    assert survivor.process.poll() is None


async def test_a_broker_killed_and_started_again_costs_no_run_its_answer(
    own_broker: RunningBroker, tmp_path: Path
) -> None:
    """A worker outlasts a broker that is away for up to 30 s; one that is away longer costs it its life, and it is started again."""
    started: list[WorkerProcess] = []

    def start_again() -> None:
        variables = {"TURNLOG_SCRIPTED_DELAY_MS": "20", "TURNLOG_SCRIPTED_TOKENS": "250"}
        started.append(WorkerProcess(tmp_path, bootstrap=own_broker.bootstrap, variables=variables))

    async with Runs(own_broker.bootstrap) as runs:
        try:
            start_again()
            started[0].wait_ready()
            run_ids = [await runs.start(place % 4, (place,)) for place in range(8)]
            for run_id in run_ids:
                await runs.until_said(run_id, 1)
            own_broker.stop(signal.SIGKILL)
            own_broker.launch()
            await wait_until_serving(own_broker.bootstrap, deadline_s=2 * PATIENCE_S)
            for place, run_id in enumerate(run_ids):
                while not (log := await runs.until_ended_or(run_id, started[-1].process)):
                    assert "no acknowledgement" in started[-1].log(), "the broker was away for long"
                    start_again()
                assert log.state.text == script_text((place,), 250)
        finally:
            for process in started:
                process.end()


async def test_a_worker_told_to_stop_while_it_still_waits_for_a_broker_stops(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        process = WorkerProcess(
            tmp_path, bootstrap=f"127.0.0.1:{silent.getsockname()[1]}", variables={}
        )
        silent.settimeout(PATIENCE_S)
        connection, _ = silent.accept()
        with connection:
            assert process.stop() == 0
    assert "worker_stopped_while_starting" in process.log(), "and did not give up by itself"


async def test_an_unknown_model_stops_the_worker_with_one_line(tmp_path: Path) -> None:
    process = WorkerProcess(
        tmp_path, bootstrap="127.0.0.1:1", variables={"TURNLOG_MODEL": "no-such-model"}
    )
    assert process.ended() == 2
    assert process.log().startswith("turnlog: TURNLOG_MODEL: unknown model 'no-such-model'")
