"""What a policy must satisfy as a whole, beyond the types of its fields. Each error names the field and what is expected there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from schemas.blocked_phrases import PHRASE_CHARS_MAX, PHRASES_MAX, units
from schemas.events import Part
from schemas.events.account_snapshots import OPEN_RESERVATIONS_MAX, SEATS_MAX
from schemas.events.accounts import (
    ContentPolicy,
    Ladder,
    LadderLevel,
    LimitsChanged,
    ModelPolicy,
    TierLimits,
)
from schemas.topics import RUN_DEADLINE_MS_MAX
from schemas.vocabulary import Tier

LEVELS_MAX: Final = 16

Bounds = Mapping[str, tuple[int, int]]

_TIER: Final[Bounds] = {
    "tokens_per_window": (1, 10**15),
    "open_runs_max": (1, OPEN_RESERVATIONS_MAX),
    "input_tokens_max": (16, 10**7),
    "output_tokens_max": (1, 10**6),
    "run_deadline_ms": (1_000, RUN_DEADLINE_MS_MAX),
    "queue_wait_ms_max": (0, RUN_DEADLINE_MS_MAX),
    "enqueued_runs_max": (0, 64),
    "requests_per_minute": (1, 10**9),
    "requests_burst": (1, 10**9),
    "tokens_per_minute": (1, 10**12),
    "tokens_burst": (1, 10**12),
    "seats_max": (1, SEATS_MAX),
    "seat_open_runs_max": (1, OPEN_RESERVATIONS_MAX),
    "seat_tokens_per_window": (1, 10**15),
}
_LANE: Final[Bounds] = {
    "weight": (0, 1_000_000),
    "floor_percent": (0, 100),
    "queued_requests_max": (1, 10**9),
    "queued_tokens_max": (1, 10**15),
    "look_ahead_requests": (1, 100_000),
}
_MODEL: Final[Bounds] = {"context_tokens": (32, 10**8), "cost_percent": (1, 1_000_000)}
_LEVEL: Final[Bounds] = {
    "enter_ms": (1, RUN_DEADLINE_MS_MAX),
    "leave_ms": (0, RUN_DEADLINE_MS_MAX),
    "output_percent_free": (1, 100),
    "output_percent_paid": (1, 100),
}


class PolicyError(ValueError):
    """The policy is unusable. The message is one line: where, and what is expected."""


def check_policy(limits: LimitsChanged, windows: Mapping[str, int]) -> None:
    """Raises PolicyError. `windows` are the context windows (tokens) of the models that exist."""
    for name, model in limits.models.items():
        _check_model(name, model, limits.models, windows)
    for tier in Tier:
        if tier not in limits.tiers:
            raise PolicyError(f"tiers.{tier.value} is missing")
        _check_tier(f"tiers.{tier.value}", limits.tiers[tier], limits.models)
    for lane, share in limits.lanes.items():
        _within(share, f"lanes.{lane.value}", _LANE)
    if sum(share.floor_percent for share in limits.lanes.values()) > 100:
        raise PolicyError("lanes: the floor_percent of all lanes together exceed 100")
    _check_ladder(limits.ladder)
    _check_content(limits.content)


def _within(part: Part, at: str, bounds: Bounds) -> None:
    for field, (low, high) in bounds.items():
        value = getattr(part, field)
        if value is not None and not low <= value <= high:
            raise PolicyError(f"{at}.{field} must be {low} to {high}, not {value}")


def _check_model(
    name: str,
    model: ModelPolicy,
    models: Mapping[str, ModelPolicy],
    windows: Mapping[str, int],
) -> None:
    at = f"models.{name}"
    if name not in windows:
        raise PolicyError(f"{at} is unknown; known: {', '.join(sorted(windows))}")
    _within(model, at, _MODEL)
    if model.context_tokens > windows[name]:
        raise PolicyError(f"{at}.context_tokens must be at most {windows[name]}")
    seen = {name}
    smaller = model.smaller
    while smaller is not None:
        if smaller not in models:
            known = ", ".join(sorted(windows))
            raise PolicyError(f"{at}.smaller: {smaller!r} is unknown; known: {known}")
        if smaller in seen:
            raise PolicyError(f"{at}.smaller leads back to {smaller}")
        seen.add(smaller)
        if models[smaller].cost_percent > model.cost_percent:
            raise PolicyError(f"{at}.smaller: {smaller} costs more than {name}")
        smaller = models[smaller].smaller


def _check_tier(at: str, tier: TierLimits, models: Mapping[str, ModelPolicy]) -> None:
    _within(tier, at, _TIER)
    if not tier.models:
        raise PolicyError(f"{at}.models names no model")
    if len(set(tier.models)) < len(tier.models):
        raise PolicyError(f"{at}.models names a model twice")
    for name in tier.models:
        if name not in models:
            known = ", ".join(sorted(models))
            raise PolicyError(f"{at}.models: {name!r} is unknown; known: {known}")
        for each in filter(None, (name, models[name].smaller)):
            context = models[each].context_tokens
            if tier.input_tokens_max + tier.output_tokens_max > context:
                raise PolicyError(
                    f"{at}.output_tokens_max: with input_tokens_max it exceeds the {context} tokens of "
                    f"{each}'s context"
                )
    for kind in ("requests", "tokens"):
        if getattr(tier, f"{kind}_burst") is not None and not getattr(tier, f"{kind}_per_minute"):
            raise PolicyError(f"{at}.{kind}_burst needs {kind}_per_minute")
    burst = tier.tokens_burst if tier.tokens_burst is not None else tier.tokens_per_minute
    if burst is not None and burst <= tier.input_tokens_max:
        field = "tokens_burst" if tier.tokens_burst is not None else "tokens_per_minute"
        raise PolicyError(f"{at}.{field} must exceed input_tokens_max, {tier.input_tokens_max}")
    for field, whole in (
        ("seat_tokens_per_window", "tokens_per_window"),
        ("seat_open_runs_max", "open_runs_max"),
    ):
        of_seat = getattr(tier, field)
        if of_seat is not None and of_seat > getattr(tier, whole):
            raise PolicyError(f"{at}.{field} must be at most {whole}, {getattr(tier, whole)}")
    if (tier.enqueued_runs_max + 1) * tier.run_deadline_ms > RUN_DEADLINE_MS_MAX:
        raise PolicyError(
            f"{at}.enqueued_runs_max: so many runs one after the other, each of run_deadline_ms, last longer than "
            f"{RUN_DEADLINE_MS_MAX} ms"
        )


def _check_ladder(ladder: Ladder) -> None:
    if not 0 <= ladder.hold_ms <= RUN_DEADLINE_MS_MAX:
        raise PolicyError(f"ladder.hold_ms must be 0 to {RUN_DEADLINE_MS_MAX}")
    if len(ladder.levels) > LEVELS_MAX:
        raise PolicyError(f"ladder.levels: at most {LEVELS_MAX}")
    before: LadderLevel | None = None
    for number, level in enumerate(ladder.levels, start=1):
        at = f"ladder.levels[{number}]"
        _within(level, at, _LEVEL)
        if level.leave_ms >= level.enter_ms:
            raise PolicyError(f"{at}.leave_ms must be below enter_ms, {level.enter_ms}")
        _check_free_first(at, level)
        if before is not None:
            _check_steeper(at, level, before)
        before = level


def _check_free_first(at: str, level: LadderLevel) -> None:
    """The free tier feels each step no later than the others."""
    if level.output_percent_free > level.output_percent_paid:
        raise PolicyError(f"{at}.output_percent_free must be at most output_percent_paid")
    for step in ("downgrade", "shed"):
        if getattr(level, f"{step}_paid") and not getattr(level, f"{step}_free"):
            raise PolicyError(f"{at}.{step}_paid needs {step}_free: free before paid")


def _check_steeper(at: str, level: LadderLevel, before: LadderLevel) -> None:
    """Each level asks for more saturation than the one before, and gives no more."""
    for field in ("enter_ms", "leave_ms"):
        if getattr(level, field) <= getattr(before, field):
            raise PolicyError(f"{at}.{field} must exceed that of the level before")
    for field in ("output_percent_free", "output_percent_paid"):
        if getattr(level, field) > getattr(before, field):
            raise PolicyError(f"{at}.{field} must not exceed that of the level before")
    for field in ("downgrade_free", "downgrade_paid", "shed_free", "shed_paid"):
        if getattr(before, field) and not getattr(level, field):
            raise PolicyError(f"{at}.{field} must be true, as at the level before")
    if level.optional_work and not before.optional_work:
        raise PolicyError(f"{at}.optional_work must be false, as at the level before")


def _check_content(content: ContentPolicy) -> None:
    at = "content.blocked_phrases"
    if len(content.blocked_phrases) > PHRASES_MAX:
        raise PolicyError(f"{at}: at most {PHRASES_MAX} phrases")
    seen: dict[tuple[str, ...], int] = {}
    for number, phrase in enumerate(content.blocked_phrases, start=1):
        if not phrase.isprintable() or len(phrase) > PHRASE_CHARS_MAX:
            raise PolicyError(
                f"{at}[{number}] must be printable and at most {PHRASE_CHARS_MAX} characters"
            )
        row = units(phrase)
        if not row:
            raise PolicyError(f"{at}[{number}] is empty")
        if row in seen:
            raise PolicyError(f"{at}[{number}] is the same phrase as [{seen[row]}]")
        seen[row] = number
