"""Models as every process sees them: their vocabulary, their chat template and their limits,
without an engine.

`load_model(name)` is the way in. It reads the model's own file, so the ids are those the engine
would make, and it never starts an engine.
"""

from infra.models.conversation import ChatMessage
from infra.models.packaged import ModelFileMissingError
from infra.models.prompt import PromptModel, load_model
from infra.models.registry import (
    MODELS,
    ModelSpec,
    UnknownModelError,
    model_spec,
)
from infra.models.template import ConversationRefusedError

__all__ = [
    "MODELS",
    "ChatMessage",
    "ConversationRefusedError",
    "ModelFileMissingError",
    "ModelSpec",
    "PromptModel",
    "UnknownModelError",
    "load_model",
    "model_spec",
]
