"""The secrets of a home: made once, the same for everybody, and never guessed at where they are damaged."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.secrets import FILE_NAME, SecretsError, load_secrets

KEY = "ab" * 32


def test_secrets_are_made_once_for_the_owner_alone_however_many_ask_at_once(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(load_secrets, [home] * 32))
    assert len({secrets.token_key for secrets in found}) == 1
    assert len({found[0].id_key, found[0].token_key, found[0].cache_key}) == 3
    assert (home / FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in home.iterdir()] == [FILE_NAME]
    assert KEY not in repr(found[0])


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        json.dumps({"id_key": KEY, "token_key": KEY, "cache_key": 7}),
        json.dumps({"id_key": KEY, "token_key": KEY, "cache_key": "no hex"}),
        json.dumps({"id_key": KEY, "token_key": KEY, "cache_key": KEY[2:]}),
    ],
)
def test_damaged_secrets_are_named_left_alone_and_not_shown(tmp_path: Path, content: str) -> None:
    file = tmp_path / FILE_NAME
    file.write_text(content)
    with pytest.raises(SecretsError) as caught:
        load_secrets(tmp_path)
    assert str(caught.value).startswith(f"{file} is ")
    assert KEY not in str(caught.value)
    assert file.read_text() == content


def test_a_home_that_is_no_folder_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SecretsError, match="is unreadable or damaged"):
        load_secrets(file)
