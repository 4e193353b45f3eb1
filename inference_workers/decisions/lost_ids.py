"""Decides which ids an engine must have made where it names only the last of several.

The embedded server sends nothing while a character is incomplete, and then the whole character with
the id of its last token alone. The others follow from the bytes where there is only one way:

L1. They are the tokens whose bytes, in order, are the missing bytes, and as many as were made.
L2. A token can say nothing (a control token). So a way with fewer tokens is a second way.
L3. Two ways: unknown. Never a guess, because a takeover feeds these ids back.
"""

from collections.abc import Mapping
from typing import Final

# A character has at most four bytes; a run of incomplete ones is not worth a search.
MISSING_BYTES_MAX: Final = 16


def lost_ids(*, missing: bytes, count: int, id_of: Mapping[bytes, int]) -> tuple[int, ...] | None:
    """The `count` ids that say `missing`, or None where that has not exactly one answer."""
    if not 1 <= len(missing) <= MISSING_BYTES_MAX:
        return None
    ways = _ways(missing, count, id_of)
    return ways[0] if len(ways) == 1 and len(ways[0]) == count else None


def _ways(missing: bytes, count_max: int, id_of: Mapping[bytes, int]) -> list[tuple[int, ...]]:
    """Up to two ways to say the bytes with at most count_max tokens."""
    if not missing:
        return [()]
    if count_max == 0:
        return []
    found: list[tuple[int, ...]] = []
    for size in range(1, len(missing) + 1):
        first = id_of.get(missing[:size])
        if first is None:
            continue
        found += [(first, *rest) for rest in _ways(missing[size:], count_max - 1, id_of)]
        if len(found) > 1:
            return found[:2]
    return found
