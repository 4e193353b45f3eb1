"""When an answer that repeats itself is ended: rules R1 to R4."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_workers.decisions.repetition import (
    CYCLE_TOKENS_MAX,
    REPEATED_TOKENS_MIN,
    REPEATS_MIN,
    repeats,
    said_so_far,
    say,
)
from infra.models import PromptModel, load_model
from infra.models.tokenizer import token_bytes

LOOP = " I'm glad to have you as a human. I'm here to help."
ROOT = Path(__file__).parents[2]

BENIGN = {
    "list": "".join(f"{n}. Wash the dishes before step {n + 1}.\n" for n in range(60)),
    "bullets": "".join(f"- the {word} is red\n" for word in ("cat", "dog", "owl", "hen")) * 3,
    "table": "| a | b | product |\n|---|---|---|\n"
    + "".join(f"| {a} | {b} | {a * b} |\n" for a in range(1, 8) for b in range(1, 8)),
    "ruler": "-" * 120 + "\n" + "=" * 120 + "\n",
    "csv": "".join(f"2024-01-{day:02},0,0,0,0,0,0\n" for day in range(1, 29)),
    "json": "[" + ",".join(f'{{"id": {n}, "tags": [], "score": 0.0}}' for n in range(40)) + "]",
    "identity": "".join(
        " ".join("1" if row == column else "0" for column in range(12)) + "\n" for row in range(12)
    ),
    "refrain": ("Row, row, row your boat,\nGently down the stream.\nMerrily, merrily, merrily, "
                "merrily,\nLife is but a dream.\n") * 3,
    "laugh": "ha" * 100,
    "code": (ROOT / "inference_workers" / "decisions" / "repetition.py").read_text(),
    "toml": (ROOT / "infra" / "policies.toml").read_text() * 2,
    "prose": (ROOT / "ARCHITECTURE.md").read_text(),
}  # fmt: skip


@cache
def model() -> PromptModel:
    return load_model("smollm2-135m")


def model_text(i: int) -> str:
    """What one token says; halves of characters as marks, which is enough to tell repetition."""
    return _bytes_of()[i].decode("utf-8", "replace")


@cache
def _bytes_of() -> tuple[bytes, ...]:
    return token_bytes(model().vocabulary)


@pytest.mark.parametrize("kind", BENIGN)
@pytest.mark.parametrize("exact", [True, False], ids=["by ids", "by text"])
def test_r2_what_only_looks_alike_never_repeats_itself_at_any_length(
    kind: str, exact: bool
) -> None:
    newest = said_so_far(ids=() if exact else None, text="")
    for i in model().encode_text(BENIGN[kind]):
        newest = say(newest, ids=(i,) if exact else None, text=model_text(i))
        assert not repeats(newest), newest.text


def test_r1_the_loop_that_the_real_model_was_seen_in_is_ended_after_some_rounds() -> None:
    newest = said_so_far(ids=(), text="")
    ended = 0
    for i in model().encode_text("That is nice to hear." + LOOP * 40):
        newest = say(newest, ids=(i,), text="")
        ended += 1
        if repeats(newest):
            break
    assert REPEATED_TOKENS_MIN < ended < REPEATED_TOKENS_MIN + 40


@given(st.integers(1, CYCLE_TOKENS_MAX), st.integers(0, 300))
def test_r1_a_cycle_is_ended_at_its_bound_and_not_one_token_before(
    period: int, before: int
) -> None:
    bound = max(REPEATS_MIN * period, REPEATED_TOKENS_MIN)
    lead = tuple(range(1_000, 1_000 + before))
    cycle = tuple(place % period for place in range(bound))
    assert repeats(said_so_far(ids=lead + cycle, text=""))
    assert not repeats(said_so_far(ids=lead + cycle[1:], text=""))
    assert not repeats(said_so_far(ids=(*lead, *cycle, 999), text=""))


def test_r1_a_cycle_longer_than_the_longest_is_let_go_on() -> None:
    assert not repeats(said_so_far(ids=tuple(range(CYCLE_TOKENS_MAX + 1)) * 10, text=""))


def test_r3_without_exact_ids_the_text_is_judged() -> None:
    newest = say(said_so_far(ids=(1, 2), text="Well."), ids=None, text=LOOP * 30)
    assert newest.ids is None
    assert repeats(newest)
    assert not repeats(say(newest, ids=(3,), text="?"))


PIECES = st.lists(
    st.tuples(st.sampled_from(["a", "b", " ab", "abab"]), st.integers(1, 90)), max_size=12
)


@given(PIECES, st.booleans(), st.data())
def test_r4_a_takeover_decides_as_the_attempt_before_would_have(
    rounds: list[tuple[str, int]], exact: bool, data: st.DataObject
) -> None:
    said = [text for text, times in rounds for _ in range(times)]
    ids = [len(text) for text in said]
    cut = data.draw(st.integers(0, len(said)))
    whole = said_so_far(ids=() if exact else None, text="")
    resumed = said_so_far(ids=tuple(ids[:cut]) if exact else None, text="".join(said[:cut]))
    for place, text in enumerate(said):
        piece = (ids[place],) if exact else None
        whole = say(whole, ids=piece, text=text)
        if place >= cut:
            resumed = say(resumed, ids=piece, text=text)
    assert resumed == whole
    assert repeats(resumed) == repeats(whole)
