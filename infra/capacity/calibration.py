"""How fast a worker is: the one place with figures of real hardware, as data.

A step of the engine makes one token for every answer under way. It takes `step_ms` for reading the weights, and
`step_ms_an_answer` more for each of them; a prompt is read at `prefill_tokens_per_s`, and no answer goes on meanwhile.

| figure | value | from |
|---|---|---|
| output of a full node, with its prompts | 3,000 tokens/s | requirements: 1.4 M tokens/s on about 470 H100 nodes |
| prompt and output of an average answer | 1,500 and 500 tokens | requirements: 2,800 answers/s |
| time between tokens | < 50 ms | requirements; 64 answers at once make it 21 ms |
| prefill | 30,000 tokens/s | assumed: 6 prompts/s then take 30 % of a full node's time |
| step of one answer alone | 8.1 ms | assumed: memory-bound, 120 tokens/s |
| KV memory | 400,000 tokens | assumed: 64 answers of 2,000 tokens use a third, and ten of 30,000 still fit |

The figure of a node holds for either model: what a smaller one saves is taken as fewer GPUs a worker, not as more tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """One worker. `slots` answers run at once."""

    slots: int
    step_ms: float
    step_ms_an_answer: float
    prefill_tokens_per_s: float
    kv_tokens: int

    def token_ms(self, answers: int) -> float:
        """Between two tokens of an answer, while so many run and no prompt is read."""
        return self.step_ms + self.step_ms_an_answer * answers

    def prefill_ms(self, tokens: int) -> float:
        """How long a prompt keeps the engine busy."""
        return 1000 * tokens / self.prefill_tokens_per_s


OUTPUT_TOKENS_PER_S: Final = 3_000.0
PREFILL_SHARE: Final = 0.3
PREFILL_FOR_OUTPUT: Final = 10.0
"""Tokens of prompts that are read in the time of one of output."""
ALONE_SHARE: Final = 0.536
"""Of a full step that one answer alone takes as well."""
SLOTS: Final = 64
KV_TOKENS_A_SLOT: Final = 6_250


def worker_of(*, slots: int = SLOTS, tokens_per_s: float = OUTPUT_TOKENS_PER_S) -> Calibration:
    """A worker that makes so many tokens of output a second beside reading their prompts, when all slots are busy: what a live one
    reports as its pace, less its prompts. The proportions are those of the table.
    """
    full_step_ms = 1000 * slots * (1 - PREFILL_SHARE) / tokens_per_s
    return Calibration(
        slots=slots,
        step_ms=ALONE_SHARE * full_step_ms,
        step_ms_an_answer=(1 - ALONE_SHARE) * full_step_ms / slots,
        prefill_tokens_per_s=PREFILL_FOR_OUTPUT * tokens_per_s,
        kv_tokens=slots * KV_TOKENS_A_SLOT,
    )


H100_NODE: Final = worker_of()
