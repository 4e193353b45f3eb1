"""What a worker has seen before the simulation begins: requests of the planned size, with all its slots in use."""

from __future__ import annotations

from typing import Final

from inference_workers.engine import EngineLoad
from inference_workers.load_report import LaneUse, Rates
from inference_workers.outlook import SlotTimes
from infra.capacity.calibration import Calibration
from schemas.vocabulary import Lane

PROMPT_TOKENS: Final = 1_500
ANSWER_TOKENS: Final = 500
CLAIMED_TOKENS: Final = 3_400
REQUESTS: Final = 20


def warm_up(
    full: Calibration, *, use: LaneUse, times: SlotTimes, rates: Rates
) -> tuple[float, int]:
    """Have the measures know its pace when it is full, and what requests use. Gives the tokens that it generated and read."""
    share = 1000 / (
        full.prefill_ms(PROMPT_TOKENS) + ANSWER_TOKENS * full.token_ms(full.slots) / full.slots
    )
    used = PROMPT_TOKENS + ANSWER_TOKENS
    for lane in Lane:
        for _ in range(REQUESTS):
            use.ended(lane, claimed=CLAIMED_TOKENS, used=used)
    held_ms = full.prefill_ms(PROMPT_TOKENS) + ANSWER_TOKENS * full.token_ms(full.slots)
    for _ in range(REQUESTS):
        times.freed(round(held_ms), used_tokens=used)
    for second in range(2):
        rates.measure(
            EngineLoad(
                slots=full.slots,
                busy=full.slots,
                releasing=0,
                generated_tokens_total=round(second * share * ANSWER_TOKENS),
                prompt_tokens_total=round(second * share * PROMPT_TOKENS),
                progress_age_ms=0,
                kv_tokens=0,
            ),
            full=True,
            elapsed_s=1,
        )
    return share * ANSWER_TOKENS, round(share * PROMPT_TOKENS)
