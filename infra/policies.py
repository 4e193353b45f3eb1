"""The policy file: read, checked whole, and turned into the LimitsChanged event that admission obeys.

Processes never decide by the file: it becomes an event when it differs from what the log says. So who changed what is on the log.
Every error is one line that names the file, the field, and what is expected there.
"""

from __future__ import annotations

import hashlib
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from infra.policy_checks import PolicyError, check_policy
from schemas.events import Part
from schemas.events.accounts import (
    ContentPolicy,
    Ladder,
    LadderLevel,
    LaneLimits,
    LimitsChanged,
    ModelPolicy,
    TierLimits,
)
from schemas.vocabulary import Lane, Tier

PACKAGED: Final = Path(__file__).with_name("policies.toml")
POLICY_BYTES_MAX: Final = 65_536
SECTIONS: Final = ("tiers", "lanes", "models", "ladder", "content")

PartT = TypeVar("PartT", bound=Part)


def read_policies(path: Path, *, models: Mapping[str, int], changed_by: str) -> LimitsChanged:
    """The limits in the file at `path` (empty: the packaged one). Raises PolicyError.

    `models` are the known models with their context windows (tokens): input and output together must fit.
    """
    source = path if path != Path() else PACKAGED
    try:
        with source.open("rb") as file:
            raw = file.read(POLICY_BYTES_MAX + 1)
    except OSError as error:
        raise PolicyError(f"{source}: {error.strerror}") from error
    return parse_policies(raw, source=str(source), models=models, changed_by=changed_by)


def parse_policies(
    raw: bytes, *, source: str, models: Mapping[str, int], changed_by: str
) -> LimitsChanged:
    """The limits in the TOML text `raw`; `source` names it in errors. Raises PolicyError. See `read_policies`."""
    try:
        if len(raw) > POLICY_BYTES_MAX:
            raise PolicyError(f"larger than {POLICY_BYTES_MAX} bytes")
        table = tomllib.loads(raw.decode())
        for name in table:
            if name not in SECTIONS:
                raise PolicyError(f"{name} is no section; there are {', '.join(SECTIONS)}")
        found = LimitsChanged(
            version="",
            tiers={
                _word(Tier, name, "tiers"): _part(TierLimits, fields, f"tiers.{name}")
                for name, fields in _table(table, "tiers").items()
            },
            changed_by=changed_by,
            lanes={
                _word(Lane, name, "lanes"): _part(LaneLimits, fields, f"lanes.{name}")
                for name, fields in _table(table, "lanes").items()
            },
            models=_models(_table(table, "models"), models),
            ladder=_ladder(_table(table, "ladder")),
            content=_part(ContentPolicy, _table(table, "content"), "content"),
        )
        check_policy(found, models)
    except PolicyError as error:
        raise PolicyError(f"{source}: {error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PolicyError(f"{source}: {error}") from error
    return msgspec.structs.replace(found, version=version_of(found))


def version_of(limits: LimitsChanged) -> str:
    """A name of the content, whoever wrote it and in whatever order."""
    content: dict[str, object] = {
        "tiers": {tier.value: limits.tiers[tier] for tier in Tier if tier in limits.tiers},
        "lanes": {lane.value: limits.lanes[lane] for lane in Lane if lane in limits.lanes},
        "models": dict(sorted(limits.models.items())),
        "ladder": limits.ladder,
    }
    if (
        limits.content != ContentPolicy()
    ):  # Without it a policy keeps the version that it had before there was a list.
        content["content"] = limits.content
    return hashlib.blake2b(msgspec.json.encode(content), digest_size=8).hexdigest()


def policy_text(limits: LimitsChanged) -> str:
    """The limits as a policy file: what is read back has the same version."""
    lines = [f"# Version {limits.version}, by {limits.changed_by}."]
    for section, parts in (
        ("models", limits.models),
        ("tiers", {tier.value: limits.tiers[tier] for tier in Tier if tier in limits.tiers}),
        ("lanes", {lane.value: limits.lanes[lane] for lane in Lane if lane in limits.lanes}),
    ):
        for name, part in parts.items():
            lines += ["", f"[{section}.{_key(name)}]", *_fields(part)]
    ladder = limits.ladder
    lines += ["", "[ladder]", f"hold_ms = {ladder.hold_ms}"]
    for level in ladder.levels:
        lines += ["", "[[ladder.levels]]", *_fields(level)]
    lines += ["", "[content]", *_fields(limits.content)]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    bare = name.replace("-", "").replace("_", "")
    return name if bare.isascii() and bare.isalnum() else _value(name)


def _fields(part: Part) -> list[str]:
    found = ((name, getattr(part, name)) for name in part.__struct_fields__)
    return [f"{name} = {_value(value)}" for name, value in found if value is not None]


def _value(value: object) -> str:
    # A JSON text of these types is one of TOML, too.
    return msgspec.json.encode(value).decode()


def _table(table: Mapping[str, object], name: str) -> Mapping[str, object]:
    found = table.get(name, {})
    if not isinstance(found, dict):
        raise PolicyError(f"{name} must be a table")
    return found


WordT = TypeVar("WordT", Tier, Lane)


def _word(words: type[WordT], name: str, section: str) -> WordT:
    try:
        return words(name)
    except ValueError:
        known = ", ".join(word.value for word in words)
        raise PolicyError(f"{section}.{name} is unknown; there are {known}") from None


def _models(tables: Mapping[str, object], windows: Mapping[str, int]) -> dict[str, ModelPolicy]:
    """Models that the file does not name have their whole window, and cost what any token costs."""
    named = {name: _part(ModelPolicy, fields, f"models.{name}") for name, fields in tables.items()}
    others = {
        name: ModelPolicy(context_tokens=window)
        for name, window in windows.items()
        if name not in named
    }
    return named | others


def _ladder(table: Mapping[str, object]) -> Ladder:
    levels = table.get("levels", [])
    if not isinstance(levels, list):
        raise PolicyError("ladder.levels must be a list of tables, [[ladder.levels]]")
    plain = {name: value for name, value in table.items() if name != "levels"}
    found = _part(Ladder, plain, "ladder")
    return msgspec.structs.replace(
        found,
        levels=tuple(
            _part(LadderLevel, fields, f"ladder.levels[{number}]")
            for number, fields in enumerate(levels, start=1)
        ),
    )


def _part(kind: type[PartT], fields: object, at: str) -> PartT:
    """A table of the file as a value; every error names the field."""
    if not isinstance(fields, dict):
        raise PolicyError(f"{at} must be a table")
    types = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in types:
            raise PolicyError(f"{at}.{name} is unknown; there are {', '.join(types)}")
        try:
            values[name] = msgspec.convert(value, types[name])
        except msgspec.ValidationError as error:
            raise PolicyError(f"{at}.{name}: {str(error).partition(' - at ')[0]}") from error
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in values:
            raise PolicyError(f"{at}.{field.name} is missing")
    return kind(**values)
