"""The policy file: what is in it is obeyed whole, or it is refused in one line that names the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.policies import PACKAGED, POLICY_BYTES_MAX, PolicyError, read_policies
from schemas.events.accounts import LimitsChanged
from schemas.vocabulary import Tier

POLICY = PACKAGED.read_text("utf-8")
MODELS = {"smollm2-135m": 4_096}


def read(path: Path) -> LimitsChanged:
    return read_policies(path, models=MODELS, changed_by="test")


def test_the_packaged_file_has_every_tier_and_a_copy_of_it_is_the_same_version(
    tmp_path: Path,
) -> None:
    packaged = read(Path())
    assert set(packaged.tiers) == set(Tier)
    copy = tmp_path / "policies.toml"
    copy.write_text("# A comment changes nothing.\n" + POLICY)
    assert read(copy) == packaged
    copy.write_text(POLICY.replace("open_runs_max = 3", "open_runs_max = 4"))
    changed = read(copy)
    assert changed.version != packaged.version
    assert changed.tiers[Tier.PLUS].open_runs_max == 4


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("[tiers.free", "Expected ']' at the end of a table declaration (at end of document)"),
        ("\x00", "Invalid statement"),
        ("", "missing required field `tiers`"),
        ("tiers = 7", "Expected `object`, got `int` - at `$.tiers`"),
        (POLICY + "[lanes]\n", "Object contains unknown field `lanes`"),
        (POLICY.replace("open_runs_max = 3", "open_runs = 3"), "tiers.plus.open_runs is no field"),
        (POLICY.replace("[tiers.team]", "[tiers.crew]"), "Invalid enum value 'crew'"),
        (POLICY[: POLICY.index("[tiers.team]")], "tiers.team is missing"),
        (POLICY.replace('["smollm2-135m"]', '["gpt"]'), "'gpt' is unknown; known: smollm2-135m"),
        (POLICY.replace('["smollm2-135m"]', "[]"), "tiers.free.models names no model"),
        (POLICY.replace("= 50_000\n", "= -1\n"), "tokens_per_window must be 1 to "),
        (POLICY.replace("= 300_000", "= 7_200_001"), "run_deadline_ms must be 1000 to 7200000"),
        (POLICY.replace("3_072", '"much"'), "Expected `int`, got `str` - at `$.input_tokens_max`"),
        (POLICY.replace("3_072", "nan"), "Expected `int`, got `float` - at `$.input_tokens_max`"),
        (POLICY.replace('"day"', '"year"'), "Invalid enum value 'year' - at `$.window`"),
        (POLICY.replace("1_024", "1_025"), "exceed the 4096 tokens of smollm2-135m's context"),
        ("#" * (POLICY_BYTES_MAX + 1), f"larger than {POLICY_BYTES_MAX} bytes"),
    ],
)
def test_a_policy_that_cannot_be_obeyed_is_refused_in_one_line(
    tmp_path: Path, policy: str, why: str
) -> None:
    file = tmp_path / "policies.toml"
    file.write_text(policy, "utf-8")
    with pytest.raises(PolicyError) as caught:
        read(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_policy_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    for path, why in (
        (tmp_path / "none.toml", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (binary, "'utf-8' codec can't decode"),
    ):
        with pytest.raises(PolicyError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: {why}")
