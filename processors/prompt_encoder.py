"""Which turns of a branch enter a prompt, and the ids of all of it (rules W1 to W6 of `decisions/context_window.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from infra.models import ChatMessage, ConversationRefusedError, PromptModel
from processors.decisions.context_window import Said, Turn, first_kept
from schemas.events.admissions import PromptAdmitted

# Above this a prompt takes longer to encode than other prompts should wait.
INLINE_CHARS_MAX: Final = 16_000
COUNTS_MAX: Final = 200_000


class UnencodablePrompt(Exception):
    """No request can be made of this prompt, now or later. The message is for operators."""


class PromptEncoder:
    """Encodes for the served models. It remembers what each message costs, since a conversation asks for the same ones again."""

    def __init__(self, models: Mapping[str, PromptModel]) -> None:
        self._models = models
        self._counts: dict[tuple[str, str], int] = {}

    async def prompt_ids(
        self, prompt: PromptAdmitted, system_prompt: str, turns: Sequence[Turn]
    ) -> tuple[int, ...]:
        """The prompt's ids within its budget, with the newest of the earlier turns that fit. Raises UnencodablePrompt."""
        model = self._models.get(prompt.model)
        if model is None:
            raise UnencodablePrompt(f"the model {prompt.model} is not served")
        chars = len(system_prompt) + len(prompt.content)
        chars += sum(len(t.asked.content) + len(t.answered.content) for t in turns)
        try:
            if chars <= INLINE_CHARS_MAX:
                ids = self._encode(model, prompt, system_prompt, turns)
            else:
                ids = await asyncio.to_thread(self._encode, model, prompt, system_prompt, turns)
        except ConversationRefusedError as error:
            raise UnencodablePrompt(str(error)) from error
        if ids is None:
            raise UnencodablePrompt("the message alone exceeds its input budget")
        return ids

    def _encode(
        self,
        model: PromptModel,
        prompt: PromptAdmitted,
        system_prompt: str,
        turns: Sequence[Turn],
    ) -> tuple[int, ...] | None:
        """W1 to W6, or None where not even the message fits."""
        *system, user = model.shortest_prompt(system_prompt, prompt.content)
        shortest = model.prompt_ids([*system, user])
        room = prompt.input_budget_tokens - len(shortest)
        if room < 0:
            return None
        start = first_kept(self._costs(model, turns, room), room)
        while start < len(turns):
            kept = [_chat_message(s) for t in turns[start:] for s in (t.asked, t.answered)]
            ids = model.prompt_ids([*system, *kept, user])
            if len(ids) <= prompt.input_budget_tokens:
                return ids
            # The single costs add up to no less, so this is for a template that surprises.
            start += 1
        return shortest

    def _costs(self, model: PromptModel, turns: Sequence[Turn], room: int) -> list[int]:
        """What each turn costs. Those older than what fits are not counted but put above `room`."""
        costs = [room + 1] * len(turns)
        left = room
        for at in range(len(turns) - 1, -1, -1):
            costs[at] = self._cost(model, turns[at].asked) + self._cost(model, turns[at].answered)
            left -= costs[at]
            if left < 0:
                break
        return costs

    def _cost(self, model: PromptModel, said: Said) -> int:
        name = (model.name, said.message_id)
        cost = self._counts.get(name)
        if cost is None:
            if len(self._counts) >= COUNTS_MAX:
                self._counts.clear()
            cost = self._counts[name] = model.count_message(said.role, said.content)
        return cost


def _chat_message(said: Said) -> ChatMessage:
    return ChatMessage(role=said.role, content=said.content)
