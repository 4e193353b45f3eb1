"""Steps 1 to 3 of a prompt's life: mint ids, append PromptSubmitted, and wait on the run's own stream for the decision.

Interest in the run is registered before the append, so the decision cannot be missed. Whether the append was acknowledged does not
matter: its fate may be unknown, and only the run's stream tells. Nothing is appended twice.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass, replace
from typing import Final

from edge.auth import Caller
from edge.catch_up import CatchUpFull, PastRun, RunUnknown
from edge.decisions.problems import DRAINING, Refused, unavailable, unprocessable
from edge.decisions.refusals import IDEMPOTENCY_CONFLICT, refusal_problem
from edge.decisions.requests import NewMessage
from edge.runs import LiveRun
from edge.state import EdgeState, random_id
from infra.log.span_reader import SpanFailed
from producers.log_writer import AppendFailed, RecordTooLarge
from schemas.events.accounts import PromptSubmitted
from schemas.events.tokens import RunCancelled
from schemas.ids import RunAddress, derived_event_id, mint_message_id, mint_run_id, run_address
from schemas.run_fold import Ending
from schemas.topics import ACCOUNTS, TOKENS
from schemas.vocabulary import CancelReason, Lane, lane_of

DECISION_WAIT_S_MAX: Final = 10.0
DRAIN_WAIT_S_MAX: Final = 0.5
"""How much longer a draining edge waits for decisions that are under way: with the give-up, less than the server's patience."""
REDIRECT_WAIT_S_MAX: Final = 2.0
GIVE_UP_WAIT_MS_MAX: Final = 1_000

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A checked message, about to be sent."""

    caller: Caller
    chat_id: str
    parent_id: str | None
    model: str | None
    message: NewMessage
    prompt_tokens: dict[str, int]
    idempotency_key: str | None
    fingerprint: str

    @property
    def lane(self) -> Lane:
        """Where its request will queue, if it is admitted."""
        return lane_of(self.caller.tier, self.message.service_tier)


async def submit(edge: EdgeState, submission: Submission) -> LiveRun | PastRun:
    """Append the prompt and wait for the decision: the admitted run, perhaps another one that the key was bound to.

    Raises Refused with admission's refusal, 503 `admission_timeout`, or 503 `draining` where this edge ends first.
    """
    edge.refuse_when_draining()  # Nothing is appended that nobody here would see decided.
    run = _mint(edge, submission)
    prompt = _prompt(edge, submission, run.run_id)
    edge.workers.sent(
        run.run_id,
        partition=run.address.partition,
        lane=submission.lane,
        models=_candidates(submission),
    )
    clock = asyncio.get_running_loop().time
    sent_at = clock()
    try:
        await edge.appends.hand_over(
            ACCOUNTS, prompt, event_id=derived_event_id(run.run_id, "PromptSubmitted")
        )
    except RecordTooLarge:
        raise unprocessable(
            "The message is too long.", param="content", code="content_length"
        ) from None
    except AppendFailed:
        log.warning("prompt not handed to the broker: %s", run.run_id)
    if not await _decision(edge, run, wait_s=DECISION_WAIT_S_MAX - (clock() - sent_at)):
        if submission.idempotency_key is None:
            await give_up(edge, run.run_id)
        if edge.streams.draining:
            raise Refused(replace(DRAINING, extra={"run_id": run.run_id}))
        raise unavailable(
            "The message was not decided on in time.",
            code="admission_timeout",
            extra={"run_id": run.run_id},
        )
    edge.metrics.admission_wait.observe(clock() - sent_at)
    edge.metrics.decided(
        run.transcript.state, submission.caller.tier, submission.message.service_tier
    )
    if run.transcript.state.queued is not None:
        edge.bounds.admitted(submission.caller.account_id, submission.caller.tier)
    return await _decided(edge, run)


def _mint(edge: EdgeState, submission: Submission) -> LiveRun:
    """The run's id, at the place where the fold of its partition stands; held from here on."""
    partition = edge.workers.place(
        submission.chat_id,
        partitions=edge.partitions,
        models=_candidates(submission),
        lane=submission.lane,
        shares=edge.accounts.shares,
        draws=(secrets.randbelow(1 << 30), secrets.randbelow(1 << 30)),
    )
    run_id = mint_run_id(
        key=edge.secrets.id_key,
        account_id=submission.caller.account_id,
        address=RunAddress(
            epoch=edge.runs.epoch,
            partition=partition,
            mint_offset=edge.runs.positions[partition],
        ),
        random=random_id(),
    )
    return edge.runs.expect(run_id)


def _candidates(submission: Submission) -> list[str]:
    """The models that admission may choose, the likeliest first."""
    return [submission.model] if submission.model else list(submission.prompt_tokens)[:1]


def _prompt(edge: EdgeState, submission: Submission, run_id: str) -> PromptSubmitted:
    caller, message = submission.caller, submission.message

    def message_id() -> str:
        return mint_message_id(
            key=edge.secrets.id_key, account_id=caller.account_id, random=random_id()
        )

    return PromptSubmitted(
        run_id=run_id,
        account_id=caller.account_id,
        tier=caller.tier,
        seat_id=caller.seat_id,
        chat_id=submission.chat_id,
        user_message_id=message_id(),
        assistant_message_id=message_id(),
        parent_id=submission.parent_id,
        parent_given=message.parent_id is not None,
        content=message.content,
        model=submission.model,
        max_output_tokens=message.max_output_tokens,
        sampling=message.sampling,
        stop=message.stop,
        on_busy=message.on_busy,
        service_tier=message.service_tier,
        idempotency_key=submission.idempotency_key,
        fingerprint=submission.fingerprint,
        prompt_tokens=submission.prompt_tokens,
        load=edge.workers.load(
            list(submission.prompt_tokens),
            run_address(run_id).partition,
            edge.accounts.shares,
            account_id=caller.account_id,
            lanes=[submission.lane],
        ),
        ended_runs=edge.runs.ended_runs(caller.account_id),
    )


async def _decision(edge: EdgeState, run: LiveRun, *, wait_s: float) -> bool:
    """Wait until the run is queued or has ended. False: not within `wait_s`."""
    clock = asyncio.get_running_loop().time
    until = clock() + wait_s
    while run.transcript.state.queued is None and not run.transcript.state.ended:
        if edge.streams.draining:
            until = min(until, clock() + DRAIN_WAIT_S_MAX)
        try:
            async with asyncio.timeout_at(until):
                await run.changed()
        except TimeoutError:
            return False
    return True


async def _decided(edge: EdgeState, run: LiveRun) -> LiveRun | PastRun:
    state = run.transcript.state
    match state.ending:
        case Ending.REFUSED:
            assert state.refusal is not None, "admission states it"
            raise Refused(refusal_problem(state.refusal))
        case Ending.REDIRECTED:
            if state.redirected_to is None:
                raise Refused(IDEMPOTENCY_CONFLICT)
            return await redirected(edge, state.redirected_to)
        case _:
            return run


async def redirected(edge: EdgeState, run_id: str) -> LiveRun | PastRun:
    """The run that the key was bound to. It was admitted, but perhaps this edge has not read so far in its partition."""
    if edge.runs.get(run_id) is None and edge.runs.knows(run_address(run_id)):
        run = edge.runs.expect(run_id)
        if await _decision(edge, run, wait_s=REDIRECT_WAIT_S_MAX):
            return run
    try:
        return await edge.catch_up.find(run_id)
    except (RunUnknown, CatchUpFull, SpanFailed):
        raise unavailable(
            "The run of this Idempotency-Key cannot be read now.", code="run_unavailable"
        ) from None


async def give_up(edge: EdgeState, run_id: str) -> None:
    """Nobody will come back for this run: it must not go on and be billed."""
    try:
        await edge.appends.append(
            TOKENS,
            RunCancelled(run_id=run_id, reason=CancelReason.GAVE_UP),
            event_id=derived_event_id(run_id, "RunCancelled gave_up"),
            wait_ms_max=GIVE_UP_WAIT_MS_MAX,
        )
    except AppendFailed:
        log.warning("could not append the cancel of %s", run_id)
