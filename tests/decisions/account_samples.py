"""Records of the account log for tests, short to write."""

from __future__ import annotations

from typing import Final

import msgspec

from processors.decisions.account_state import AccountInput, Command
from schemas.events.accounts import (
    ContentPolicy,
    LaneWait,
    LimitsChanged,
    LoadView,
    PromptSubmitted,
    TierLimits,
    UsageMeasured,
)
from schemas.vocabulary import FinishReason, Tier

MODEL: Final = "small"
ACCOUNT: Final = "anna"
DAY_MS: Final = 24 * 3_600_000
NOON_MS: Final = 1_780_000_000_000 // DAY_MS * DAY_MS + DAY_MS // 2

TIER: Final = TierLimits(
    tokens_per_window=1_000,
    window="day",
    open_runs_max=2,
    models=(MODEL,),
    input_tokens_max=300,
    output_tokens_max=100,
    run_deadline_ms=60_000,
    queue_wait_ms_max=5_000,
)


def limits(version: str = "v1", /, **changes: object) -> LimitsChanged:
    """The same limits for every tier."""
    tier = msgspec.structs.replace(TIER, **changes)
    return LimitsChanged(version=version, tiers=dict.fromkeys(Tier, tier), changed_by="test")


def listed(*phrases: str, version: str = "listed") -> LimitsChanged:
    """Roomy limits under which these phrases are blocked."""
    roomy = limits(version, tokens_per_window=1_000_000, open_runs_max=50)
    return msgspec.structs.replace(roomy, content=ContentPolicy(blocked_phrases=phrases))


def prompt(
    run: str,
    *,
    account: str = ACCOUNT,
    chat: str | None = None,
    needed: int = 10,
    wait_ms: int = 0,
    pressure: int = 0,
    **changes: object,
) -> PromptSubmitted:
    """A prompt of a chat of its own, unless one is named."""
    made = PromptSubmitted(
        run_id=run,
        account_id=account,
        tier=Tier.FREE,
        chat_id=chat or f"chat-of-{run}",
        user_message_id=f"u-{run}",
        assistant_message_id=f"a-{run}",
        parent_id=None,
        content="hello",
        prompt_tokens={MODEL: needed},
        load=LoadView(
            pressure=pressure, waits=(LaneWait(model=MODEL, lane="free", wait_ms=wait_ms),)
        ),
    )
    return msgspec.structs.replace(made, **changes)


def usage(
    run: str, *, account: str = ACCOUNT, input_tokens: int = 10, output_tokens: int = 5
) -> UsageMeasured:
    """What the recorder counted."""
    return UsageMeasured(
        run_id=run,
        account_id=account,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        finish_reason=FinishReason.STOP,
    )


def command(event: AccountInput, *, offset: int = 0, appended_ms: int = NOON_MS) -> Command:
    """The event as it lies on the log."""
    return Command(offset=offset, appended_ms=appended_ms, event_id=f"e{offset}", event=event)
