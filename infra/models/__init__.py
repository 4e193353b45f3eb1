"""Models as every process sees them: their vocabulary, their chat template and their limits, without an engine.

`load_model(name)` is the way in. It reads the model's own file, so the ids are those the engine would make, and it never starts an engine.
"""

from infra.models.conversation import ChatMessage, Role
from infra.models.prompt import PromptModel, load_model
from infra.models.registry import MODELS, ModelFileMissing, ModelSpec, UnknownModel, model_spec

__all__ = [
    "MODELS",
    "ChatMessage",
    "ModelFileMissing",
    "ModelSpec",
    "PromptModel",
    "Role",
    "UnknownModel",
    "load_model",
    "model_spec",
]
