"""Which ids an engine left out: rules L1 to L3."""

from inference_workers.decisions.lost_ids import MISSING_BYTES_MAX, lost_ids

FACE = b"\xf0\x9f\x98"


def test_one_way_is_the_answer() -> None:
    assert lost_ids(missing=FACE, count=2, id_of={b"\xf0\x9f": 5, b"\x98": 6}) == (5, 6)


def test_two_ways_are_no_answer() -> None:
    id_of = {b"\xf0": 1, b"\xf0\x9f": 5, b"\x98": 6, b"\x9f\x98": 7}
    assert lost_ids(missing=FACE, count=2, id_of=id_of) is None


def test_a_way_with_fewer_tokens_is_a_second_way_because_a_token_can_say_nothing() -> None:
    id_of = {b"\xf0\x9f": 5, b"\x98": 6, FACE: 8}
    assert lost_ids(missing=FACE, count=2, id_of=id_of) is None
    assert lost_ids(missing=FACE, count=1, id_of=id_of) == (8,)


def test_no_way_and_nothing_missing_are_no_answer() -> None:
    assert lost_ids(missing=FACE, count=2, id_of={b"\xf0": 1}) is None
    assert lost_ids(missing=b"", count=1, id_of={}) is None
    assert lost_ids(missing=b"a" * (MISSING_BYTES_MAX + 1), count=99, id_of={b"a": 1}) is None
