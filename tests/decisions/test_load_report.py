"""What a worker measures of itself: rates while it is full, and what requests use of what they claim."""

from __future__ import annotations

import pytest

from inference_workers.decisions.lanes import Claim, FairLanes
from inference_workers.engine import EngineLoad
from inference_workers.load_report import LaneUse, Rates, lane_load, load_report
from schemas.vocabulary import Lane


def load(*, generated: int, prompt: int) -> EngineLoad:
    return EngineLoad(
        slots=4,
        busy=4,
        releasing=0,
        generated_tokens_total=generated,
        prompt_tokens_total=prompt,
        progress_age_ms=0,
        kv_tokens=0,
    )


def test_the_full_rate_counts_only_seconds_without_a_free_slot() -> None:
    rates = Rates()
    rates.measure(load(generated=0, prompt=0), full=False, elapsed_s=1)
    rates.measure(load(generated=40, prompt=10), full=False, elapsed_s=1)
    assert (rates.full, rates.decode, rates.prefill) == (0, 40, 10)
    rates.measure(load(generated=140, prompt=60), full=True, elapsed_s=1)
    rates.measure(load(generated=240, prompt=60), full=True, elapsed_s=1)
    assert rates.full == pytest.approx(125)
    rates.measure(load(generated=241, prompt=60), full=False, elapsed_s=1)
    assert rates.full == pytest.approx(125), "what it does while little is asked says nothing"


def test_a_lane_reports_what_goes_first_and_what_claims_come_to_in_the_end() -> None:
    lanes, use = FairLanes(), LaneUse()
    for number in range(5):
        lanes.wait(Claim(run_id=f"r{number}", account_id="heavy", lane=Lane.PLUS, tokens=1_000))
    use.came(Claim(run_id="r", account_id="a", lane=Lane.PLUS, tokens=300))
    use.second(elapsed_s=2)
    use.second(elapsed_s=1)
    use.ended(Lane.PLUS, claimed=1_000, used=250)
    loads = tuple(
        lane_load(lane, lanes.queue(lane), others=[70] if lane is Lane.PLUS else [], use=use)
        for lane in Lane
    )
    plus = next(one for one in loads if one.lane is Lane.PLUS)
    assert (plus.queued_requests, plus.queued_tokens) == (6, 5_070)
    assert (plus.ahead_requests, plus.ahead_tokens) == (2, 1_070)
    assert (plus.used_percent, plus.used_tokens_mean) == (25, 250)
    assert plus.coming_tokens_per_s == 75
    report = load_report(
        worker_id="w",
        model="m",
        epoch=1,
        slots=4,
        busy=4,
        lanes=loads,
        rates=Rates(),
        kv_tokens=5,
        kv_tokens_max=9,
        partitions=[3, 1],
        draining=False,
    )
    assert (report.queued_requests, report.queued_tokens, report.partitions) == (6, 5_070, (1, 3))
