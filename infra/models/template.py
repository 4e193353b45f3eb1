"""A model's chat template, rendered so that no text can forge a role.

A string prompt would have every control token's name in it read as that token, a user's included.
Here control ids come from the template alone:

T1. In each message every look-alike of a control token, and every beginning or end of one at the
    message's edges, where the template's own text could complete it, is masked by a mark:
    private-use characters around a nonce that occurs in no message.
T2. The template is rendered over the masked messages, and the result is split at control tokens:
    all of these are the template's.
T3. Each gap is unmasked and encoded by a tokenizer that has no control tokens. Encoding messages
    apart from the template's text would not give the model's ids: a line break before the text
    merges with it.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Final

from infra.models.conversation import ChatMessage
from schemas.vocabulary import Role

_MARK_OPENS: Final = "\ue000"
_MARK_CLOSES: Final = "\ue001"
_NONCE_TRIES_MAX: Final = 8


class ConversationRefusedError(ValueError):
    """The template cannot render these messages, or a message is not valid Unicode text."""


class ChatTemplate:
    """One model's template with its control tokens."""

    def __init__(self, *, source: str, control_ids: Mapping[str, int], bos: str, eos: str) -> None:
        # Slow to import, and most processes that know of models render nothing.
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(source)
        # A vocabulary may have thousands; the template's text can only hold those that it names.
        self._control_ids = {
            text: i for text, i in control_ids.items() if text in source or text in (bos, eos)
        }
        self._special = {"bos_token": bos, "eos_token": eos}
        # Longest first, so that no token hides behind a shorter one that it begins with.
        names = sorted(self._control_ids, key=len, reverse=True)
        self._control = re.compile("(" + "|".join(map(re.escape, names)) + ")")
        self._look_alike = _look_alike_pattern(names)

    def render(self, messages: Sequence[ChatMessage], *, open_answer: bool) -> str:
        """The prompt as one string, as the engine itself would render it. Text in it can forge a
        role: never encode it as a whole.
        """
        return self._render(
            [(message.role, message.content) for message in messages], open_answer=open_answer
        )

    def ids(
        self,
        messages: Sequence[ChatMessage],
        *,
        open_answer: bool,
        encode: Callable[[str], Iterable[int]],
        nonce: str = "",
    ) -> tuple[int, ...]:
        """The prompt's ids; `encode` must know no control tokens. A `nonce` that is given must
        occur in no message; by default one is derived from the messages, so the same messages
        always take the same path. Raises ConversationRefusedError.
        """
        _check(messages)
        opening = _MARK_OPENS + (nonce or _derived_nonce(messages))
        if any(opening in message.content for message in messages):
            raise ConversationRefusedError("the nonce occurs in a message")
        hidden: list[str] = []

        def mask(match: re.Match[str]) -> str:
            hidden.append(match[0])
            return f"{opening}:{len(hidden) - 1}{_MARK_CLOSES}"

        masked = [
            (message.role, self._look_alike.sub(mask, message.content)) for message in messages
        ]
        mark = re.compile(re.escape(opening) + r":([0-9]+)" + _MARK_CLOSES)
        ids: list[int] = []
        for place, piece in enumerate(
            self._control.split(self._render(masked, open_answer=open_answer))
        ):
            if place % 2:
                ids.append(self._control_ids[piece])
            elif piece:
                ids.extend(encode(mark.sub(lambda match: hidden[int(match[1])], piece)))
        return tuple(ids)

    def _render(self, messages: Sequence[tuple[Role, str]], *, open_answer: bool) -> str:
        from jinja2 import TemplateError  # noqa: PLC0415

        turns = [{"role": role.value, "content": content} for role, content in messages]
        try:
            return self._template.render(
                messages=turns, add_generation_prompt=open_answer, **self._special
            )
        except TemplateError as error:
            raise ConversationRefusedError(
                f"the chat template refuses this conversation: {type(error).__name__}"
            ) from error


def _look_alike_pattern(names: Sequence[str]) -> re.Pattern[str]:
    """T1's pattern. Whole names come first; \\A and \\Z tie the parts to the message's edges."""
    heads = sorted(
        {name[:cut] for name in names for cut in range(1, len(name))}, key=len, reverse=True
    )
    tails = sorted(
        {name[cut:] for name in names for cut in range(1, len(name))}, key=len, reverse=True
    )
    whole = "|".join(map(re.escape, names))
    return re.compile(
        f"{whole}|\\A(?:{'|'.join(map(re.escape, tails))})|(?:{'|'.join(map(re.escape, heads))})\\Z"
    )


def _check(messages: Sequence[ChatMessage]) -> None:
    if not messages:
        raise ConversationRefusedError("a prompt of no messages")
    for message in messages:
        try:
            message.content.encode()
        except UnicodeEncodeError:
            raise ConversationRefusedError("a message that is not valid Unicode text") from None


def _derived_nonce(messages: Sequence[ChatMessage]) -> str:
    """The messages' hash cannot be written inside the messages; the loop is for the assertion's
    sake.
    """
    for attempt in range(_NONCE_TRIES_MAX):
        digest = blake2b(digest_size=16, salt=attempt.to_bytes(16, "big"))
        for message in messages:
            text = message.content.encode()
            digest.update(len(text).to_bytes(8, "big") + text)
        nonce = digest.hexdigest()
        if not any(nonce in message.content for message in messages):
            return nonce
    raise AssertionError("every derived nonce occurs in the messages")


def _refuse(reason: str) -> None:
    """Templates call it for conversations that they do not take."""
    from jinja2 import TemplateError  # noqa: PLC0415

    raise TemplateError(reason)
