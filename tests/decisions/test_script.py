"""What the scripted engine says: rules S1 to S3."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_workers.decisions.script import Script, answer

PROMPTS = st.lists(st.integers(0, 50_000), min_size=1, max_size=20).map(tuple)


@given(st.sampled_from(Script), PROMPTS, st.integers(1, 60), st.integers(0, 60))
def test_an_answer_goes_on_from_any_cut(
    script: Script, prompt_ids: tuple[int, ...], tokens: int, cut: int
) -> None:
    whole = list(answer(script=script, prompt_ids=prompt_ids, tokens=tokens))
    assert len(whole) == tokens
    rest = list(answer(script=script, prompt_ids=prompt_ids, tokens=tokens, start=cut))
    assert rest == whole[cut:]


@given(st.sampled_from(Script), PROMPTS, st.integers(1, 60))
def test_an_answer_never_ends_inside_a_character(
    script: Script, prompt_ids: tuple[int, ...], tokens: int
) -> None:
    b"".join(t.says for t in answer(script=script, prompt_ids=prompt_ids, tokens=tokens)).decode()


@pytest.mark.parametrize("script", Script)
def test_prompts_that_differ_get_answers_that_differ(script: Script) -> None:
    answers = {
        tuple(token.id for token in answer(script=script, prompt_ids=(seed,), tokens=20))
        for seed in range(50)
    }
    assert len(answers) == 50
