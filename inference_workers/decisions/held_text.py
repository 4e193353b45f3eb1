"""Decides which text of an answer may be said, and which is held back.

An engine makes pieces: the bytes of one token or of a few. The rules:

H1. What is said ends where a piece ended, and is whole characters: half a character is held.
H2. No part of a stop string is ever said, and what was said never ends in the beginning of one: it
    is held until it is clear. So a later attempt, which searches only what it makes itself, finds
    every stop string, also where it says other words than the attempt before.
H3. The first piece that completes a stop string ends the answer: everything before the earliest
    one that is complete is said, and nothing after. The piece that it
    begins in counts if some of its text was said; its ids are then not exact.
H4. At the end without a stop string all whole characters are said. Half a character is dropped
    with the tokens that say nothing else: they are in no count.
H5. Ids are exact until a piece comes without them, and never again after it.
H6. Every release counts at least one token and has some text.

Bytes, not characters, are searched: no UTF-8 text occurs in another except at a character.
"""

from codecs import utf_8_decode
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """`count` tokens that say `data`; `ids` None where they are not known exactly."""

    data: bytes
    ids: tuple[int, ...] | None
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldText:
    """What is held back. `index` is the number of tokens already said in the whole answer."""

    stop: tuple[bytes, ...] = ()
    index: int = 0
    pieces: tuple[Piece, ...] = ()
    exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Text to be said now: `count` tokens, the first of which has `index`."""

    text: str
    ids: tuple[int, ...] | None
    index: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """The outcome of one piece. With `stop_match` the answer is over."""

    held: HeldText
    release: Release | None = None
    stop_match: str | None = None


def hold_nothing(*, stop: tuple[str, ...], index: int, exact: bool) -> HeldText:
    """The state before the first piece of an attempt."""
    return HeldText(stop=tuple(text.encode() for text in stop), index=index, exact=exact)


def hear(held: HeldText, piece: Piece) -> Heard:
    """Take the next piece."""
    if not held.pieces and not held.stop and piece.data.isascii() and piece.data:
        return _said(held, (piece,))  # By far the commonest case, and nothing to search.
    pieces = (*held.pieces, piece)
    data = b"".join(each.data for each in pieces)
    match = _earliest_stop(data, held.stop, news=len(piece.data))
    if match is not None:
        at, stop = match
        heard = _said_until(held, pieces, data, at)
        return replace(heard, stop_match=stop.decode())
    clear = data and _whole_until(data) == len(data) and not _may_begin_stop(data, held.stop)
    return _said(held, pieces) if clear else Heard(held=replace(held, pieces=pieces))


def end(held: HeldText) -> Heard:
    """No more pieces come. H4."""
    data = b"".join(each.data for each in held.pieces)
    return _said_until(held, held.pieces, data, _whole_until(data))


def _said(held: HeldText, pieces: tuple[Piece, ...]) -> Heard:
    """Say these and hold nothing. Where only some of them have exact ids, none are given: H5."""
    exact = held.exact and all(each.ids is not None for each in pieces)
    count = sum(each.count for each in pieces)
    release = Release(
        text=b"".join(each.data for each in pieces).decode("utf-8", "replace"),
        ids=tuple(i for each in pieces for i in each.ids or ()) if exact else None,
        index=held.index,
        count=count,
    )
    assert count >= 1, "H6: a release without a token"
    assert release.ids is None or len(release.ids) == count, "as many ids as tokens"
    return Heard(
        held=HeldText(stop=held.stop, index=held.index + count, exact=exact),
        release=release,
    )


def _said_until(held: HeldText, pieces: tuple[Piece, ...], data: bytes, until: int) -> Heard:
    """Say exactly data[:until], in the middle of a piece if need be, and drop the rest."""
    said: list[Piece] = []
    end_of_said = 0
    for piece in pieces:
        if end_of_said >= until:
            break
        stays = piece.data[: until - end_of_said]
        exact = len(stays) == len(piece.data)
        said.append(piece if exact else replace(piece, data=stays, ids=None))
        end_of_said += len(stays)
    if not any(piece.data for piece in said):
        return Heard(held=replace(held, pieces=()))
    return _said(held, tuple(said))


def _earliest_stop(data: bytes, stop: tuple[bytes, ...], *, news: int) -> tuple[int, bytes] | None:
    """Where the first stop string begins that ends in the last `news` bytes, and which; of two at
    one place the longer. One that ended before would have been found before.
    """
    if not stop:
        return None
    start = max(0, len(data) - news - max(map(len, stop)) + 1)
    found = [(at, -len(text), text) for text in stop if (at := data.find(text, start)) >= 0]
    if not found:
        return None
    at, _, text = min(found)
    return at, text


def _may_begin_stop(data: bytes, stop: tuple[bytes, ...]) -> bool:
    """Whether data ends in the beginning of a stop string."""
    return any(data.endswith(text[:size]) for text in stop for size in range(1, len(text)))


def _whole_until(data: bytes) -> int:
    """Bytes up to the last whole character. Bytes that can never be one count as whole."""
    return utf_8_decode(data, "replace", False)[1]
