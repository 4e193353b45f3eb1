"""A model's prompts: exact token counts and exact ids, by the model's own vocabulary and chat template."""

from collections.abc import Sequence

from infra.models.conversation import ChatMessage, Role


class PromptModel:
    """Counts and encodes for one model. Read-only once built, so any thread may use it; every answer is a function of its arguments."""

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def context_window(self) -> int:
        """Tokens of prompt and answer together."""
        raise NotImplementedError

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a turn."""
        raise NotImplementedError

    @property
    def output_tokens_default(self) -> int:
        """The answer's length in tokens where a request names none."""
        raise NotImplementedError

    @property
    def fixed_tokens(self) -> int:
        """Upper bound of what a prompt costs beyond its messages: the opening of the answer and any system prompt the template adds."""
        raise NotImplementedError

    def count(self, text: str) -> int:
        """Tokens of plain text: no template, no control tokens."""
        raise NotImplementedError

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Ids of plain text. Never a control id, whatever the text says."""
        raise NotImplementedError

    def count_message(self, role: Role, content: str) -> int:
        """Upper bound of what one message adds to a prompt: `fixed_tokens` + the sum over messages >= len(prompt_ids(messages))."""
        raise NotImplementedError

    def prompt_ids(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """The whole prompt, up to and including the opening of the assistant's answer. Control ids come from the template alone."""
        raise NotImplementedError


def load_model(name: str) -> PromptModel:
    """Reads the model's file (0.2 s). Raises UnknownModel or ModelFileMissing."""
    raise NotImplementedError(name)
