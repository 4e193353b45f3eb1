"""What a viewer is shown from any cursor on (rules V1 to V5)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.decisions import viewer
from edge.decisions.token_cursor import (
    START,
    BadCursor,
    end_position,
    event_position,
    read_cursor,
    run_digest,
    write_cursor,
)
from edge.decisions.viewer import (
    DeltaShown,
    EndedShown,
    QueuedShown,
    Shown,
    SnapshotShown,
    StartedShown,
    Transcript,
    joined,
)
from schemas.events.tokens import (
    AttemptStarted,
    Refusal,
    RunCancelled,
    RunEnded,
    RunEvent,
    TokensGenerated,
)
from schemas.vocabulary import (
    CancelReason,
    EndCause,
    EndWriter,
    FinishReason,
    RefusalReason,
    RunStatus,
)
from tests.run_samples import queued

RUN = "run_a"
QUEUED = queued(RUN, chat_id="chat_a", user_message_id="msg_u", assistant_message_id="msg_a")


def started(attempt: int) -> AttemptStarted:
    return AttemptStarted(
        run_id=RUN, attempt=attempt, nonce=f"n{attempt}", worker_id="w", input_tokens=3
    )


def delta(attempt: int, index: int, text: str) -> TokensGenerated:
    return TokensGenerated(run_id=RUN, nonce=f"n{attempt}", index=index, count=1, text=text)


def ended(attempt: int, end: int) -> RunEnded:
    return RunEnded(
        run_id=RUN, cause=EndCause.STOP, writer=EndWriter.WORKER, nonce=f"n{attempt}", end=end
    )


def told(events: Sequence[tuple[int, RunEvent]]) -> tuple[Transcript, list[Shown]]:
    transcript = Transcript()
    shown: list[Shown] = []
    for offset, event in events:
        shown.extend(transcript.accept(offset, 1000 + offset, event))
    return transcript, shown


def all_after(transcript: Transcript, cursor: int, chars_max: int = 8) -> list[Shown]:
    """As a stream asks: in pieces, until nothing is left."""
    found: list[Shown] = []
    while transcript.end > cursor:
        piece = transcript.after(cursor, chars_max=chars_max)
        assert piece, "something is left, so something is shown"
        found.extend(piece)
        cursor = piece[-1].position
    return found


def text_of(shown: Sequence[Shown]) -> str:
    return "".join(one.text for one in shown if isinstance(one, DeltaShown))


@st.composite
def courses(draw: st.DrawFn) -> list[tuple[int, RunEvent]]:
    """Runs with takeovers, foreign records between, zombies' writes and duplicates."""
    events: list[RunEvent] = [QUEUED]
    attempt, n = 0, 0
    for _ in range(draw(st.integers(1, 4))):
        attempt += 1
        events.append(started(attempt))
        for _ in range(draw(st.integers(0, 12))):
            text = draw(st.sampled_from(["", "a", "bc", "d" * 9, "é", "\n"]))
            events.append(delta(attempt, n, text))
            n += 1
            if draw(st.booleans()):
                events.append(draw(st.sampled_from(events)))  # A replay.
            if attempt > 1 and draw(st.booleans()):
                events.append(delta(attempt - 1, n, "zombie"))
    if draw(st.booleans()):
        events.append(ended(attempt, n))
    offset, placed = draw(st.integers(0, 5)), []
    for event in events:
        placed.append((offset, event))
        offset += draw(st.integers(1, 3))
    return placed


@given(courses(), st.integers(1, 40))
def test_every_cursor_gives_exactly_what_follows_it(
    course: list[tuple[int, RunEvent]], chars_max: int
) -> None:
    transcript, live = told(course)
    positions = [one.position for one in live]
    assert positions == sorted(set(positions)), "V3"
    for at, cursor in enumerate([START, *positions]):
        rest = all_after(transcript, cursor, chars_max)
        following = live[at:]
        assert text_of(rest) == text_of(following)
        kept = [one for one in rest if not isinstance(one, DeltaShown)]
        assert kept == [one for one in following if not isinstance(one, DeltaShown)]
        assert [one.position for one in rest] == sorted({one.position for one in rest})
        index = None
        for one in rest:
            if isinstance(one, DeltaShown):
                assert index is None or one.index == index, "indices are dense"
                index = one.index + one.count
        if rest:
            assert rest[-1].position == transcript.end


@given(courses())
def test_joining_changes_no_text_and_no_order(course: list[tuple[int, RunEvent]]) -> None:
    _, live = told(course)
    made = joined(live)
    assert text_of(made) == text_of(live)
    assert [one for one in made if not isinstance(one, DeltaShown)] == [
        one for one in live if not isinstance(one, DeltaShown)
    ]
    assert all(
        not (isinstance(a, DeltaShown) and isinstance(b, DeltaShown)) for a, b in pairwise(made)
    )
    if live:
        assert made[-1].position == live[-1].position


@given(courses())
def test_a_cursor_whose_marks_were_dropped_gets_a_snapshot_and_nothing_twice(
    course: list[tuple[int, RunEvent]],
) -> None:
    kept = viewer.MARKS_MAX
    viewer.MARKS_MAX = 4  # type: ignore[misc]
    try:
        transcript, live = told(course)
        for at, cursor in enumerate([START, *(one.position for one in live)]):
            if transcript.tells(cursor):
                rest = all_after(transcript, cursor)
                assert text_of(rest) == text_of(live[at:])
                assert [one for one in rest if not isinstance(one, DeltaShown)] == [
                    one for one in live[at:] if not isinstance(one, DeltaShown)
                ]
            else:
                assert cursor < transcript.floor
                snapshot = transcript.snapshot()
                assert snapshot.text == transcript.state.text
                following = all_after(transcript, snapshot.position)
                assert not text_of(following)
    finally:
        viewer.MARKS_MAX = kept  # type: ignore[misc]


def test_a_run_cancelled_before_it_was_queued_shows_two_events_with_two_ids() -> None:
    cancel = RunCancelled(run_id=RUN, reason=CancelReason.USER)
    transcript, shown = told([(4, cancel), (9, QUEUED)])
    assert [type(one) for one in shown] == [QueuedShown, EndedShown]
    assert [one.position for one in shown] == [event_position(9), end_position(9)]
    (last,) = all_after(transcript, event_position(9))
    assert isinstance(last, EndedShown)
    assert (last.status, last.finish_reason) == (RunStatus.CANCELLED, FinishReason.CANCELLED)


def test_a_remembered_cancel_alone_shows_nothing() -> None:
    transcript, shown = told([(4, RunCancelled(run_id=RUN, reason=CancelReason.USER))])
    assert shown == []
    assert transcript.end == START


def test_a_refused_run_shows_only_its_end() -> None:
    refused = RunEnded(
        run_id=RUN,
        cause=EndCause.REFUSED,
        writer=EndWriter.ADMISSION,
        refusal=Refusal(reason=RefusalReason.OVERLOADED),
    )
    transcript, shown = told([(3, refused)])
    assert [type(one) for one in shown] == [EndedShown]
    assert all_after(transcript, START) == shown
    assert isinstance(shown[0], EndedShown)
    assert (shown[0].status, shown[0].finish_reason) == (RunStatus.REFUSED, None)
    assert shown[0].message_id is None


def test_a_snapshot_is_followed_by_what_comes_after_it() -> None:
    transcript, _ = told([(0, QUEUED), (1, started(1)), (2, delta(1, 0, "ab"))])
    snapshot = transcript.snapshot()
    assert snapshot == SnapshotShown(position=event_position(2), text="ab", count=1)
    transcript.accept(5, 0, delta(1, 1, "c"))
    assert text_of(all_after(transcript, snapshot.position)) == "c"
    transcript.accept(6, 0, ended(1, 2))
    assert isinstance(all_after(transcript, transcript.snapshot().position)[-1], EndedShown)


def test_a_takeover_shows_its_start_between_the_deltas() -> None:
    transcript, _ = told(
        [
            (0, QUEUED),
            (1, started(1)),
            (2, delta(1, 0, "a")),
            (3, started(2)),
            (4, delta(2, 1, "b")),
        ]
    )
    rest = all_after(transcript, event_position(1))
    assert [type(one) for one in rest] == [DeltaShown, StartedShown, DeltaShown]


def test_an_event_id_names_its_run() -> None:
    cursor = write_cursor(run_digest("run_a"), 1234)
    assert read_cursor(cursor, "run_a") == 1234
    with pytest.raises(BadCursor):
        read_cursor(cursor, "run_b")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-",
        "12",
        "1-" + run_digest(RUN) + "0",
        *(
            number + "-" + run_digest(RUN)
            for number in ("zz", "0x1", "01", "-1", "A", "f" * 16, " 1", "1_0", "")
        ),
    ],
)
def test_what_was_never_handed_out_is_no_event_id(text: str) -> None:
    with pytest.raises(BadCursor):
        read_cursor(text, RUN)


@given(st.integers(0, 2**48))
def test_every_event_id_reads_back(position: int) -> None:
    assert read_cursor(write_cursor(run_digest(RUN), position), RUN) == position
