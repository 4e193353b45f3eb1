"""What a prompt is made of: messages with a typed role. A role is a field, never something read out of text."""

from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn. `content` is any valid Unicode text; nothing in it can become a control token."""

    role: Role
    content: str
