"""Answers that come to hold a blocked phrase, over every engine: nothing of the phrase is appended, and the run ends `blocked`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from inference_workers.attempt import Attempt
from inference_workers.decisions.request_book import Queue, Request
from inference_workers.decisions.run_book import NEW, Followed, FollowedRun, follow
from inference_workers.engine import Engine, GenRequest
from producers.log_writer import Appended, LogWriter
from schemas.blocked_phrases import blocked_phrases
from schemas.events import Event
from schemas.events.generations import GenerationRequested
from schemas.events.tokens import AttemptStarted, RunEnded, RunEvent, TokensGenerated
from schemas.topics import TOKENS, Topic
from schemas.vocabulary import EndCause, FinishReason, Lane, RunStatus, Tier
from tests.contracts.engines_under_test import KINDS, PATIENCE_S, Kind, ask, read, running, text_of
from tests.contracts.test_attempt import QUEUED, RUN_ID

TOKENS_ASKED = 40


class Echo(LogWriter):
    """A log that gives every record back at once."""

    def __init__(self, run: FollowedRun) -> None:
        super().__init__(bootstrap="127.0.0.1:1", client_id="test")
        self.run = run
        self.attempt: Attempt | None = None
        self.accepted: list[RunEvent] = []

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
        assert topic is TOKENS
        assert isinstance(event, AttemptStarted | TokensGenerated | RunEnded)
        assert self.attempt is not None
        self.run, counted = follow(self.run, event)
        assert counted, event
        self.accepted.append(event)
        self.attempt.seen(Followed(event=event, run=self.run, accepted=True))
        future: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        future.set_result(Appended(partition=0, offset=len(self.accepted), appended_ms=0))
        return future


@pytest.fixture(params=KINDS)
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    kind: Kind = request.param
    async with running(kind) as engine:
        yield engine


async def make(engine: Engine, asked: GenRequest, log: Echo) -> None:
    """One attempt, to its end."""
    event = GenerationRequested(
        run_id=RUN_ID,
        account_id="a",
        chat_id="c",
        tier=Tier.PLUS,
        lane=Lane.PLUS,
        model="m",
        prompt_ids=asked.prompt_ids,
        sampling=asked.sampling,
        stop=(),
        granted_output_tokens=TOKENS_ASKED,
        cache_scope="s",
        deadline_ms=1_000,
    )
    attempt = log.attempt = Attempt(
        request=Request(
            queue=Queue(lane=Lane.PLUS, partition=0), offset=0, event_id="e", trace="", event=event
        ),
        run=log.run,
        nonce=f"n{log.run.state.attempt}",
        worker_id="w",
        engine=engine,
        log=log,
        now_ms=lambda: int(asyncio.get_running_loop().time() * 1_000),
        engine_failures=0,
        on_defect=lambda error: None,
    )
    async with asyncio.timeout(PATIENCE_S):
        await attempt.run()
        await attempt.slot_freed()


def queued(*phrases: str) -> FollowedRun:
    run, _ = follow(
        NEW,
        msgspec.structs.replace(
            QUEUED,
            input_budget_tokens=1_000,
            granted_output_tokens=TOKENS_ASKED,
            blocked_phrases=phrases,
        ),
    )
    return run


async def two_words(engine: Engine, asked: GenRequest) -> tuple[str, str]:
    """What the engine says, and two words in the middle of it, as an operator would write them."""
    answer = text_of((await read(engine.submit(asked)))[0])
    words = answer.split()
    middle = len(words) // 2
    return answer, " ".join(words[middle : middle + 2]).strip(".,:;!?*").upper()


async def test_the_answer_ends_before_the_phrase(engine: Engine) -> None:
    asked = ask("whole", tokens=TOKENS_ASKED)
    answer, phrase = await two_words(engine, asked)
    log = Echo(queued(phrase, "never said by it"))
    await make(engine, asked, log)
    state = log.run.state
    assert (state.status, state.finish_reason) == (RunStatus.BLOCKED, FinishReason.BLOCKED)
    assert answer.startswith(state.text)
    sought = blocked_phrases((phrase,))
    assert not sought.in_text(state.text)
    assert sought.in_text(answer[len(state.text) :]), "all of the phrase was held"
    last = log.accepted[-1]
    assert isinstance(last, RunEnded)
    assert (last.cause, last.end) == (EndCause.BLOCKED, state.n)


async def test_a_phrase_that_is_not_said_changes_nothing(engine: Engine) -> None:
    asked = ask("whole", tokens=TOKENS_ASKED)
    answer, _ = await two_words(engine, asked)
    first = answer.split()[0]
    log = Echo(queued(f"{first} and something else"))
    await make(engine, asked, log)
    assert log.run.state.text == answer
    assert log.run.state.status is RunStatus.DONE


async def test_a_takeover_in_the_middle_of_a_phrase_ends_the_answer_there_too(
    engine: Engine,
) -> None:
    asked = ask("whole", tokens=TOKENS_ASKED)
    _, phrase = await two_words(engine, asked)
    once = Echo(queued(phrase))
    await make(engine, asked, once)
    before = once.accepted[:-1]
    log = Echo(queued(phrase))
    for (
        event
    ) in before:  # The first worker dies before its terminal, with the rest of the phrase held.
        log.run, _ = follow(log.run, event)
    await make(engine, asked, log)
    assert log.run.state.attempt == 2
    assert log.run.state.status is RunStatus.BLOCKED
    assert not blocked_phrases((phrase,)).in_text(log.run.state.text)
    assert log.run.state.text.startswith(once.run.state.text)
