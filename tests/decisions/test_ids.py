"""Ids: an address that survives the round trip, and a tag that no other account can make."""

from __future__ import annotations

import pytest
from aiokafka.partitioner import murmur2
from hypothesis import given
from hypothesis import strategies as st

from schemas.ids import (
    CHAT_PREFIX,
    EPOCH_MAX,
    MESSAGE_PREFIX,
    MINT_OFFSET_MAX,
    PARTITION_MAX,
    RANDOM_BYTES,
    RUN_PREFIX,
    BadId,
    RunAddress,
    belongs_to,
    derived_event_id,
    mint_chat_id,
    mint_message_id,
    mint_run_id,
    partition_for_key,
    run_address,
)

KEY = bytes(32)
# What can be printed. Made so, and not filtered: a search whose draws are mostly thrown away is given up.
accounts = st.text(
    st.characters(exclude_categories=("C", "Z"), include_characters=" "), min_size=1, max_size=40
)
randoms = st.binary(min_size=RANDOM_BYTES, max_size=RANDOM_BYTES)
addresses = st.builds(
    RunAddress,
    epoch=st.integers(0, EPOCH_MAX),
    partition=st.integers(0, PARTITION_MAX),
    mint_offset=st.integers(0, MINT_OFFSET_MAX),
)


@given(account=accounts, address=addresses, random=randoms)
def test_a_run_id_gives_back_its_address(account: str, address: RunAddress, random: bytes) -> None:
    run_id = mint_run_id(key=KEY, account_id=account, address=address, random=random)
    assert run_address(run_id) == address
    assert belongs_to(run_id, RUN_PREFIX, key=KEY, account_id=account)


@given(account=accounts, other=accounts, random=randoms)
def test_an_id_belongs_to_one_account_kind_and_key(account: str, other: str, random: bytes) -> None:
    chat = mint_chat_id(key=KEY, account_id=account, random=random)
    message = mint_message_id(key=KEY, account_id=account, random=random)
    assert belongs_to(chat, CHAT_PREFIX, key=KEY, account_id=account)
    assert belongs_to(message, MESSAGE_PREFIX, key=KEY, account_id=account)
    assert belongs_to(chat, CHAT_PREFIX, key=KEY, account_id=other) == (account == other)
    assert not belongs_to(chat, CHAT_PREFIX, key=bytes([1] * 32), account_id=account)
    as_message = MESSAGE_PREFIX + chat.removeprefix(CHAT_PREFIX)
    assert not belongs_to(as_message, MESSAGE_PREFIX, key=KEY, account_id=account)


@given(account=accounts, address=addresses, random=randoms, data=st.data())
def test_any_changed_character_is_refused(
    account: str, address: RunAddress, random: bytes, data: st.DataObject
) -> None:
    run_id = mint_run_id(key=KEY, account_id=account, address=address, random=random)
    at = data.draw(st.integers(len(RUN_PREFIX), len(run_id) - 1))
    other = data.draw(
        st.sampled_from("abcdefghijklmnopqrstuvwxyz234567").filter(lambda c: c != run_id[at])
    )
    forged = run_id[:at] + other + run_id[at + 1 :]
    assert not belongs_to(forged, RUN_PREFIX, key=KEY, account_id=account)


@given(text=st.text(max_size=80))
def test_made_up_text_is_no_id_and_never_an_error(text: str) -> None:
    for prefix in (RUN_PREFIX, CHAT_PREFIX, MESSAGE_PREFIX):
        assert not belongs_to(prefix + text, prefix, key=KEY, account_id="a")
        assert not belongs_to(text, prefix, key=KEY, account_id="a")


@pytest.mark.parametrize("text", ["", "run_", "run_a", "chat_aaaa", "run_" + "a" * 100, "run_é"])
def test_a_run_id_that_is_none_has_no_address(text: str) -> None:
    with pytest.raises(BadId):
        run_address(text)


@given(key=st.text(min_size=1, max_size=60))
def test_keys_go_to_the_partition_that_kafkas_own_partitioner_picks(key: str) -> None:
    assert partition_for_key(key, 12) == (murmur2(key.encode()) & 0x7FFFFFFF) % 12


def test_derived_event_ids_depend_on_cause_kind_and_ordinal() -> None:
    ids = {derived_event_id(c, k, o) for c in ("a", "b") for k in ("X", "Y") for o in (0, 1)}
    assert len(ids) == 8
    assert derived_event_id("a", "X") == derived_event_id("a", "X", 0)
