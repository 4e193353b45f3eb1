"""The secrets of one system: the key behind id tags, the key that signs tokens, the key behind cache scopes.

Made once under TURNLOG_HOME, readable by the owner only. In production they come from the same file, mounted.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

FILE_NAME: Final = "secrets.json"
KEY_BYTES: Final = 32


class SecretsError(ValueError):
    """The file of secrets is unusable. The message is one line and holds no secret."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Secrets:
    """Three independent keys of KEY_BYTES bytes."""

    id_key: bytes
    token_key: bytes
    cache_key: bytes


def load_secrets(home: Path) -> Secrets:
    """The secrets of this home, made when there are none. Safe when several processes start at once. Raises SecretsError."""
    path = home / FILE_NAME
    try:
        if not path.exists():
            _create(path)
        raw = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
        keys = {name: bytes.fromhex(raw[name]) for name in ("id_key", "token_key", "cache_key")}
    except (OSError, msgspec.DecodeError, KeyError, ValueError) as error:
        raise SecretsError(
            f"{path} is unreadable or damaged: restore it, or remove it to start anew"
        ) from error
    if any(len(key) != KEY_BYTES for key in keys.values()):
        raise SecretsError(f"{path} is damaged: restore it, or remove it to start anew")
    return Secrets(**keys)


def _create(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = {name: secrets.token_hex(KEY_BYTES) for name in ("id_key", "token_key", "cache_key")}
    # Readable by the owner only, and a name that nobody else writes.
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{FILE_NAME}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(fresh))
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)  # Fails where another process was first: its secrets count.
    except FileExistsError:
        pass
    finally:
        Path(draft).unlink()
