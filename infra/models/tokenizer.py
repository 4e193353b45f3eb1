"""A model's vocabulary, and the tokenizers built from it: the ids are those that the engine
itself would make.

Two kinds are known: byte-level BPE ("gpt2" in the file), and SentencePiece with byte fallback
("llama"), whose merges are not in the file and follow from its tokens and their scores. Of each there
are two tokenizers: one reads control tokens in text, as the engine does with a trusted string; the
other has none, so whatever a user writes is plain text to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import Final, assert_never

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from infra.models.gguf import GgufValue

_NORMAL: Final = 1
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_BYTE: Final = 6
_BYTES: Final = 256
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
    }
)
# How this kind of vocabulary splits text before merging. The engine knows more kinds; each has to
# be tried before it is listed.
_DIGITS_APART: Final = frozenset({"smollm"})


class VocabularyUnsupportedError(ValueError):
    """The file's kind of vocabulary has not been tried here."""


# How SentencePiece writes a space.
_SPACE: Final = "\u2581"


class VocabularyKind(StrEnum):
    """How text becomes tokens."""

    BYTE_LEVEL = "byte_level"
    SENTENCE_PIECE = "sentence_piece"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """`control_ids` and `user_defined_ids` map a token's text to its id. Neither is ever made by
    merging. `byte_of` maps the ids of tokens that stand for one byte, and `unknown` is the token for
    what no token says; SentencePiece only.
    """

    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    control_ids: Mapping[str, int]
    user_defined_ids: Mapping[str, int]
    kind: VocabularyKind
    byte_of: Mapping[int, int]
    unknown: str | None


def read_vocabulary(metadata: Mapping[str, GgufValue]) -> Vocabulary:
    """The vocabulary in a GGUF file's metadata. Raises VocabularyUnsupportedError."""
    if metadata.get("tokenizer.ggml.model") == "llama":
        return _read_sentence_piece(metadata)
    return _read_byte_level(metadata)


def _read_byte_level(metadata: Mapping[str, GgufValue]) -> Vocabulary:
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in _DIGITS_APART:
        raise VocabularyUnsupportedError(f"vocabulary {kind!r} split by {split!r}")
    if metadata.get("tokenizer.ggml.add_bos_token", False) or metadata.get(
        "tokenizer.ggml.add_space_prefix", False
    ):
        raise VocabularyUnsupportedError("a vocabulary that adds a token or a space to every text")
    tokens = _texts(metadata, "tokenizer.ggml.tokens")
    merges = tuple(_pair(merge) for merge in _texts(metadata, "tokenizer.ggml.merges"))
    types = _numbers(metadata, "tokenizer.ggml.token_type", len(tokens))
    control, user_defined = _named_ids(tokens, types)
    return Vocabulary(
        tokens=tokens,
        merges=merges,
        control_ids=control,
        user_defined_ids=user_defined,
        kind=VocabularyKind.BYTE_LEVEL,
        byte_of=MappingProxyType({}),
        unknown=None,
    )


def _read_sentence_piece(metadata: Mapping[str, GgufValue]) -> Vocabulary:
    if metadata.get("tokenizer.ggml.pre") != "default" or metadata.get(
        "tokenizer.ggml.add_space_prefix", True
    ):
        raise VocabularyUnsupportedError(
            "a SentencePiece vocabulary that adds a space to every text"
        )
    tokens = _texts(metadata, "tokenizer.ggml.tokens")
    types = _numbers(metadata, "tokenizer.ggml.token_type", len(tokens))
    scores = _numbers(metadata, "tokenizer.ggml.scores", len(tokens))
    control, user_defined = _named_ids(tokens, types)
    byte_of = {i: int(tokens[i][3:-1], 16) for i, kind in enumerate(types) if kind == _BYTE}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if len(byte_of) != _BYTES or not isinstance(unknown, int):
        raise VocabularyUnsupportedError("a SentencePiece vocabulary without byte fallback")
    return Vocabulary(
        tokens=tokens,
        merges=_merges(tokens, types, scores),
        control_ids=control,
        user_defined_ids=user_defined,
        kind=VocabularyKind.SENTENCE_PIECE,
        byte_of=MappingProxyType(byte_of),
        unknown=tokens[unknown],
    )


def _merges(
    tokens: Sequence[str], types: Sequence[float], scores: Sequence[float]
) -> tuple[tuple[str, str], ...]:
    """Every way to put a token together from two others, the best scored token first."""
    normal = {text: i for i, text in enumerate(tokens) if types[i] == _NORMAL}
    return tuple(
        (text[:cut], text[cut:])
        for text in sorted(normal, key=lambda text: -scores[normal[text]])
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    )


def _named_ids(
    tokens: Sequence[str], types: Sequence[float]
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """The control tokens and the user-defined ones, by their text."""
    control = {
        text: i for i, text in enumerate(tokens) if types[i] == _CONTROL or text in _CONTROL_BY_NAME
    }
    user_defined = {
        text: i
        for i, text in enumerate(tokens)
        if types[i] == _USER_DEFINED and text not in control
    }
    return MappingProxyType(control), MappingProxyType(user_defined)


def build_tokenizer(vocabulary: Vocabulary, *, control_tokens: bool) -> Tokenizer:
    """With `control_tokens` their names in text become their ids: for trusted text only."""
    ids = {text: i for i, text in enumerate(vocabulary.tokens)}
    merges = list(vocabulary.merges)
    match vocabulary.kind:
        case VocabularyKind.BYTE_LEVEL:
            made = Tokenizer(models.BPE(vocab=ids, merges=merges))
            byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
            made.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), byte_level]
            )
        case VocabularyKind.SENTENCE_PIECE:
            made = Tokenizer(
                models.BPE(
                    vocab=ids,
                    merges=merges,
                    byte_fallback=True,
                    unk_token=vocabulary.unknown,
                    fuse_unk=True,
                )
            )
            made.normalizer = normalizers.Replace(" ", _SPACE)
        case _:
            assert_never(vocabulary.kind)
    made.add_tokens([AddedToken(text, normalized=False) for text in vocabulary.user_defined_ids])
    if control_tokens:
        made.add_special_tokens(
            [AddedToken(text, normalized=False, special=True) for text in vocabulary.control_ids]
        )
    return made


def token_bytes(vocabulary: Vocabulary) -> tuple[bytes, ...]:
    """What each token says, by id: part of a character at times. A control token says nothing."""
    match vocabulary.kind:
        case VocabularyKind.BYTE_LEVEL:
            byte_of = _byte_of_char()
            said = [bytes(byte_of.get(char, 0) for char in text) for text in vocabulary.tokens]
        case VocabularyKind.SENTENCE_PIECE:
            said = [text.replace(_SPACE, " ").encode() for text in vocabulary.tokens]
            for i, byte in vocabulary.byte_of.items():
                said[i] = bytes([byte])
        case _:
            assert_never(vocabulary.kind)
    for text, i in vocabulary.user_defined_ids.items():
        said[i] = text.encode()
    for i in vocabulary.control_ids.values():
        said[i] = b""
    return tuple(said)


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


def _numbers(metadata: Mapping[str, GgufValue], key: str, count: int) -> tuple[float, ...]:
    found = metadata.get(key)
    if not isinstance(found, tuple) or len(found) != count:
        raise VocabularyUnsupportedError(f"not one number of {key} for each token")
    return tuple(item for item in found if isinstance(item, int | float))


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
