"""Reads the metadata of a GGUF file: keys and values, never a tensor. Quick, because a vocabulary
has 100,000 strings.
"""

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

GgufValue = int | float | bool | str | tuple["GgufValue", ...]

# Bounds against a damaged file, far above any real one.
_KEYS_MAX: Final = 10_000
_ARRAY_ITEMS_MAX: Final = 4_000_000
_ARRAY_DEPTH_MAX: Final = 3

_VERSIONS: Final = (2, 3)
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


class GgufDamagedError(ValueError):
    """The file is not GGUF of a known version, or ends too early."""


class _Cursor:
    """A place in the mapped file that moves with each read."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        piece = self._data[self._at : self._at + size]
        if len(piece) != size:
            raise GgufDamagedError(f"the file ends at byte {len(self._data)}, inside a value")
        self._at += size
        return piece

    def u32(self) -> int:
        return int(_U32.unpack(self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack(self.take(8))[0])

    def text(self) -> str:
        return self.take(self.u64()).decode("utf-8", "surrogateescape")

    def texts(self, count: int) -> tuple[str, ...]:
        """Many strings: most of the time is spent here, hence without a call for each."""
        data, at, unpack = self._data, self._at, _U64.unpack_from
        found = []
        for _ in range(count):
            start = at + 8
            at = start + unpack(data, at)[0]
            found.append(data[start:at].decode("utf-8", "surrogateescape"))
        if at > len(data):
            raise GgufDamagedError(f"the file ends at byte {len(data)}, inside a list of strings")
        self._at = at
        return tuple(found)

    def value(self, kind: int, depth: int = 0) -> GgufValue:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(depth)
        try:
            layout = "<" + _SCALARS[kind]
        except KeyError:
            raise GgufDamagedError(f"unknown value type {kind}") from None
        scalar: int | float | bool = struct.unpack(layout, self.take(struct.calcsize(layout)))[0]
        return scalar

    def _array(self, depth: int) -> GgufValue:
        kind, count = self.u32(), self.u64()
        if count > _ARRAY_ITEMS_MAX or depth >= _ARRAY_DEPTH_MAX:
            raise GgufDamagedError(f"an array of {count} items at depth {depth}")
        if kind == _STRING:
            return self.texts(count)
        if kind == _ARRAY:
            return tuple(self._array(depth + 1) for _ in range(count))
        try:
            layout = f"<{count}{_SCALARS[kind]}"
        except KeyError:
            raise GgufDamagedError(f"unknown item type {kind}") from None
        return struct.unpack(layout, self.take(struct.calcsize(layout)))


def read_metadata(path: Path) -> Mapping[str, GgufValue]:
    """All keys of the file's header. Bytes of a string that are not UTF-8 come as surrogate
    escapes. Raises GgufDamagedError, OSError.
    """
    with path.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise GgufDamagedError(f"{path.name} is empty") from None
        with data:
            cursor = _Cursor(data)
            if cursor.take(4) != b"GGUF":
                raise GgufDamagedError(f"{path.name} is not a GGUF file")
            version = cursor.u32()
            if version not in _VERSIONS:
                raise GgufDamagedError(f"GGUF version {version} is not known")
            cursor.u64()  # number of tensors
            keys = cursor.u64()
            if keys > _KEYS_MAX:
                raise GgufDamagedError(f"{keys} keys")
            try:
                return {cursor.text(): cursor.value(cursor.u32()) for _ in range(keys)}
            except struct.error as error:
                raise GgufDamagedError(f"{path.name}: {error}") from None
