"""One full sample of every event: the source of the golden bytes, and of anything else that wants a realistic event."""

from __future__ import annotations

from typing import Final

from schemas.events import Event
from schemas.events.account_snapshots import (
    AccountSnapshot,
    IdempotencyKeyBound,
    LadderKept,
    LadderMoved,
    LimitsKept,
    LimitsVersion,
    OpenReservation,
    RateBucket,
    RunKnown,
    SeatUse,
    WindowUse,
)
from schemas.events.accounts import (
    ContentPolicy,
    Ladder,
    LadderLevel,
    LaneLimits,
    LaneWait,
    LimitsChanged,
    LoadView,
    ModelPolicy,
    PromptSubmitted,
    Sampling,
    TierLimits,
    UsageMeasured,
)
from schemas.events.admissions import PromptAdmitted, PromptRefused
from schemas.events.chats import ChatCreated, ChatDeleted, ChatRenamed, LeafChosen
from schemas.events.generations import GenerationRequested
from schemas.events.outcomes import RunConcluded
from schemas.events.quotas import QuotaReleased, QuotaReserved
from schemas.events.tokens import (
    AttemptStarted,
    PartitionTick,
    Refusal,
    RunCancelled,
    RunEnded,
    RunQueued,
    RunRedirected,
    TokensGenerated,
)
from schemas.events.usage import UsageSettled
from schemas.events.workers import AccountLoad, LaneLoad, WorkerLoadReported
from schemas.ids import RunAddress, mint_chat_id, mint_message_id, mint_run_id
from schemas.topics import (
    ACCOUNT_SNAPSHOTS,
    ACCOUNTS,
    ADMISSIONS,
    CHATS,
    OUTCOMES,
    QUOTAS,
    TOKENS,
    USAGE,
    WORKERS,
    Topic,
    generations,
)
from schemas.vocabulary import (
    CancelReason,
    EndCause,
    EndWriter,
    FinishReason,
    Lane,
    OnBusy,
    RefusalReason,
    ServiceTier,
    Tier,
)

KEY: Final = bytes(range(32))
ACCOUNT: Final = "acme"
RUN: Final = mint_run_id(
    key=KEY,
    account_id=ACCOUNT,
    address=RunAddress(epoch=7, partition=3, mint_offset=123_456),
    random=bytes(range(10)),
)
CHAT: Final = mint_chat_id(key=KEY, account_id=ACCOUNT, random=bytes(range(10, 20)))
ASKED: Final = mint_message_id(key=KEY, account_id=ACCOUNT, random=bytes(range(20, 30)))
ANSWER: Final = mint_message_id(key=KEY, account_id=ACCOUNT, random=bytes(range(30, 40)))
# What tends to break framing and encodings: quotes, line ends, NUL, line separators, bidi marks, an emoji, combining marks.
HARD_TEXT: Final = 'a"\\\r\n\x00\u2028\u2029\u202e👩🏽\u200d🚀e\u0301'
MODEL: Final = "smollm2-135m"

_LIMITS: Final = LimitsChanged(
    order=17,
    version="00ff",
    tiers={
        Tier.FREE: TierLimits(
            tokens_per_window=50_000,
            window="day",
            open_runs_max=1,
            models=(MODEL,),
            input_tokens_max=3_072,
            output_tokens_max=1_024,
            run_deadline_ms=300_000,
            queue_wait_ms_max=60_000,
            requests_per_minute=20,
            requests_burst=5,
            tokens_per_minute=10_000,
            tokens_burst=20_000,
            seats_max=10,
            seat_open_runs_max=2,
            seat_tokens_per_window=5_000,
        )
    },
    changed_by="operator",
    lanes={
        Lane.FREE: LaneLimits(
            weight=2,
            floor_percent=10,
            queued_requests_max=100,
            queued_tokens_max=50_000,
            look_ahead_requests=32,
        )
    },
    models={
        "larger": ModelPolicy(context_tokens=8_192, cost_percent=300, smaller=MODEL),
        MODEL: ModelPolicy(context_tokens=4_096),
    },
    ladder=Ladder(
        hold_ms=5_000,
        levels=(
            LadderLevel(enter_ms=2_000, leave_ms=1_000, output_percent_free=50),
            LadderLevel(
                enter_ms=10_000,
                leave_ms=5_000,
                output_percent_free=25,
                output_percent_paid=50,
                downgrade_free=True,
                downgrade_paid=True,
                optional_work=False,
                shed_free=True,
                shed_paid=True,
            ),
        ),
    ),
    content=ContentPolicy(blocked_phrases=("bad word", HARD_TEXT)),
)

SAMPLES: Final[tuple[tuple[Topic, Event], ...]] = (
    (
        CHATS,
        ChatCreated(
            chat_id=CHAT, account_id=ACCOUNT, title="Rockets", system_prompt=HARD_TEXT, model=MODEL
        ),
    ),
    (CHATS, ChatRenamed(chat_id=CHAT, account_id=ACCOUNT, title="Ships")),
    (CHATS, ChatDeleted(chat_id=CHAT, account_id=ACCOUNT)),
    (CHATS, LeafChosen(chat_id=CHAT, account_id=ACCOUNT, message_id=ANSWER)),
    (
        ACCOUNTS,
        PromptSubmitted(
            run_id=RUN,
            account_id=ACCOUNT,
            tier=Tier.PLUS,
            seat_id="seat-1",
            chat_id=CHAT,
            user_message_id=ASKED,
            assistant_message_id=ANSWER,
            parent_id=None,
            parent_given=True,
            content=HARD_TEXT,
            model=MODEL,
            max_output_tokens=64,
            sampling=Sampling(temperature=0.5, top_p=0.9, seed=1),
            stop=("END",),
            on_busy=OnBusy.REJECT,
            service_tier=ServiceTier.FLEX,
            idempotency_key="key-1",
            fingerprint="f00d",
            prompt_tokens={MODEL: 12},
            load=LoadView(
                pressure=1,
                waits=(
                    LaneWait(
                        model=MODEL, lane="plus", wait_ms=40, queued_requests=2, queued_tokens=600
                    ),
                ),
                saturation_ms=2_500,
            ),
            ended_runs=(RUN,),
        ),
    ),
    (
        ACCOUNTS,
        UsageMeasured(
            run_id=RUN,
            account_id=ACCOUNT,
            input_tokens=12,
            output_tokens=34,
            finish_reason=FinishReason.STOP,
        ),
    ),
    (ACCOUNTS, _LIMITS),
    (
        ACCOUNT_SNAPSHOTS,
        AccountSnapshot(
            account_id=ACCOUNT,
            applied_offset=99,
            windows=(WindowUse(window="month:2026-11", settled=46, reserved=100),),
            open=(
                OpenReservation(
                    run_id=RUN,
                    chat_id=CHAT,
                    window="month:2026-11",
                    model=MODEL,
                    tier="plus",
                    input_tokens=36,
                    output_tokens=64,
                    ended=True,
                    assistant_message_id=ANSWER,
                    after_run_id=RUN,
                    queued_ms=1_790_000_000_000,
                    deadline_ms=600_000,
                    seat="seat-1",
                    seat_counted=True,
                ),
            ),
            requests=RateBucket(level=300_000, at_ms=1_790_000_000_000),
            tokens=RateBucket(level=-60_000, at_ms=1_790_000_000_000),
            seats_window="month:2026-11",
            seats=(SeatUse(seat="seat-1", settled=46, reserved=100),),
        ),
    ),
    (
        ACCOUNT_SNAPSHOTS,
        RunKnown(account_id=ACCOUNT, run_id=RUN, source_offset=98, appended_ms=1_790_000_000_000),
    ),
    (
        ACCOUNT_SNAPSHOTS,
        IdempotencyKeyBound(
            account_id=ACCOUNT,
            idempotency_key="key-1",
            run_id=RUN,
            fingerprint="f00d",
            source_offset=98,
            appended_ms=1_790_000_000_000,
        ),
    ),
    (
        ACCOUNT_SNAPSHOTS,
        LimitsKept(source_offset=1, versions=(LimitsVersion(source_offset=1, limits=_LIMITS),)),
    ),
    (
        ACCOUNT_SNAPSHOTS,
        LadderKept(
            source_offset=97,
            moves=(LadderMoved(source_offset=97, level=2, moved_ms=1_790_000_000_000),),
        ),
    ),
    (
        ADMISSIONS,
        PromptAdmitted(
            run_id=RUN,
            account_id=ACCOUNT,
            chat_id=CHAT,
            tier=Tier.PLUS,
            lane=Lane.PLUS,
            model=MODEL,
            user_message_id=ASKED,
            assistant_message_id=ANSWER,
            parent_id=None,
            content=HARD_TEXT,
            input_budget_tokens=36,
            granted_output_tokens=64,
            sampling=Sampling(temperature=0.0),
            stop=("END",),
            deadline_ms=600_000,
            quota_limited=True,
            after_run_id=RUN,
            after_message_id=ANSWER,
            behind_message_ids=(ANSWER,),
            ladder_level=2,
            downgraded_from="larger",
            output_percent=50,
            optional_work=False,
        ),
    ),
    (
        ADMISSIONS,
        PromptRefused(
            run_id=RUN,
            account_id=ACCOUNT,
            chat_id=CHAT,
            user_message_id=ASKED,
            assistant_message_id=ANSWER,
            reason=RefusalReason.QUOTA_EXHAUSTED,
            limit="tokens_per_window",
            ladder_level=1,
        ),
    ),
    (
        QUOTAS,
        QuotaReserved(
            run_id=RUN,
            account_id=ACCOUNT,
            window="month:2026-11",
            input_tokens=36,
            output_tokens=64,
            seat_id="seat-1",
            ladder_level=2,
            downgraded_from="larger",
        ),
    ),
    (QUOTAS, QuotaReleased(run_id=RUN, account_id=ACCOUNT, window="month:2026-11", tokens=54)),
    (
        USAGE,
        UsageSettled(
            run_id=RUN,
            account_id=ACCOUNT,
            chat_id=CHAT,
            tier=Tier.PLUS,
            model=MODEL,
            window="month:2026-11",
            input_tokens=12,
            output_tokens=34,
            finish_reason=FinishReason.STOP,
        ),
    ),
    (
        generations(MODEL, Lane.PLUS),
        GenerationRequested(
            run_id=RUN,
            account_id=ACCOUNT,
            chat_id=CHAT,
            tier=Tier.PLUS,
            lane=Lane.PLUS,
            model=MODEL,
            prompt_ids=(1, 9690, 198),
            sampling=Sampling(seed=3),
            stop=("END",),
            granted_output_tokens=64,
            cache_scope="c0ffee",
            deadline_ms=600_000,
        ),
    ),
    (
        TOKENS,
        RunQueued(
            run_id=RUN,
            account_id=ACCOUNT,
            chat_id=CHAT,
            user_message_id=ASKED,
            assistant_message_id=ANSWER,
            parent_id=None,
            tier=Tier.PLUS,
            lane=Lane.PLUS,
            model=MODEL,
            input_budget_tokens=36,
            granted_output_tokens=64,
            deadline_ms=600_000,
            wait_ms=40,
            after_run_id=RUN,
            ladder_level=2,
            downgraded_from="larger",
            output_percent=50,
            blocked_phrases=("bad word",),
        ),
    ),
    (TOKENS, RunRedirected(run_id=RUN, account_id=ACCOUNT, to_run_id=None)),
    (
        TOKENS,
        AttemptStarted(run_id=RUN, attempt=1, nonce="n-1", worker_id="worker-1", input_tokens=12),
    ),
    (
        TOKENS,
        TokensGenerated(run_id=RUN, nonce="n-1", index=0, count=2, text=HARD_TEXT, ids=(5, 6)),
    ),
    (TOKENS, RunCancelled(run_id=RUN, reason=CancelReason.USER)),
    (
        TOKENS,
        RunEnded(
            run_id=RUN,
            cause=EndCause.REFUSED,
            writer=EndWriter.ADMISSION,
            refusal=Refusal(
                reason=RefusalReason.QUOTA_EXHAUSTED,
                retry_after_ms=1_000,
                wait_ms=2_000,
                window_ends_ms=1_790_000_000_000,
                detail="the month is used up",
                limit="tokens_per_window",
                ladder_level=1,
            ),
        ),
    ),
    (TOKENS, PartitionTick()),
    (
        OUTCOMES,
        RunConcluded(
            run_id=RUN,
            account_id=ACCOUNT,
            chat_id=CHAT,
            user_message_id=ASKED,
            assistant_message_id=ANSWER,
            tier=Tier.PLUS,
            model=MODEL,
            text=HARD_TEXT,
            input_tokens=12,
            output_tokens=34,
            finish_reason=FinishReason.STOP,
            attempts=2,
            end_offset=130_000,
        ),
    ),
    (
        WORKERS,
        WorkerLoadReported(
            worker_id="worker-1",
            model=MODEL,
            epoch=1,
            slots=4,
            busy=2,
            queued_requests=1,
            queued_tokens=64,
            prefill_tokens_per_s=500.0,
            decode_tokens_per_s=80.5,
            partitions=(0, 1, 2),
            lanes=(
                LaneLoad(
                    lane=Lane.PLUS,
                    queued_requests=1,
                    queued_tokens=64,
                    ahead_requests=1,
                    ahead_tokens=64,
                    used_percent=40,
                    used_tokens_mean=25,
                    coming_tokens_per_s=12.5,
                    turn_tokens=40,
                    accounts=(AccountLoad(account_id="acc-1", ahead_tokens=300, turn_tokens=420),),
                ),
            ),
            full_tokens_per_s=131.5,
            kv_tokens=700,
            kv_tokens_max=16_384,
            free_ms=(120, 480),
        ),
    ),
)
