"""An attempt over a scripted engine, where the log takes its time: whatever comes by on the tail meanwhile, the worker lives."""

from __future__ import annotations

import asyncio

from inference_workers.attempt import Attempt
from inference_workers.decisions.generation import Phase
from inference_workers.decisions.request_book import Queue, Request
from inference_workers.decisions.run_book import NEW, Followed, FollowedRun, follow
from inference_workers.engine_scripted import ScriptedEngine, ScriptedFaults, ScriptedSettings
from producers.log_writer import Appended, LogWriter
from schemas.events import Event
from schemas.events.accounts import Sampling
from schemas.events.generations import GenerationRequested
from schemas.events.tokens import AttemptStarted, RunCancelled
from schemas.ids import RANDOM_BYTES, RunAddress, mint_run_id
from schemas.topics import Topic
from schemas.vocabulary import CancelReason, Lane, Tier
from tests.run_samples import queued

WINDOW = 100
RUN_ID = mint_run_id(
    key=b"k",
    account_id="a",
    address=RunAddress(epoch=1, partition=0, mint_offset=0),
    random=bytes(RANDOM_BYTES),
)
QUEUED = queued(RUN_ID, input_budget_tokens=WINDOW, granted_output_tokens=5)


class SlowLog(LogWriter):
    """A producer whose buffer is full until `room` is set."""

    def __init__(self) -> None:
        super().__init__(bootstrap="127.0.0.1:1", client_id="test")
        self.room = asyncio.Event()
        self.asked = asyncio.Event()
        self.sent: list[Event] = []
        self.appending: asyncio.Queue[asyncio.Future[Appended]] = asyncio.Queue()
        """Of each record that was sent; the test resolves it."""

    async def send(
        self,
        topic: Topic,
        event: Event,
        *,
        event_id: str,
        cause_id: str = "",
        trace: str = "",
        partition: int | None = None,
        key: str | None = None,
    ) -> asyncio.Future[Appended]:
        self.asked.set()
        await self.room.wait()
        self.sent.append(event)
        appending: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        self.appending.put_nowait(appending)
        return appending


def _request(prompt_tokens: int) -> Request:
    event = GenerationRequested(
        run_id=RUN_ID,
        account_id="a",
        chat_id="c",
        tier=Tier.PLUS,
        lane=Lane.PLUS,
        model="m",
        prompt_ids=tuple(range(prompt_tokens)),
        sampling=Sampling(),
        stop=(),
        granted_output_tokens=5,
        cache_scope="s",
        deadline_ms=1_000,
    )
    queue = Queue(lane=Lane.PLUS, partition=0)
    return Request(queue=queue, offset=0, event_id="e", trace="", event=event)


def _attempt(request: Request, run: FollowedRun, engine: ScriptedEngine, log: SlowLog) -> Attempt:
    return Attempt(
        request=request,
        run=run,
        nonce="n",
        worker_id="w",
        engine=engine,
        log=log,
        now_ms=lambda: 0,
        engine_failures=0,
        on_defect=lambda error: None,
    )


async def test_a_cancel_that_comes_while_a_prompt_too_long_is_being_ended_is_the_end() -> None:
    log = SlowLog()
    run, _ = follow(NEW, QUEUED)
    settings = ScriptedSettings(model="m", slots=1, context_window=WINDOW, tokens_per_answer=5)
    async with ScriptedEngine(settings) as engine, asyncio.timeout(30):
        attempt = _attempt(_request(WINDOW + 1), run, engine, log)
        making = asyncio.create_task(attempt.run())
        await log.asked.wait()  # Its AttemptStarted waits for room; its terminal is to follow.
        cancel = RunCancelled(run_id=RUN_ID, reason=CancelReason.USER)
        after, accepted = follow(run, cancel)
        attempt.seen(Followed(event=cancel, run=after, accepted=accepted))
        log.room.set()
        await making
    assert attempt.generation.phase is Phase.OVER
    assert len(log.sent) == 1, "the terminal was not sent"


async def test_an_attempt_that_kills_its_engine_is_on_its_way_to_the_log_until_it_is_acknowledged() -> (
    None
):
    """G7: it is to be counted, so the process waits for this before it ends."""
    log = SlowLog()
    run, _ = follow(NEW, QUEUED)
    settings = ScriptedSettings(
        model="m", slots=1, context_window=WINDOW, faults=ScriptedFaults(die_after_tokens=0)
    )
    async with ScriptedEngine(settings) as engine, asyncio.timeout(30):
        attempt = _attempt(_request(3), run, engine, log)
        making = asyncio.create_task(attempt.run())
        await engine.wait_failed()
        await log.asked.wait()
        assert attempt.unacknowledged, "it waits for room"
        log.room.set()
        appending = await log.appending.get()
        assert attempt.unacknowledged, "it is sent"
        appending.set_result(Appended(partition=0, offset=1, appended_ms=1))
        told = asyncio.Event()
        appending.add_done_callback(lambda _: told.set())  # Called after the attempt's own.
        await told.wait()
        acknowledged_in_time = not attempt.unacknowledged
        making.cancel()
        await asyncio.wait([making])
    assert acknowledged_in_time
    assert [type(event) for event in log.sent] == [AttemptStarted]
