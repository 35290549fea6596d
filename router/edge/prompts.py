"""OpenAI's conversations and prompts, read into `router.request`. Knows JSON names; no model."""

import struct

from radixmesh.errors import InvalidRequest, UnsupportedParameter
from router.checks import MAX_MESSAGES
from router.edge.parameters import NEUTRAL_MESSAGE, supported
from router.request import ChatMessage, IdsPrompt, Prompt, TextPrompt


def read_messages(value: object) -> tuple[ChatMessage, ...]:
    """Return the turns of a conversation.

    Raises:
        InvalidRequest: It is none, or holds what is not supported; `field` names the place.
    """
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages must be a list with at least one entry", field="messages")
    if len(value) > MAX_MESSAGES:  # before anybody looks at each
        raise InvalidRequest(f"at most {MAX_MESSAGES} messages", field="messages")
    return tuple(_read_message(raw, f"messages[{index}]") for index, raw in enumerate(value))


def _read_message(raw: object, where: str) -> ChatMessage:
    if not isinstance(raw, dict):
        raise InvalidRequest(f"{where} must be an object", field=where)
    known = supported(raw, {"role", "content"}, NEUTRAL_MESSAGE, where + ".")
    role = known.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= 64:
        raise InvalidRequest(f"{where}.role must be a short string", field=f"{where}.role")
    # `developer` is OpenAI's newer word for `system`; chat templates know only the latter.
    return ChatMessage(
        role="system" if role == "developer" else role,
        content=_read_content(known.get("content"), f"{where}.content"),
    )


def _read_content(value: object, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts", field=where)
    return "".join(_read_part(part, f"{where}[{index}]") for index, part in enumerate(value))


def _read_part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise InvalidRequest(f"{where} must be an object with a type", field=where)
    if kind != "text":
        raise UnsupportedParameter(
            f"content parts of type {kind[:64]!r} are not supported, only text",
            field=f"{where}.type",
        )
    known = supported(part, {"type", "text"}, {}, where + ".")
    text = known.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text must be a string", field=f"{where}.text")
    return text


def read_prompts(value: object) -> tuple[Prompt, ...]:
    """Return the prompts of a text completion: one, or several that are answered alike.

    Raises:
        InvalidRequest: It is neither text nor ids.
    """
    if isinstance(value, str):
        return (TextPrompt(value),)
    if not isinstance(value, list) or not value:
        raise InvalidRequest(
            "prompt must be a string, a list of strings, token ids or lists of token ids",
            field="prompt",
        )
    if isinstance(value[0], int):
        return (_read_ids(value),)
    return tuple(TextPrompt(item) if isinstance(item, str) else _read_ids(item) for item in value)


def _read_ids(value: object) -> IdsPrompt:
    if not isinstance(value, list) or not value:
        raise InvalidRequest("a prompt must be a string or a list of token ids", field="prompt")
    try:
        return IdsPrompt(struct.pack(f"<{len(value)}I", *value))
    except struct.error as error:
        raise InvalidRequest("token ids must be integers below 2**32", field="prompt") from error
