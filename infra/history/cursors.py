"""Opaque cursors of listings: text that only its own listing reads back."""

from __future__ import annotations

import base64
import binascii
from typing import Final

import msgspec

from infra.history import BadCursor

CURSOR_CHARS_MAX: Final = 256


class ChatsAfter(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Chats older than this one, by (updated_ms, chat_id) downwards."""

    updated_ms: int
    chat_id: str


class MessagesAfter(msgspec.Struct, frozen=True, array_like=True, tag="m"):
    """Messages below this one on the branch."""

    chat_id: str
    message_id: str


_Cursor = ChatsAfter | MessagesAfter
_DECODER: Final = msgspec.json.Decoder(_Cursor)


def write_cursor(cursor: _Cursor) -> str:
    """The text that a client gets."""
    return base64.urlsafe_b64encode(msgspec.json.encode(cursor)).rstrip(b"=").decode()


def read_chats_cursor(text: str) -> ChatsAfter:
    """Raises BadCursor."""
    cursor = _read(text)
    if not isinstance(cursor, ChatsAfter):
        raise BadCursor("a cursor of another listing")
    return cursor


def read_messages_cursor(text: str, *, chat_id: str) -> MessagesAfter:
    """Raises BadCursor, also for a cursor of another chat."""
    cursor = _read(text)
    if not isinstance(cursor, MessagesAfter) or cursor.chat_id != chat_id:
        raise BadCursor("a cursor of another listing")
    return cursor


def _read(text: str) -> _Cursor:
    if len(text) > CURSOR_CHARS_MAX or not text.isascii():
        raise BadCursor("no cursor")
    try:
        cursor = _DECODER.decode(
            base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        )
    except (binascii.Error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadCursor("no cursor") from error
    if isinstance(cursor, ChatsAfter) and not 0 <= cursor.updated_ms < 2**63:
        raise BadCursor("no cursor")
    return cursor
