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

from schemas.events.workers import WorkerLoadReported


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


H100_NODE: Final = Calibration(
    slots=64,
    step_ms=8.0,
    step_ms_an_answer=0.1083,
    prefill_tokens_per_s=30_000,
    kv_tokens=400_000,
)


def calibrated(report: WorkerLoadReported, *, step_ms: float) -> Calibration:
    """A worker as a live one reported itself while all its slots were busy. `step_ms`: of one answer alone.

    Raises ValueError where it was never seen full.
    """
    if report.full_tokens_per_s <= 0 or report.decode_tokens_per_s <= 0:
        raise ValueError(f"{report.worker_id} was never seen full: nothing to calibrate by")
    full_step_ms = 1000 * report.slots / report.decode_tokens_per_s
    return Calibration(
        slots=report.slots,
        step_ms=min(step_ms, full_step_ms),
        step_ms_an_answer=max(0.0, full_step_ms - step_ms) / report.slots,
        prefill_tokens_per_s=max(report.prefill_tokens_per_s, report.decode_tokens_per_s),
        kv_tokens=report.kv_tokens_max,
    )
