"""The policy file: the packaged one is good, every mistake is one line that names the file and the field, the version names the content."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.models import MODELS
from infra.policies import PACKAGED, POLICY_BYTES_MAX, parse_policies, policy_text, read_policies
from infra.policy_checks import PolicyError
from schemas.events.accounts import LimitsChanged
from schemas.vocabulary import Lane, Tier

WINDOWS = {"small": 4_096, "large": 8_192}
TIER = {
    "tokens_per_window": "1000",
    "window": '"day"',
    "open_runs_max": "2",
    "models": '["small"]',
    "input_tokens_max": "300",
    "output_tokens_max": "100",
    "run_deadline_ms": "60000",
    "queue_wait_ms_max": "5000",
}
LEVEL = "[[ladder.levels]]\nenter_ms = 10\nleave_ms = 5\n"


def policy(extra: str = "", /, **changes: str | None) -> str:
    """A file with the same fields for each tier; `changes` are those of `free`, None leaves one out."""
    lines = []
    for tier in Tier:
        lines.append(f"[tiers.{tier}]")
        fields = TIER | (changes if tier is Tier.FREE else {})
        lines += [f"{name} = {value}" for name, value in fields.items() if value is not None]
    return "\n".join([*lines, extra])


def parse(text: str, by: str = "test") -> LimitsChanged:
    return parse_policies(text.encode(), source="limits.toml", models=WINDOWS, changed_by=by)


def test_the_packaged_policy_is_good_and_names_every_lane_tier_and_model() -> None:
    windows = {name: spec.context_window for name, spec in MODELS.items()}
    found = read_policies(Path(), models=windows, changed_by="test")
    assert set(found.tiers) == set(Tier)
    assert set(found.lanes) == set(Lane)
    assert set(found.models) == set(MODELS)
    assert found.ladder.levels
    assert found.tiers[Tier.FREE].tokens_per_window == 50_000
    assert found.tiers[Tier.PLUS].tokens_per_window == 2_000_000
    assert found.tiers[Tier.TEAM].seats_max


def test_a_file_may_leave_out_everything_but_the_tiers() -> None:
    found = parse(policy())
    assert (found.lanes, found.ladder.levels) == ({}, ())
    assert {name: each.context_tokens for name, each in found.models.items()} == WINDOWS


def test_the_version_names_the_content_whoever_wrote_it_and_however_it_is_laid_out() -> None:
    version = parse(policy()).version
    assert parse(policy("# a remark"), by="somebody").version == version
    assert parse(policy(tokens_per_window="1_000")).version == version
    assert parse(policy(tokens_per_window="1_001")).version != version
    assert parse(policy("[lanes.free]\nweight = 2")).version != version
    assert parse(policy("[models.large]\ncontext_tokens = 100")).version != version
    assert parse(policy(LEVEL)).version != version
    assert parse(policy('[content]\nblocked_phrases = ["x"]')).version != version


def test_a_policy_without_phrases_keeps_the_version_that_it_had_before_there_were_any() -> None:
    assert parse(policy("[content]\nblocked_phrases = []")).version == parse(policy()).version
    assert parse(policy()).version == "28722a8132672c73"


def test_a_policy_with_phrases_survives_being_shown_and_read_again() -> None:
    found = parse(policy('[content]\nblocked_phrases = ["bad word", "c++", "é\\"\\\\"]'))
    assert parse(policy_text(found), by="test") == found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"window": '"week"'}, "tiers.free.window"),
        ({"open_runs_max": None}, "tiers.free.open_runs_max is missing"),
        ({"open_runs_max": "0"}, "tiers.free.open_runs_max must be 1 to"),
        ({"open_runs_max": "1.5"}, "tiers.free.open_runs_max"),
        ({"open_runs_max": "true"}, "tiers.free.open_runs_max"),
        ({"open_runs": "1"}, "tiers.free.open_runs is unknown"),
        ({"models": "[]"}, "tiers.free.models names no model"),
        ({"models": '["small", "small"]'}, "tiers.free.models names a model twice"),
        ({"models": '["huge"]'}, "tiers.free.models: 'huge' is unknown; known: large, small"),
        ({"input_tokens_max": "4000"}, "tiers.free.output_tokens_max: with input_tokens_max"),
        ({"run_deadline_ms": "99999999"}, "tiers.free.run_deadline_ms must be"),
        ({"requests_burst": "5"}, "tiers.free.requests_burst needs requests_per_minute"),
        ({"tokens_per_minute": "300"}, "tiers.free.tokens_per_minute must exceed input_tokens_max"),
        (
            {"tokens_per_minute": "1", "tokens_burst": "300"},
            "tiers.free.tokens_burst must exceed input_tokens_max",
        ),
        ({"seats_max": "5001"}, "tiers.free.seats_max must be 1 to 5000"),
        (
            {"seat_open_runs_max": "3"},
            "tiers.free.seat_open_runs_max must be at most open_runs_max",
        ),
        ({"seat_tokens_per_window": "1001"}, "tiers.free.seat_tokens_per_window must be at most"),
        (
            {"run_deadline_ms": "7200000", "enqueued_runs_max": "1"},
            "tiers.free.enqueued_runs_max: so many runs one after the other",
        ),
    ],
)
def test_a_mistake_in_a_tier_names_its_field(changes: dict[str, str | None], expected: str) -> None:
    with pytest.raises(PolicyError) as refused:
        parse(policy(**changes))
    assert str(refused.value).startswith(f"limits.toml: {expected}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("[tier.free]", "tier is no section"),
        ("[tiers.gold]\nwindow = 1", "tiers.gold is unknown; there are free, plus, team"),
        ("[lanes.slow]", "lanes.slow is unknown"),
        ("[lanes.free]\nfloor_percent = 101", "lanes.free.floor_percent must be 0 to 100"),
        (
            "[lanes.free]\nfloor_percent = 60\n[lanes.team]\nfloor_percent = 41",
            "lanes: the floor_percent of all lanes together exceed 100",
        ),
        ("[lanes]\nfree = 3", "lanes.free must be a table"),
        ("[models.huge]\ncontext_tokens = 100", "models.huge is unknown"),
        ("[models.small]\ncontext_tokens = 5000", "models.small.context_tokens must be at most"),
        ("[models.small]\ncost_percent = 3", "models.small.context_tokens is missing"),
        (
            '[models.large]\ncontext_tokens = 900\nsmaller = "tiny"',
            "models.large.smaller: 'tiny' is unknown",
        ),
        (
            '[models.small]\ncontext_tokens = 900\nsmaller = "small"',
            "models.small.smaller leads back to small",
        ),
        (
            '[models.small]\ncontext_tokens = 900\ncost_percent = 50\nsmaller = "large"',
            "models.small.smaller: large costs more than small",
        ),
        ("[ladder]\nhold_ms = -1", "ladder.hold_ms must be"),
        ("[ladder]\nlevels = 3", "ladder.levels must be a list"),
        ("[ladder]\nlevels = [3]", "ladder.levels[1] must be a table"),
        (LEVEL + "output_percent_free = 0", "ladder.levels[1].output_percent_free must be 1"),
        (LEVEL + "leave = 3", "ladder.levels[1].leave is unknown"),
        (
            "[[ladder.levels]]\nenter_ms = 5\nleave_ms = 5",
            "ladder.levels[1].leave_ms must be below",
        ),
        (
            LEVEL + "output_percent_paid = 50",
            "ladder.levels[1].output_percent_free must be at most",
        ),
        (LEVEL + "downgrade_paid = true", "ladder.levels[1].downgrade_paid needs downgrade_free"),
        (LEVEL + "shed_paid = true", "ladder.levels[1].shed_paid needs shed_free"),
        (LEVEL + LEVEL, "ladder.levels[2].enter_ms must exceed"),
        (
            LEVEL + "shed_free = true\n[[ladder.levels]]\nenter_ms = 20\nleave_ms = 6",
            "ladder.levels[2].shed_free must be true, as at the level before",
        ),
        (
            LEVEL + "optional_work = false\n[[ladder.levels]]\nenter_ms = 20\nleave_ms = 6",
            "ladder.levels[2].optional_work must be false",
        ),
        ("[ladder", "Expected"),
        ("[content]\nphrases = []", "content.phrases is unknown; there are blocked_phrases"),
        ("[content]\nblocked_phrases = 3", "content.blocked_phrases: Expected `array`"),
        (
            f"[content]\nblocked_phrases = {[f'phrase {n}' for n in range(101)]}",
            "content.blocked_phrases: at most 100 phrases",
        ),
        (
            f'[content]\nblocked_phrases = ["fine", "{"x" * 65}"]',
            "content.blocked_phrases[2] must be printable and at most 64",
        ),
        (
            '[content]\nblocked_phrases = ["a\\nb"]',
            "content.blocked_phrases[1] must be printable",
        ),
        ('[content]\nblocked_phrases = ["  "]', "content.blocked_phrases[1] is empty"),
        (
            '[content]\nblocked_phrases = ["Bad word", "x", " bad  WORD"]',
            "content.blocked_phrases[3] is the same phrase as [1]",
        ),
    ],
)
def test_a_mistake_anywhere_else_names_its_field(extra: str, expected: str) -> None:
    with pytest.raises(PolicyError) as refused:
        parse(policy(extra))
    assert str(refused.value).startswith(f"limits.toml: {expected}")
    assert "\n" not in str(refused.value)


def test_a_smaller_models_context_holds_for_the_tier_too() -> None:
    extra = '[models.small]\ncontext_tokens = 350\n[models.large]\ncontext_tokens = 8000\nsmaller = "small"'
    with pytest.raises(PolicyError, match=r"tiers\.free\.output_tokens_max: .* small's context"):
        parse(policy(extra, models='["large"]'))


def test_a_tier_that_is_missing_is_named() -> None:
    text = policy().replace("[tiers.plus]", "[lanes.plus]\n[models.small]")
    with pytest.raises(PolicyError, match=r"limits\.toml: "):
        parse(text)
    with pytest.raises(PolicyError, match=r"tiers\.team is missing"):
        parse(policy().partition("[tiers.team]")[0])


def test_a_file_that_cannot_be_read_or_is_too_large_is_named(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"nowhere\.toml: No such file"):
        read_policies(tmp_path / "nowhere.toml", models=WINDOWS, changed_by="test")
    large = tmp_path / "large.toml"
    large.write_bytes(PACKAGED.read_bytes() + b"#" * POLICY_BYTES_MAX)
    with pytest.raises(PolicyError, match=r"large\.toml: larger than"):
        read_policies(large, models=WINDOWS, changed_by="test")
    broken = tmp_path / "broken.toml"
    broken.write_bytes(b"\xff")
    with pytest.raises(PolicyError, match=r"broken\.toml: "):
        read_policies(broken, models=WINDOWS, changed_by="test")
