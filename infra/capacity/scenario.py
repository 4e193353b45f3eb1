"""What is simulated: sizes, who sends, what breaks, and under which limits. All of it is data.

The policy is the shipped one, changed only where that is made for one machine; the report prints it whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from infra.capacity.calibration import H100_NODE, Calibration
from infra.policies import read_policies, version_of
from infra.policy_checks import check_policy
from schemas.events.account_snapshots import OPEN_RESERVATIONS_MAX
from schemas.events.accounts import LimitsChanged
from schemas.vocabulary import Lane, Tier

SMALL: Final = "small"
LARGE: Final = "large"
CONTEXT_TOKENS: Final = 65_536
WINDOWS: Final = {SMALL: CONTEXT_TOKENS, LARGE: CONTEXT_TOKENS}
SHIPPED_MODELS: Final = {"smollm2-135m": SMALL, "gemma3-270m": LARGE}
SHIPPED_WINDOWS: Final = {"smollm2-135m": 8_192, "gemma3-270m": 32_768}
REFERENCE_WORKERS: Final = 470
"""The fleet that the shipped bounds of the lanes are read for: another one has its part of them."""
WAIT_DIVISOR: Final = 6
"""A machine that answers in minutes lets people wait a minute or two; a fleet that people talk to lets them wait a sixth of that."""
OUTPUT_TOKENS_FREE: Final = 2_048
OUTPUT_TOKENS_PAID: Final = 32_000
INPUT_TOKENS: Final = 16_384
PARTITIONS_A_WORKER: Final = 2
FLEX_EVERY: Final = 10
"""Where the rate is at its peak all the time, prompts that can wait are all refused: they come where it rises and falls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """From `at` (0 to 1 of the time) on, this share of the peak rate is sent; in between it changes steadily."""

    at: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Who sends how much when. `abuser_share` of the prompts are of one paying account, `team_share` of one team of 5,000
    seats; of the others `free_share` and `plus_share` are of these tiers, the rest of teams. One of `flex_every` can wait; 0: none.
    """

    name: str
    says: str
    rates: tuple[Rate, ...] = (Rate(at=0, share=1), Rate(at=1, share=1))
    abuser_share: float = 0.0
    team_share: float = 0.0
    free_share: float = 0.7
    plus_share: float = 0.2
    flex_every: int = 0


PATTERNS: Final = {
    pattern.name: pattern
    for pattern in (
        Pattern(name="steady", says="the peak rate all the time"),
        Pattern(
            name="burst",
            says="what the workers can do, and for a quarter of the time the peak rate; a tenth can wait",
            flex_every=FLEX_EVERY,
            rates=(
                Rate(at=0, share=0.12),
                Rate(at=0.25, share=0.12),
                Rate(at=0.26, share=1),
                Rate(at=0.5, share=1),
                Rate(at=0.51, share=0.12),
                Rate(at=1, share=0.12),
            ),
        ),
        Pattern(
            name="abuser",
            says="the peak rate, a quarter of it from one account",
            abuser_share=0.25,
        ),
        Pattern(
            name="team",
            says="the peak rate, a fiftieth of it from one team of 5,000 seats on one key",
            team_share=0.02,
        ),
        Pattern(
            name="daily",
            says="a day's rise to the peak rate and fall, in the time there is; a tenth can wait",
            flex_every=FLEX_EVERY,
            rates=(
                Rate(at=0, share=0.05),
                Rate(at=0.35, share=0.3),
                Rate(at=0.6, share=1),
                Rate(at=0.7, share=1),
                Rate(at=1, share=0.05),
            ),
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One simulation. Equal scenarios give equal results."""

    seed: int = 1
    pattern: Pattern = PATTERNS["steady"]
    prompts_per_s: float = 20_000
    workers: int = REFERENCE_WORKERS
    seconds: int = 30
    faults: tuple[str, ...] = ()
    cold: bool = False
    """No worker has worked before."""
    worker: Calibration = H100_NODE
    policy: LimitsChanged = field(default_factory=lambda: scenario_policy(REFERENCE_WORKERS))

    @property
    def partitions(self) -> int:
        """Of the token topic. Each model's workers own all of them."""
        return self.workers * PARTITIONS_A_WORKER

    @property
    def account_partitions(self) -> int:
        """Of the account topic."""
        return max(4, min(64, int(self.prompts_per_s / 250)))

    @property
    def edges(self) -> int:
        return max(2, round(self.prompts_per_s / 2_500))

    @property
    def heavy_teams(self) -> int:
        """Teams that want more than they get, an even number: so few that a part of one is many requests, and enough that together, each
        with as many open runs as it may have, they fill the slots of their lanes and wait at most workers. Where mostly one waits at a
        worker there is nobody to share with."""
        return max(4, min(28, 2 * (self.workers // 32)))

    @property
    def warm_up_ms(self) -> float:
        """The workers fill up first: what is measured begins here."""
        return 1000 * self.seconds / 6

    @property
    def end_ms(self) -> float:
        """Nobody sends any more."""
        return 1000.0 * self.seconds


def scenario_policy(workers: int, shipped: Path = Path()) -> LimitsChanged:
    """The shipped policy for a fleet of this size. Raises PolicyError."""
    limits = read_policies(shipped, models=SHIPPED_WINDOWS, changed_by="the simulator")
    part = workers / REFERENCE_WORKERS
    replace = msgspec.structs.replace
    open_runs = min(OPEN_RESERVATIONS_MAX - 40, max(64, round(OPEN_RESERVATIONS_MAX * part)))
    tiers = {
        tier: replace(
            each,
            models=tuple(SHIPPED_MODELS.get(name, name) for name in each.models),
            input_tokens_max=INPUT_TOKENS,
            output_tokens_max=OUTPUT_TOKENS_FREE if tier is Tier.FREE else OUTPUT_TOKENS_PAID,
            queue_wait_ms_max=each.queue_wait_ms_max // WAIT_DIVISOR,
            **({"open_runs_max": open_runs} if tier is Tier.TEAM else {}),
        )
        for tier, each in limits.tiers.items()
    }
    lanes = {
        lane: replace(
            each,
            queued_requests_max=_scaled(each.queued_requests_max, part),
            queued_tokens_max=_scaled(each.queued_tokens_max, part),
        )
        for lane, each in limits.lanes.items()
    }
    models = {
        SHIPPED_MODELS.get(name, name): replace(
            each,
            context_tokens=CONTEXT_TOKENS,
            smaller=SHIPPED_MODELS.get(each.smaller, each.smaller) if each.smaller else None,
        )
        for name, each in limits.models.items()
    }
    ladder = replace(
        limits.ladder,
        levels=tuple(
            replace(
                level,
                enter_ms=level.enter_ms // WAIT_DIVISOR,
                leave_ms=level.leave_ms // WAIT_DIVISOR,
            )
            for level in limits.ladder.levels
        ),
    )
    found = replace(limits, tiers=tiers, lanes=lanes, models=models, ladder=ladder)
    check_policy(found, WINDOWS)
    return replace(found, version=version_of(found))


def _scaled(bound: int | None, part: float) -> int | None:
    return None if bound is None else max(1, round(bound * part))


def lane_bound(policy: LimitsChanged, lane: Lane) -> int | None:
    """How many requests may wait in the lane of one model."""
    found = policy.lanes.get(lane)
    return found.queued_requests_max if found is not None else None
