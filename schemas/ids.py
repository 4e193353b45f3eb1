"""Ids: what they carry, how they are minted, and how a foreign or made-up one is refused before any I/O.

A run id is an address: (topic epoch, partition, mint offset, random, tag). The mint offset is the end offset of the token
partition that the minting edge had seen, so every record of the run lies at or after it and any reader folds a run from there:
no index, no clock, no lookup.

The tag is a keyed MAC over the id's body *and the account*. Chat and message ids carry one too, so an id of somebody else
looks exactly like one that does not exist.

Event ids of derived events come from (cause id, kind, ordinal): deciding again after a crash emits the same ids.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from base64 import b32encode
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

RUN_PREFIX: Final = "run_"
CHAT_PREFIX: Final = "chat_"
MESSAGE_PREFIX: Final = "msg_"

RANDOM_BYTES: Final = 10
TAG_BYTES: Final = 6
_EPOCH_BYTES: Final = 2
_PARTITION_BYTES: Final = 2
_OFFSET_BYTES: Final = 6
_RUN_BODY_BYTES: Final = _EPOCH_BYTES + _PARTITION_BYTES + _OFFSET_BYTES + RANDOM_BYTES
EPOCH_MAX: Final = 2 ** (8 * _EPOCH_BYTES) - 1
PARTITION_MAX: Final = 2 ** (8 * _PARTITION_BYTES) - 1
MINT_OFFSET_MAX: Final = 2 ** (8 * _OFFSET_BYTES) - 1
_BODY: Final = re.compile("[a-z2-7]+")
_DIGITS: Final = str.maketrans(
    "abcdefghijklmnopqrstuvwxyz234567", "0123456789abcdefghijklmnopqrstuv"
)


class BadId(ValueError):
    """The text is not an id of the expected kind. Carries no detail: a caller answers 404."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAddress:
    """What a run id says: where the run's records are, from which offset on."""

    epoch: int
    partition: int
    mint_offset: int


def _encode(prefix: str, raw: bytes) -> str:
    return prefix + b32encode(raw).decode("ascii").rstrip("=").lower()


def _decode(prefix: str, text: str, length: int) -> bytes:
    """The bytes of an id; readers of the log do this for every run that they meet, so it is quick. One spelling is right."""
    chars = -(-length * 8 // 5)
    body = text[len(prefix) :]
    if not text.startswith(prefix) or len(body) != chars or _BODY.fullmatch(body) is None:
        raise BadId(prefix)
    value = int(body.translate(_DIGITS), 32)
    unused_bits = chars * 5 - length * 8
    # Refuses spellings that differ only in the unused bits of the last character.
    if value & ((1 << unused_bits) - 1):
        raise BadId(prefix)
    return (value >> unused_bits).to_bytes(length, "big")


def _tag(key: bytes, account_id: str, prefix: str, body: bytes) -> bytes:
    message = prefix.encode() + len(body).to_bytes(2, "big") + body + account_id.encode()
    return hmac.digest(key, message, "sha256")[:TAG_BYTES]


def mint_run_id(*, key: bytes, account_id: str, address: RunAddress, random: bytes) -> str:
    """A run id for `account_id` at `address`; `random` is RANDOM_BYTES fresh random bytes."""
    assert len(random) == RANDOM_BYTES, "RANDOM_BYTES bytes of randomness"
    body = (
        address.epoch.to_bytes(_EPOCH_BYTES, "big")
        + address.partition.to_bytes(_PARTITION_BYTES, "big")
        + address.mint_offset.to_bytes(_OFFSET_BYTES, "big")
        + random
    )
    return _encode(RUN_PREFIX, body + _tag(key, account_id, RUN_PREFIX, body))


def run_address(run_id: str) -> RunAddress:
    """Read the address out of a run id. Raises BadId. Does not check the tag: see `belongs_to`."""
    raw = _decode(RUN_PREFIX, run_id, _RUN_BODY_BYTES + TAG_BYTES)
    offset_at = _EPOCH_BYTES + _PARTITION_BYTES
    return RunAddress(
        epoch=int.from_bytes(raw[:_EPOCH_BYTES], "big"),
        partition=int.from_bytes(raw[_EPOCH_BYTES:offset_at], "big"),
        mint_offset=int.from_bytes(raw[offset_at : offset_at + _OFFSET_BYTES], "big"),
    )


def mint_chat_id(*, key: bytes, account_id: str, random: bytes) -> str:
    """A chat id for `account_id`."""
    return _mint_plain(CHAT_PREFIX, key=key, account_id=account_id, random=random)


def mint_message_id(*, key: bytes, account_id: str, random: bytes) -> str:
    """A message id for `account_id`."""
    return _mint_plain(MESSAGE_PREFIX, key=key, account_id=account_id, random=random)


def _mint_plain(prefix: str, *, key: bytes, account_id: str, random: bytes) -> str:
    assert len(random) == RANDOM_BYTES, "RANDOM_BYTES bytes of randomness"
    return _encode(prefix, random + _tag(key, account_id, prefix, random))


def belongs_to(id_text: str, prefix: str, *, key: bytes, account_id: str) -> bool:
    """Whether `id_text` is a well-formed id of this kind that was minted for `account_id`."""
    body_length = _RUN_BODY_BYTES if prefix == RUN_PREFIX else RANDOM_BYTES
    try:
        raw = _decode(prefix, id_text, body_length + TAG_BYTES)
    except BadId:
        return False
    body, tag = raw[:body_length], raw[body_length:]
    return hmac.compare_digest(tag, _tag(key, account_id, prefix, body))


def derived_event_id(cause_id: str, kind: str, ordinal: int = 0) -> str:
    """The id of the `ordinal`-th event of `kind` that follows from the event `cause_id`. 32 hex digits."""
    text = f"{cause_id}\x1f{kind}\x1f{ordinal}".encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


@lru_cache(maxsize=16_384)
def partition_for_key(key: str, partitions: int) -> int:
    """The partition of a keyed record: murmur2 as Kafka's own default partitioner, so foreign clients agree."""
    return (_murmur2(key.encode()) & 0x7FFFFFFF) % partitions


def _murmur2(data: bytes) -> int:
    multiplier, mask = 0x5BD1E995, 0xFFFFFFFF
    length = len(data)
    value = (0x9747B28C ^ length) & mask
    whole = length & ~3
    for at in range(0, whole, 4):
        block = int.from_bytes(data[at : at + 4], "little") * multiplier & mask
        block = (block ^ (block >> 24)) * multiplier & mask
        value = (value * multiplier & mask) ^ block
    if rest := data[whole:]:
        value = (value ^ int.from_bytes(rest, "little")) * multiplier & mask
    value = (value ^ (value >> 13)) * multiplier & mask
    return value ^ (value >> 15)
