"""What a viewer of a run is shown: the events that follow any cursor, live or in arrears.

A `Transcript` is one run as this edge holds it: the shared run fold, and for each accepted delta where it lay and how far the text
had come. From that alone every suffix can be told again, so one transcript serves all viewers and every resume.

  V1  Only what the run fold accepts is shown, in the order of the log.
  V2  `after(c)` gives exactly what was accepted after c: no gap, no repeat (I4). Deltas in arrears are joined; the joined event's
      position is that of its last record.
  V3  No two events of a run have the same position.
  V4  A run that is not admitted (refused, redirected) shows only its end.
  V5  A cursor below `floor` cannot be told from here: its marks were dropped to bound memory. Such a viewer gets a snapshot.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from edge.decisions.token_cursor import START, end_position, event_position
from schemas.events.tokens import AttemptStarted, RunEvent, RunQueued, TokensGenerated
from schemas.run_fold import NEW_RUN, Ending, RunState, fold
from schemas.vocabulary import FinishReason, RunStatus

MARKS_MAX: Final = 32_768
"""Accepted deltas whose place is kept, more than an answer of 30,000 tokens has; beyond it the older half is dropped (V5)."""
PIECE_CHARS_MAX: Final = 16_384
"""About how much text one joined delta carries, so that a viewer in arrears is fed in pieces that fit its buffer."""


class QueuedShown(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """run.queued"""

    position: int
    queued: RunQueued


class StartedShown(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """run.started"""

    position: int
    attempt: int
    model: str


class DeltaShown(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """message.delta: `count` tokens from `index` on."""

    position: int
    text: str
    index: int
    count: int


class SnapshotShown(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """run.snapshot: the whole text so far."""

    position: int
    text: str
    count: int


class EndedShown(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """run.ended"""

    position: int
    status: RunStatus
    finish_reason: FinishReason | None
    input_tokens: int
    output_tokens: int
    message_id: str | None


Shown = QueuedShown | StartedShown | DeltaShown | SnapshotShown | EndedShown


def joined(shown: Sequence[Shown]) -> list[Shown]:
    """The same with neighbouring deltas made one: a viewer gets in one event what was accepted in one turn (V2)."""
    if len(shown) < 2:
        return list(shown)
    made: list[Shown] = []
    run: list[DeltaShown] = []
    for one in (*shown, None):
        if isinstance(one, DeltaShown):
            run.append(one)
            continue
        if run:
            made.append(
                DeltaShown(
                    position=run[-1].position,
                    text="".join([delta.text for delta in run]),
                    index=run[0].index,
                    count=sum([delta.count for delta in run]),
                )
                if len(run) > 1
                else run[0]
            )
            run = []
        if one is not None:
            made.append(one)
    return made


@dataclass(frozen=True, slots=True)
class _Attempt:
    offset: int
    attempt: int
    tokens: int  # Accepted before it.


class Transcript:
    """One run from its mint offset on. Mutable: an answer of n deltas would otherwise cost n copies of its marks."""

    __slots__ = (
        "_attempts",
        "_chars",
        "_floor_place",
        "_offsets",
        "_tokens",
        "end",
        "ended_offset",
        "floor",
        "last_offset",
        "queued_ms",
        "queued_offset",
        "state",
    )

    def __init__(self) -> None:
        self.state: RunState = NEW_RUN
        self.queued_offset = -1
        self.queued_ms = 0
        self.ended_offset = -1
        self.last_offset = -1
        self.end = START
        """The position of the last event: who has it has everything so far."""
        self.floor = START
        """Cursors below this position cannot be told from here."""
        self._floor_place = (0, 0)
        # Parallel, one entry for each accepted delta: its offset, and tokens and characters once it is in.
        self._offsets = array("q")
        self._tokens = array("I")
        self._chars = array("I")
        self._attempts: list[_Attempt] = []

    def accept(self, offset: int, appended_ms: int, event: RunEvent) -> tuple[Shown, ...]:
        """Fold one record; what it shows to a viewer that is up to date (V1)."""
        before = self.state
        after, counted = fold(before, event)
        if not counted:
            return ()
        self.state = after
        self.last_offset = offset
        if type(event) is TokensGenerated:
            self._mark(offset, after.n, len(after.text))
            self.end = position = event_position(offset)
            return (
                DeltaShown(
                    position=position, text=event.text, index=event.index, count=event.count
                ),
            )
        shown: list[Shown] = []
        if isinstance(event, RunQueued):
            self.queued_offset, self.queued_ms = offset, appended_ms
            shown.append(QueuedShown(position=event_position(offset), queued=event))
        elif isinstance(event, AttemptStarted):
            self._attempts.append(_Attempt(offset, event.attempt, after.n))
            shown.append(self._started(self._attempts[-1]))
        if after.ended:
            self.ended_offset = offset
            shown.append(self._ended())
        if shown:
            self.end = shown[-1].position
        return tuple(shown)

    def _mark(self, offset: int, tokens: int, chars: int) -> None:
        if len(self._offsets) >= MARKS_MAX:
            half = MARKS_MAX // 2
            self.floor = event_position(self._offsets[half - 1])
            self._floor_place = self._tokens[half - 1], self._chars[half - 1]
            del self._offsets[:half], self._tokens[:half], self._chars[:half]
        self._offsets.append(offset)
        self._tokens.append(tokens)
        self._chars.append(chars)

    def tells(self, cursor: int) -> bool:
        """Whether everything after `cursor` can be told from here (V5). Otherwise: `snapshot`, and what follows that."""
        return cursor >= self.floor

    def after(self, cursor: int, *, chars_max: int = PIECE_CHARS_MAX) -> tuple[Shown, ...]:
        """What follows `cursor`, in order, with deltas joined, up to about `chars_max` characters of text (V2).

        Nothing left out: the last event's position is `end`. Otherwise ask again from there. Needs `tells(cursor)`.
        """
        assert self.tells(cursor), "V5"
        state = self.state
        shown: list[Shown] = []
        if self.queued_offset >= 0 and event_position(self.queued_offset) > cursor:
            assert state.queued is not None, "queued_offset is set with it"
            shown.append(
                QueuedShown(position=event_position(self.queued_offset), queued=state.queued)
            )
        chars_left = chars_max
        at = self._place(cursor)
        for mark in self._attempts:
            if event_position(mark.offset) <= cursor:
                continue
            at, chars_left = self._deltas(shown, at, mark, chars_left)
            if at[0] < mark.tokens:
                return tuple(shown)
            shown.append(self._started(mark))
        at, _ = self._deltas(shown, at, None, chars_left)
        if at[0] == state.n and state.ended and end_position(self.ended_offset) > cursor:
            shown.append(self._ended())
        return tuple(shown)

    def _place(self, cursor: int) -> tuple[int, int]:
        """Tokens and characters that a client with this cursor has."""
        found = bisect_right(self._offsets, cursor // 2)
        return (self._tokens[found - 1], self._chars[found - 1]) if found else self._floor_place

    def _deltas(
        self, shown: list[Shown], at: tuple[int, int], until: _Attempt | None, chars_left: int
    ) -> tuple[tuple[int, int], int]:
        """Join the deltas from `at` up to an attempt or the end, or to the record that passes `chars_left`."""
        tokens, chars = at
        tokens_to = self.state.n if until is None else until.tokens
        if tokens >= tokens_to or chars_left <= 0:
            return at, chars_left
        last = bisect_right(self._tokens, tokens_to) - 1
        cut = min(last, bisect_right(self._chars, chars + chars_left))
        reached = self._tokens[cut], self._chars[cut]
        shown.append(
            DeltaShown(
                position=event_position(self._offsets[cut]),
                text=self.state.text[chars : reached[1]],
                index=tokens,
                count=reached[0] - tokens,
            )
        )
        left = chars_left - (reached[1] - chars) if reached[0] == tokens_to else 0
        return reached, left

    def snapshot(self) -> SnapshotShown:
        """The whole text as it stands; what follows it is `after(its position)`."""
        position = event_position(self.ended_offset) if self.state.ended else self.end
        return SnapshotShown(position=position, text=self.state.text, count=self.state.n)

    def _started(self, mark: _Attempt) -> StartedShown:
        assert self.state.queued is not None, "R3"
        return StartedShown(
            position=event_position(mark.offset),
            attempt=mark.attempt,
            model=self.state.queued.model,
        )

    def _ended(self) -> EndedShown:
        state = self.state
        admitted = state.ending is Ending.FINISHED and state.queued is not None
        return EndedShown(
            position=end_position(self.ended_offset),
            status=state.status,
            finish_reason=state.finish_reason,
            input_tokens=state.input_tokens or 0,
            output_tokens=state.n,
            message_id=state.queued.assistant_message_id if admitted and state.queued else None,
        )
