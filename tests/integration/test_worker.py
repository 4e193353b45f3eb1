"""Real worker processes on a real broker with the scripted engine: whatever happens to a worker, a run is answered once and whole."""

from __future__ import annotations

import math
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
    SESSION_S,
    Runs,
    WorkerProcess,
    script_text,
    settled,
)

StartWorker = Callable[..., WorkerProcess]
TAKEOVER_S_MAX = SESSION_S + 2
TRIES_MAX = 3
# A worker waits 30 s for an acknowledgement.
AWAY_S_BORNE = 25


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
        *, delay_ms: float = 0, tokens: int = 64, slots: int = 8, faults: str = ""
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
        process.wait_ready()
        return process

    yield start
    for process in started:
        process.end()


async def test_a_request_becomes_one_attempt_dense_deltas_and_one_end(
    runs: Runs, worker: StartWorker
) -> None:
    worker(tokens=40)
    run_id = await runs.start(prompt_ids=(5, 6, 7, 8))
    log = await runs.until_ended(run_id)
    assert log.state.finish_reason is FinishReason.STOP
    assert log.state.text == script_text((5, 6, 7, 8), 40)
    assert (log.state.n, log.state.attempt, log.state.input_tokens) == (40, 1, 4)
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
    worker(tokens=30, slots=3)
    for place, run_id in enumerate(run_ids):
        log = await runs.until_ended(run_id)
        assert log.state.text == script_text((place,), 30)
        assert log.state.attempt == 1


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
    worker(delay_ms=100, tokens=1_000, slots=1)  # A hundred seconds, if nobody ended it.
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


async def test_a_takeover_that_finds_the_grant_used_up_only_ends_the_run(
    runs: Runs, worker: StartWorker
) -> None:
    run_id = await runs.mint(0)
    await runs.queue(run_id, grant=20)
    await runs.request(run_id, grant=20)
    await runs.pretend(run_id, attempt=1, said=20)
    worker()
    log = await runs.until_ended(run_id)
    assert (log.state.finish_reason, log.state.n) == (FinishReason.LENGTH, 20)
    assert log.state.attempt == 2


async def test_a_run_older_than_the_tail_is_read_back_and_continued_or_left_alone(
    runs: Runs, worker: StartWorker
) -> None:
    begun, over = await runs.mint(0), await runs.mint(0)
    for run_id in (begun, over):
        await runs.queue(run_id)
        await runs.pretend(run_id, attempt=1, said=7)
    await runs.cancel(over)
    worker(tokens=30)  # Finds no request, so its tail begins behind all this.
    await runs.request(over)
    await runs.request(begun)
    log = await runs.until_ended(begun)
    assert (log.state.text, log.state.attempt) == (script_text((1, 2, 3), 30), 2)
    assert (await runs.read(over)).state.attempt == 1


async def test_everything_done_is_committed_and_a_new_worker_does_none_of_it_again(
    runs: Runs, worker: StartWorker
) -> None:
    first = worker()
    run_ids = [await runs.start(place % 4, (place, 3)) for place in range(8)]
    ends = [(await runs.until_ended(run_id)).seen[-1].offset for run_id in run_ids]
    assert first.stop() == 0
    assert await runs.uncommitted() == 0
    worker()
    for place, run_id in enumerate(run_ids):
        await runs.request(run_id, (place, 3))  # A replay of context, after the end.
    await runs.until_ended(await runs.start(0))

    async def committed() -> bool:
        return await runs.uncommitted() == 0

    await eventually_async(committed, what="the replayed requests are done")
    for run_id, end in zip(run_ids, ends, strict=True):
        assert (await runs.read(run_id)).seen[-1].offset == end


async def test_a_worker_killed_in_mid_answer_is_replaced_and_the_client_sees_one_answer(
    runs: Runs, worker: StartWorker
) -> None:
    """And soon: the quickest of some tries counts, since what another takes more may be the machine's."""
    workers = [worker(delay_ms=30, tokens=150)]
    took_s: list[float] = []
    while len(took_s) < TRIES_MAX and min(took_s, default=math.inf) > TAKEOVER_S_MAX:
        workers.append(worker(delay_ms=30, tokens=150))
        await settled(workers)
        run_id = await runs.start(0, (7, 7))
        victim = await speaking(runs, run_id, workers)
        killed = time.monotonic()
        victim.send(signal.SIGKILL)
        workers.remove(victim)
        said = (await runs.read(run_id)).state.n
        await runs.until_said(run_id, said + 1, attempt=2)
        took_s.append(time.monotonic() - killed)
        log = await runs.until_ended(run_id)
        assert log.state.attempt == 2
        assert log.state.text == script_text((7, 7), 150)
    assert min(took_s) <= TAKEOVER_S_MAX, f"takeovers took {took_s} s"


async def speaking(runs: Runs, run_id: str, workers: list[WorkerProcess]) -> WorkerProcess:
    """Who answers, once it has said something."""
    log = await runs.until_said(run_id, 10)
    name = runs.writer_of(log, 1).rpartition("-")[0]
    return next(w for w in workers if w.name == name)


async def test_a_worker_paused_past_its_session_leaves_nothing_visible_when_it_wakes(
    runs: Runs, worker: StartWorker
) -> None:
    workers = [worker(delay_ms=30, tokens=200), worker(delay_ms=30, tokens=200)]
    await settled(workers)
    run_id = await runs.start(1, (8, 8))
    zombie = await speaking(runs, run_id, workers)
    zombie.send(signal.SIGSTOP)
    await runs.until_said(run_id, 1, attempt=2)
    zombie.send(signal.SIGCONT)
    log = await runs.until_ended(run_id)
    assert log.state.text == script_text((8, 8), 200)
    assert zombie.process.poll() is None
    # It comes back into the group and works.
    await settled(workers)
    again = [await runs.start(partition, (9,)) for partition in range(4)]
    for run in again:
        assert (await runs.until_ended(run)).state.text == script_text((9,), 200)


async def test_a_worker_told_to_stop_leaves_its_runs_to_others_and_exits_soon(
    runs: Runs, worker: StartWorker
) -> None:
    first = worker(delay_ms=100, tokens=1_000)
    run_id = await runs.start(0, (3, 1))
    await runs.until_said(run_id, 3)
    second = worker(delay_ms=100, tokens=1_000)
    await settled([first, second])
    assert first.stop() == 0
    log = await runs.read(run_id)
    assert not log.state.ended, "it did not stay for the hundred seconds of its answer"
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
        eventually(passing.owned_partitions, what="it takes part")
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
        session_ms=3_000,
        on_revoked=lambda: None,
        on_assigned=assigned.append,
    )
    async with member:
        queue = Queue(lane=Lane.BACKGROUND, partition=3)
        assert queue in assigned[-1]
        assert await member.commit({queue: 0})
        await member.on_partitions_revoked(set())
        assert not await member.commit({queue: 0})
        await member.on_partitions_assigned(set())
        assert await member.commit({queue: 0})


async def test_a_poison_request_is_parked_and_the_queue_goes_on(
    runs: Runs, worker: StartWorker
) -> None:
    before = await runs.parked(Lane.PLUS, 3)
    await runs.poison(Lane.PLUS, 3)
    worker()
    run_id = await runs.mint(3)
    await runs.queue(run_id, lane=Lane.PLUS)
    await runs.request(run_id, lane=Lane.PLUS)
    await runs.until_ended(run_id)

    async def parked() -> bool:
        return await runs.parked(Lane.PLUS, 3) == before + 1

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
    worker(tokens=60, faults='{"error_after_tokens": 20}')
    run_id = await runs.start(0, (2, 2))
    log = await runs.until_ended(run_id)
    assert log.state.attempt == 2
    assert log.state.text == script_text((2, 2), 60)


async def test_an_engine_that_keeps_failing_is_asked_a_few_times_and_the_run_ends_with_an_error(
    runs: Runs, worker: StartWorker
) -> None:
    worker(tokens=60, faults='{"error_after_tokens": 5, "attempts_max": 100}')
    run_id = await runs.start(0)
    log = await runs.until_ended(run_id)
    assert log.state.finish_reason is FinishReason.ERROR
    assert log.state.attempt == ENGINE_FAILURES_MAX
    assert log.state.text == script_text((1, 2, 3), 5 * ENGINE_FAILURES_MAX)


async def test_an_error_that_no_retry_cures_ends_the_run_at_once(
    runs: Runs, worker: StartWorker
) -> None:
    worker(faults='{"error_after_tokens": 5, "error_is_retryable": false}')
    log = await runs.until_ended(await runs.start(0))
    assert (log.state.finish_reason, log.state.attempt) == (FinishReason.ERROR, 1)


async def test_an_answer_that_goes_in_circles_is_ended_also_by_the_worker_that_takes_it_over(
    runs: Runs, worker: StartWorker
) -> None:
    loop = '{"script": "loop", "error_after_tokens": 100}'
    worker(delay_ms=2, tokens=5_000, faults=loop)
    log = await runs.until_ended(await runs.start(0))
    assert (log.state.finish_reason, log.state.attempt) == (FinishReason.REPETITION, 2)
    assert LOOP_FROM + REPEATED_TOKENS_MIN <= log.state.n < 900, "ended soon, long before its grant"
    assert log.state.text == script_text((1, 2, 3), log.state.n, Script.LOOP)


async def test_a_worker_whose_engine_dies_ends_itself_and_another_goes_on_by_text_where_ids_are_not_exact(
    runs: Runs, worker: StartWorker
) -> None:
    unicode = '{"die_after_tokens": 40, "script": "unicode", "exact_ids": false}'
    first = worker(delay_ms=10, tokens=120, faults=unicode)
    run_id = await runs.start(0, (6, 6))
    await runs.until_said(run_id, 5)
    worker(delay_ms=10, tokens=120, faults='{"script": "unicode", "exact_ids": false}')
    assert first.ended() == 70
    log = await runs.until_ended(run_id)
    assert log.state.attempt == 2
    assert log.state.text == script_text((6, 6), 120, Script.UNICODE)
    assert any(s.event.ids is None for s in log.of(TokensGenerated))  # type: ignore[attr-defined]


async def test_a_worker_whose_engine_falls_silent_ends_itself(
    runs: Runs, worker: StartWorker
) -> None:
    mute = worker(faults='{"mute_after_tokens": 5, "stalled_after_s": 1.0}')
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
        assert worker(faults=deadly).ended() == 70
    survivor = worker(faults=deadly)
    log = await runs.until_ended(run_id)
    assert log.state.finish_reason is FinishReason.ERROR
    assert log.state.attempt == BARREN_WORKERS_MAX + 1
    assert survivor.process.poll() is None


async def test_a_broker_killed_and_started_again_costs_no_run_its_answer(
    own_broker: RunningBroker, tmp_path: Path
) -> None:
    """A worker outlasts a broker that is away for up to 30 s; one that is away longer costs it its life, and it is started again."""
    started: list[WorkerProcess] = []

    def start_again() -> WorkerProcess:
        variables = {"TURNLOG_SCRIPTED_DELAY_MS": "20", "TURNLOG_SCRIPTED_TOKENS": "250"}
        started.append(WorkerProcess(tmp_path, bootstrap=own_broker.bootstrap, variables=variables))
        return started[-1]

    async with Runs(own_broker.bootstrap) as runs:
        try:
            start_again().wait_ready()
            run_ids = [await runs.start(place % 4, (place,)) for place in range(8)]
            for run_id in run_ids:
                await runs.until_said(run_id, 1)
            killed = time.monotonic()
            own_broker.stop(signal.SIGKILL)
            own_broker.launch()
            await wait_until_serving(own_broker.bootstrap, deadline_s=2 * PATIENCE_S)
            if time.monotonic() - killed > AWAY_S_BORNE:
                start_again()  # The first one has given up, or may do so any moment.
            for place, run_id in enumerate(run_ids):
                log = await runs.until_ended(run_id)
                assert log.state.text == script_text((place,), 250)
            assert started[-1].process.poll() is None
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
            asked = time.monotonic()
            assert process.stop() == 0
    # Far from the 30 s after which it would give up by itself.
    assert time.monotonic() - asked < 20


async def test_an_unknown_model_stops_the_worker_with_one_line(tmp_path: Path) -> None:
    process = WorkerProcess(
        tmp_path, bootstrap="127.0.0.1:1", variables={"TURNLOG_MODEL": "no-such-model"}
    )
    assert process.ended() == 2
    assert process.log().startswith("turnlog: TURNLOG_MODEL: unknown model 'no-such-model'")
