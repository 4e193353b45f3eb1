"""How many tokens a prompt has in each model that might answer it: exact, by the model's own vocabulary and template."""

from __future__ import annotations

from functools import partial
from typing import Final

from edge.auth import Caller
from edge.counting_threads import CountingFull
from edge.state import EdgeState, overloaded

INLINE_CHARS_MAX: Final = 2_000
"""Longer texts are counted in a thread: the event loop serves others meanwhile."""


async def count_prompt(
    edge: EdgeState, caller: Caller, system_prompt: str, content: str, *, model: str | None
) -> dict[str, int]:
    """Tokens by candidate model, of those in which the prompt fits, and of what may stand in for them. Empty: it fits none.

    Raises Refused (503).
    """
    limits = edge.accounts.tier(caller.tier)
    counts: dict[str, int] = {}
    asked = [model] if model is not None else edge.models_of(caller.tier)
    stand_ins = [edge.accounts.smaller(name) for name in asked]
    for name in dict.fromkeys([*asked, *filter(None, stand_ins)]):
        if name not in edge.models:
            continue
        prompt_model = edge.models[name]
        messages = prompt_model.shortest_prompt(system_prompt, content)
        if len(system_prompt) + len(content) <= INLINE_CHARS_MAX:
            count = len(prompt_model.prompt_ids(messages))
        else:
            try:
                ids = await edge.counting.run(partial(prompt_model.prompt_ids, messages))
            except CountingFull:
                raise overloaded("Too many long messages are being counted at once.") from None
            count = len(ids)
        most = prompt_model.context_window - 1  # One token of answer at least.
        if limits is not None:
            most = min(most, limits.input_tokens_max)
        if count <= most:
            counts[name] = count
    return counts if any(name in counts for name in asked) else {}
