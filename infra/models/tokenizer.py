"""A model's vocabulary, and the tokenizers built from it: the ids are those that the engine
itself would make.

Only byte-level BPE is known ("gpt2" in the file). There are two tokenizers: one reads control
tokens in text, as the engine does with a trusted string; the other has none, so whatever a user
writes is plain text to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Final

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from infra.models.gguf import GgufValue

_CONTROL: Final = 3
_USER_DEFINED: Final = 4
# Tokens that end a turn steer the engine whatever type the file gives them.
_CONTROL_BY_NAME: Final = frozenset(
    {
        "<|endoftext|>",
        "<|im_end|>",
        "<|im_start|>",
        "<|end|>",
        "<|eot_id|>",
        "<end_of_turn>",
        "<start_of_turn>",
        "<eos>",
        "</s>",
        "<s>",
    }
)
# How this kind of vocabulary splits text before merging. The engine knows more kinds; each has to
# be tried before it is listed.
_DIGITS_APART: Final = frozenset({"smollm"})


class VocabularyUnsupportedError(ValueError):
    """The file's kind of vocabulary has not been tried here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """`control_ids` and `user_defined_ids` map a token's text to its id. Neither is ever made by
    merging.
    """

    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    control_ids: Mapping[str, int]
    user_defined_ids: Mapping[str, int]
    split_digits: bool


def read_vocabulary(metadata: Mapping[str, GgufValue]) -> Vocabulary:
    """The vocabulary in a GGUF file's metadata. Raises VocabularyUnsupportedError."""
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in _DIGITS_APART:
        raise VocabularyUnsupportedError(f"vocabulary {kind!r} split by {split!r}")
    if metadata.get("tokenizer.ggml.add_bos_token", False) or metadata.get(
        "tokenizer.ggml.add_space_prefix", False
    ):
        raise VocabularyUnsupportedError("a vocabulary that adds a token or a space to every text")
    tokens = _texts(metadata, "tokenizer.ggml.tokens")
    merges = tuple(_pair(merge) for merge in _texts(metadata, "tokenizer.ggml.merges"))
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, tuple) or len(types) != len(tokens):
        raise VocabularyUnsupportedError("no type for each token")
    control = {
        text: i for i, text in enumerate(tokens) if types[i] == _CONTROL or text in _CONTROL_BY_NAME
    }
    user_defined = {
        text: i
        for i, text in enumerate(tokens)
        if types[i] == _USER_DEFINED and text not in control
    }
    return Vocabulary(
        tokens=tokens,
        merges=merges,
        control_ids=MappingProxyType(control),
        user_defined_ids=MappingProxyType(user_defined),
        split_digits=True,
    )


def build_tokenizer(vocabulary: Vocabulary, *, control_tokens: bool) -> Tokenizer:
    """With `control_tokens` their names in text become their ids: for trusted text only."""
    made = Tokenizer(
        models.BPE(
            vocab={text: i for i, text in enumerate(vocabulary.tokens)},
            merges=list(vocabulary.merges),
        )
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level]
    )
    made.add_tokens([AddedToken(text, normalized=False) for text in vocabulary.user_defined_ids])
    if control_tokens:
        made.add_special_tokens(
            [AddedToken(text, normalized=False, special=True) for text in vocabulary.control_ids]
        )
    return made


def token_bytes(vocabulary: Vocabulary) -> tuple[bytes, ...]:
    """What each token says, by id: part of a character at times. A control token says nothing."""
    byte_of = _byte_of_char()
    literal = vocabulary.user_defined_ids
    return tuple(
        b""
        if text in vocabulary.control_ids
        else text.encode()
        if text in literal
        else bytes(byte_of[char] for char in text)
        for text in vocabulary.tokens
    )


@cache
def _byte_of_char() -> Mapping[str, int]:
    """Byte-level vocabularies write each byte as one printable character: itself where printable,
    else the next one from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return MappingProxyType(
        {chr(byte): byte for byte in printable}
        | {chr(0x100 + place): byte for place, byte in enumerate(others)}
    )


def _texts(metadata: Mapping[str, GgufValue], key: str) -> tuple[str, ...]:
    found = metadata.get(key)
    if not isinstance(found, tuple):
        raise VocabularyUnsupportedError(f"no {key}")
    return tuple(str(item) for item in found)


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
