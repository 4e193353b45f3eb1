"""Which text may be said: rules H1 to H6, over any text in any pieces."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from inference_workers.decisions.held_text import Heard, Piece, Release, end, hear, hold_nothing

# Few letters, so that stop strings begin often, and characters of one to four bytes.
TEXT = st.text(alphabet="abA \n\u00e9\u20ac\U0001f600", max_size=40)
STOPS = st.lists(st.text(alphabet="abA\u20ac\U0001f600", min_size=1, max_size=4), max_size=4)


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[Piece]]:
    """A text as the pieces of one token each, or of a few without ids."""
    text = draw(TEXT)
    data = text.encode()
    cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=20)) | {0, len(data)})
    pieces = []
    for start, stop in pairwise(cuts):
        count = draw(st.sampled_from((1, 1, 1, 2)))
        ids = (start,) if count == 1 else None
        pieces.append(Piece(data=data[start:stop], ids=ids, count=count))
        if draw(st.integers(0, 9)) == 0:
            pieces.append(Piece(data=b"", ids=(999,), count=1))  # a token that says nothing
    return text, pieces


def play(pieces: list[Piece], stop: tuple[str, ...]) -> tuple[list[Release], str | None]:
    held = hold_nothing(stop=stop, index=0, exact=True)
    said: list[Release] = []
    for piece in pieces:
        heard = hear(held, piece)
        held = heard.held
        said += [heard.release] if heard.release else []
        if heard.stop_match is not None:
            return said, heard.stop_match
    last = end(held)
    said += [last.release] if last.release else []
    return said, None


@given(cut_texts(), STOPS)
@example(
    (
        "A\u20acA",
        [
            Piece(data=b"A\xe2\x82\xac", ids=(0,), count=1),
            Piece(data=b"A", ids=(4,), count=1),
        ],
    ),
    ["\u20ac", "A\u20acA"],
)
def test_exactly_what_precedes_the_first_stop_string_is_said(
    cut: tuple[str, list[Piece]], stops: list[str]
) -> None:
    text, pieces = cut
    said, match = play(pieces, tuple(stops))
    # The first piece that completes any stop string decides; of those complete by then the earliest counts (H3).
    places: list[int] = []
    heard = b""
    for piece in pieces:
        heard += piece.data
        known = heard.decode(errors="ignore")
        places = places or [known.find(stop) for stop in stops if stop in known]
    until = min(places, default=len(text))
    assert "".join(release.text for release in said) == text[:until]
    assert (match is not None) == bool(places)
    if match is not None:
        assert text.startswith(match, until)


@given(cut_texts(), STOPS)
def test_what_was_said_never_ends_in_the_beginning_of_a_stop_string(
    cut: tuple[str, list[Piece]], stops: list[str]
) -> None:
    """H2, at every place where another attempt could take over: not after the end."""
    _, pieces = cut
    held = hold_nothing(stop=tuple(stops), index=0, exact=True)
    heard_text = ""
    for piece in pieces:
        heard = hear(held, piece)
        held = heard.held
        if heard.stop_match is not None:
            break
        heard_text += heard.release.text if heard.release else ""
        beginnings = [stop[:size] for stop in stops for size in range(1, len(stop) + 1)]
        assert not any(heard_text.endswith(beginning) for beginning in beginnings)


@given(cut_texts(), STOPS)
def test_counts_are_dense_and_ids_are_exact_or_none(
    cut: tuple[str, list[Piece]], stops: list[str]
) -> None:
    _, pieces = cut
    said, _ = play(pieces, tuple(stops))
    place, exact = 0, True
    for release in said:
        assert release.index == place
        assert release.count >= 1
        assert release.text
        exact = exact and release.ids is not None
        assert (release.ids is not None) == exact, "H5"
        place += release.count
    assert place <= sum(piece.count for piece in pieces)
    ids = [i for release in said for i in release.ids or ()]
    assert ids == [i for piece in pieces for i in piece.ids or ()][: len(ids)]


def test_a_character_over_three_tokens_is_said_once_and_counted_as_three() -> None:
    held = hold_nothing(stop=(), index=7, exact=True)
    outcomes: list[Heard] = []
    for place, byte in enumerate((b"\xf0\x9f", b"\x98", b"\x80")):
        outcomes.append(hear(held, Piece(data=byte, ids=(place,), count=1)))
        held = outcomes[-1].held
    assert [heard.release for heard in outcomes[:2]] == [None, None]
    assert outcomes[2].release == Release(text="\U0001f600", ids=(0, 1, 2), index=7, count=3)


def test_half_a_character_at_the_end_is_in_no_count() -> None:
    held = hear(
        hold_nothing(stop=(), index=0, exact=True), Piece(data=b"\xf0\x9f", ids=(1,), count=1)
    ).held
    assert end(held).release is None


def test_a_word_whose_token_also_begins_a_character_is_not_lost_at_the_end() -> None:
    held = hear(
        hold_nothing(stop=(), index=0, exact=True), Piece(data=b"yes\xf0", ids=(1,), count=1)
    ).held
    assert end(held).release == Release(text="yes", ids=None, index=0, count=1)


def test_bytes_that_can_never_be_a_character_do_not_hold_up_the_rest() -> None:
    held = hold_nothing(stop=(), index=0, exact=True)
    heard = hear(held, Piece(data=b"a\xff b", ids=(1,), count=1))
    assert heard.release is not None
    assert heard.release.text == "a\ufffd b"
