"""A run as tests of what comes after its admission begin it."""

from __future__ import annotations

from typing import Any

import msgspec

from schemas.events.tokens import RunQueued
from schemas.vocabulary import Lane, Tier


def queued(run_id: str, **other: Any) -> RunQueued:
    """The run was admitted; `other` are the fields that matter to the test."""
    event = RunQueued(
        run_id=run_id,
        account_id="a",
        chat_id="c",
        user_message_id="u",
        assistant_message_id="m",
        parent_id=None,
        tier=Tier.PLUS,
        lane=Lane.PLUS,
        model="m",
        input_budget_tokens=100,
        granted_output_tokens=100,
        deadline_ms=1_000,
    )
    return msgspec.structs.replace(event, **other)
