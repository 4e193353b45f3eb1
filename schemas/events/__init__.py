"""Every event, one module a topic family. An event is a past-tense fact; a command never touches a topic.

Within one schema number only optional fields with defaults are added, and readers ignore fields that they do not know.
No event carries a clock reading: "when" is the append time that the broker stamps on the record.
"""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The root of all events: immutable, keyword-only, compared by value."""


class Part(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A value inside an event."""
