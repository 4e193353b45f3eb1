"""The golden bytes: reading them, and printing the entries that the file lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from schemas.codec import SCHEMA_OF, Headers, encode
from tests.contracts.event_samples import SAMPLES

FILE: Final = Path(__file__).parent / "golden" / "events.v1.json"


class Golden(msgspec.Struct, frozen=True, kw_only=True):
    """A published record. `schema` is the event's schema number."""

    topic: str
    type: str
    schema: int
    headers: list[tuple[str, str]]
    body: str

    def wire(self) -> tuple[Headers, bytes]:
        """Headers and value as they lie on the log."""
        return [(name, content.encode()) for name, content in self.headers], self.body.encode()


def published() -> list[Golden]:
    """Every entry, oldest first."""
    return msgspec.json.decode(FILE.read_bytes(), type=list[Golden])


def current() -> list[Golden]:
    """The samples as today's code encodes them."""
    entries = []
    for topic, event in SAMPLES:
        body, headers = encode(event, event_id="e-1", cause_id="c-1", trace="t-1")
        entries.append(
            Golden(
                topic=topic.name,
                type=type(event).__name__,
                schema=SCHEMA_OF[type(event)],
                headers=[(name, content.decode()) for name, content in headers],
                body=body.decode(),
            )
        )
    return entries


if __name__ == "__main__":
    there = published() if FILE.exists() else []
    entries = there + [entry for entry in current() if entry not in there]
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(entries), indent=1) + b"\n")
    print(f"{len(entries)} entries, {len(entries) - len(there)} new")
