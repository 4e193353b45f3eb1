"""The policy file: read, checked whole, and turned into the LimitsChanged event that admission obeys.

Processes never decide by the file: it becomes an event when it differs from what the log says. So who changed what is on the log.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from schemas.events.account_snapshots import OPEN_RESERVATIONS_MAX
from schemas.events.accounts import LimitsChanged, TierLimits
from schemas.topics import RUN_DEADLINE_MS_MAX
from schemas.vocabulary import Tier

PACKAGED: Final = Path(__file__).with_name("policies.toml")
POLICY_BYTES_MAX: Final = 65_536


class PolicyError(ValueError):
    """The policy file is unusable. The message is one line: file, field, what is expected."""


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tiers: dict[Tier, dict[str, object]]


def read_policies(path: Path, *, models: Mapping[str, int], changed_by: str) -> LimitsChanged:
    """The limits in the file at `path` (empty: the packaged one). Raises PolicyError.

    `models` are the known models with their context windows (tokens): input and output together must fit.
    """
    source = path if path != Path() else PACKAGED
    try:
        raw = source.read_bytes()[: POLICY_BYTES_MAX + 1]
        if len(raw) > POLICY_BYTES_MAX:
            raise PolicyError(f"{source}: larger than {POLICY_BYTES_MAX} bytes")
        table = tomllib.loads(raw.decode())
        outer = msgspec.convert(table, _File)
        tiers = {tier: _tier(tier, fields) for tier, fields in outer.tiers.items()}
    except PolicyError as error:
        raise PolicyError(f"{source}: {error}") from None
    except OSError as error:
        raise PolicyError(f"{source}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise PolicyError(f"{source}: {error}") from error
    for tier in Tier:
        if tier not in tiers:
            raise PolicyError(f"{source}: tiers.{tier.value} is missing")
        _check(source, tier, tiers[tier], models)
    body = msgspec.json.encode({tier.value: tiers[tier] for tier in Tier})
    version = hashlib.blake2b(body, digest_size=8).hexdigest()
    return LimitsChanged(version=version, tiers=tiers, changed_by=changed_by)


def _tier(tier: Tier, fields: dict[str, object]) -> TierLimits:
    unknown = sorted(set(fields) - set(TierLimits.__struct_fields__))
    if unknown:
        raise PolicyError(f"tiers.{tier.value}.{unknown[0]} is no field of a tier")
    try:
        return msgspec.convert(fields, TierLimits)
    except msgspec.ValidationError as error:
        raise PolicyError(f"tiers.{tier.value}: {error}") from error


def _check(source: Path, tier: Tier, limits: TierLimits, models: Mapping[str, int]) -> None:
    bounds = {
        "tokens_per_window": (1, 10**15),
        "open_runs_max": (1, OPEN_RESERVATIONS_MAX),
        "input_tokens_max": (16, 10**7),
        "output_tokens_max": (1, 10**6),
        "run_deadline_ms": (1_000, RUN_DEADLINE_MS_MAX),
        "queue_wait_ms_max": (0, RUN_DEADLINE_MS_MAX),
    }
    for field, (low, high) in bounds.items():
        value = getattr(limits, field)
        if not low <= value <= high:
            raise PolicyError(
                f"{source}: tiers.{tier.value}.{field} must be {low} to {high}, not {value}"
            )
    if not limits.models:
        raise PolicyError(f"{source}: tiers.{tier.value}.models names no model")
    for model in limits.models:
        if model not in models:
            known = ", ".join(sorted(models))
            raise PolicyError(
                f"{source}: tiers.{tier.value}.models: {model!r} is unknown; known: {known}"
            )
        if limits.input_tokens_max + limits.output_tokens_max > models[model]:
            raise PolicyError(
                f"{source}: tiers.{tier.value}: input_tokens_max + output_tokens_max exceed the "
                f"{models[model]} tokens of {model}'s context window"
            )
