"""What a prompt is made of: messages with a typed role. A role is a field, never read out of
text.
"""

from dataclasses import dataclass

from schemas.vocabulary import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn. `content` is any valid Unicode text; nothing in it can become a control token."""

    role: Role
    content: str
