"""A model's prompts: exact token counts and exact ids, by the model's own vocabulary and chat
template.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from tokenizers import Tokenizer

from infra.models.conversation import ChatMessage
from infra.models.gguf import GgufValue, read_metadata
from infra.models.registry import ModelSpec, model_spec
from infra.models.template import ChatTemplate, ConversationRefusedError
from infra.models.tokenizer import Vocabulary, build_tokenizer, read_vocabulary
from schemas.vocabulary import Role

# A pinned system prompt of no text: with it in front no template adds one of its own.
_PINNED: Final = ChatMessage(role=Role.SYSTEM, content="")


class PromptModel:
    """Counts and encodes for one model. Read-only once built, so any thread may use it; every
    answer is a function of its arguments.
    """

    def __init__(self, *, spec: ModelSpec, vocabulary: Vocabulary, template: ChatTemplate) -> None:
        self._spec = spec
        self._vocabulary = vocabulary
        self._template = template
        self._plain: Tokenizer = build_tokenizer(vocabulary, control_tokens=False)
        self._pinned_tokens = len(self._ids([_PINNED], open_answer=False))
        self._fixed_tokens = self._measure_fixed_tokens()

    @property
    def name(self) -> str:
        return self._spec.name

    @property
    def context_window(self) -> int:
        """Tokens of prompt and answer together."""
        return self._spec.context_window

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a turn."""
        return self._spec.end_of_turn_ids

    @property
    def output_tokens_default(self) -> int:
        """The answer's length in tokens where a request names none."""
        return self._spec.output_tokens_default

    @property
    def system_prompt_default(self) -> str:
        """The system prompt of a chat that names none."""
        return self._spec.system_prompt_default

    @property
    def fixed_tokens(self) -> int:
        """Upper bound of what a prompt costs beyond its messages: the opening of the answer and
        any system prompt the template adds.
        """
        return self._fixed_tokens

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def template(self) -> ChatTemplate:
        return self._template

    def shortest_prompt(self, system_prompt: str, content: str) -> list[ChatMessage]:
        """What a new message in a chat costs at least: the chat's system prompt, else the model's
        own, and the message. The edge counts this, and context assembly puts turns in between.
        """
        system = ChatMessage(role=Role.SYSTEM, content=system_prompt or self.system_prompt_default)
        user = ChatMessage(role=Role.USER, content=content)
        return [system, user] if system.content else [user]

    def count(self, text: str) -> int:
        """Tokens of plain text: no template, no control tokens. Raises ConversationRefusedError
        for lone surrogates.
        """
        return len(self.encode_text(text))

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Ids of plain text. Never a control id, whatever the text says. Raises
        ConversationRefusedError for lone surrogates.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConversationRefusedError("a text that is not valid Unicode") from None
        return tuple(self._plain.encode(text, add_special_tokens=False).ids)

    def count_message(self, role: Role, content: str) -> int:
        """What one message adds to a prompt: `fixed_tokens` + the sum over the messages >=
        len(prompt_ids(messages)).
        """
        message = ChatMessage(role=role, content=content)
        if role is Role.SYSTEM:
            return len(self._ids([message], open_answer=False))
        return len(self._ids([_PINNED, message], open_answer=False)) - self._pinned_tokens

    def prompt_ids(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """The whole prompt, up to and including the opening of the assistant's answer. Control
        ids come from the template alone. Raises ConversationRefusedError.
        """
        return self._ids(messages, open_answer=True)

    def _ids(self, messages: Sequence[ChatMessage], *, open_answer: bool) -> tuple[int, ...]:
        return self._template.ids(
            messages,
            open_answer=open_answer,
            encode=lambda text: self._plain.encode(text, add_special_tokens=False).ids,
        )

    def _measure_fixed_tokens(self) -> int:
        """The dearest opening: with the system prompt that the template adds by itself, or
        without.
        """
        first = ChatMessage(role=Role.USER, content="a")
        added = len(self.prompt_ids([first])) - self.count_message(Role.USER, "a")
        pinned = (
            len(self.prompt_ids([_PINNED, first]))
            - self.count_message(Role.USER, "a")
            - self._pinned_tokens
        )
        return max(added, pinned)


def load_model(name: str) -> PromptModel:
    """Reads the model's file (0.2 s). Raises UnknownModelError, ModelFileMissingError,
    GgufDamagedError or VocabularyUnsupportedError.
    """
    spec = model_spec(name)
    metadata = read_metadata(spec.path())
    vocabulary = read_vocabulary(metadata)
    unknown = set(spec.end_of_turn_ids) - set(vocabulary.control_ids.values())
    assert not unknown, f"{name}: {unknown} end a turn but are no control tokens"
    template = ChatTemplate(
        source=spec.template or str(metadata["tokenizer.chat_template"]),
        control_ids=vocabulary.control_ids,
        bos=_token(metadata, vocabulary, "tokenizer.ggml.bos_token_id"),
        eos=_token(metadata, vocabulary, "tokenizer.ggml.eos_token_id"),
    )
    return PromptModel(spec=spec, vocabulary=vocabulary, template=template)


def _token(metadata: Mapping[str, GgufValue], vocabulary: Vocabulary, key: str) -> str:
    place = metadata.get(key)
    return vocabulary.tokens[place] if isinstance(place, int) else ""
