"""Which of OpenAI's parameters do something here, and what others may be set to. Knows JSON names.

A parameter that the mesh does not support is refused by its name; only its neutral
value passes. So is an unknown one: nothing that a caller asks for is ignored.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

from radixmesh.errors import UnsupportedParameter

# Names longer than this are cut before they come back in an error.
MAX_NAME: Final = 256

# Documented parameters that do nothing here, each with the values that ask for nothing.
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
    "store": (False,),
}
NEUTRAL_CHAT: Final[Mapping[str, tuple[object, ...]]] = {
    **NEUTRAL,
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
NEUTRAL_COMPLETION: Final[Mapping[str, tuple[object, ...]]] = {
    **NEUTRAL,
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
# What an answer of ours or of OpenAI has beside role and content, sent back as history.
NEUTRAL_MESSAGE: Final[Mapping[str, tuple[object, ...]]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "reasoning": ("",),
    "reasoning_content": ("",),
    "refusal": ("",),
    "tool_call_id": (),
    "tool_calls": ([],),
}


def supported(
    raw: dict[Any, Any],
    fields: Collection[str],
    neutral: Mapping[str, tuple[object, ...]],
    where: str,
) -> dict[str, Any]:
    """Return the supported parameters that are set; null means not set.

    Args:
        raw: A JSON object.
        fields: Names that are supported.
        neutral: Names that are not, each with the values that ask for nothing.
        where: The object's own name and a dot, for messages.

    Raises:
        UnsupportedParameter: Something else is asked for; `field` names it.
    """
    known = {}
    for name, value in raw.items():
        full = (where + name)[:MAX_NAME]
        if name in fields:
            if value is not None:
                known[name] = value
        elif name not in neutral:
            raise UnsupportedParameter(f"unknown parameter: {full}", field=full)
        elif value is not None and value not in neutral[name]:
            raise UnsupportedParameter(f"{full} is not supported", field=full)
    return known
