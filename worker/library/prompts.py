"""Prompts and sampling as users give them -> runs. Knows text; knows no group and no thread."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from radixmesh.blocks import ID_BYTES, pack_ids
from radixmesh.errors import InvalidRequest, MeshError
from worker.library.sampling import SamplingParams
from worker.library.text import Text

# Text, or ids: a list, an array, or anything else that gives whole numbers, numpy's included.
Prompt = str | Iterable[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A prompt as ids (little-endian uint32), or why it has none."""

    ids: bytes = b""
    is_text: bool = False
    error: MeshError | None = None

    @property
    def length(self) -> int:
        """How many ids it has."""
        return len(self.ids) // ID_BYTES


def read_prompts(prompts: Sequence[Prompt], text: Text) -> list[Read]:
    """Turn prompts into ids; one that can't be read says so by itself.

    Raises:
        InvalidRequest: `prompts` is one text and not a sequence of prompts, or the model
            directory has no tokenizer for texts.
    """
    if isinstance(prompts, str | bytes):
        raise InvalidRequest("a list of prompts is expected; for one, give [prompt]")
    texts = [at for at, prompt in enumerate(prompts) if isinstance(prompt, str)]
    encoded = text.encode([str(prompts[at]) for at in texts]) if texts else []
    by_place = dict(zip(texts, encoded, strict=True))
    return [
        _read(by_place[at], is_text=True) if at in by_place else _read(prompt, is_text=False)
        for at, prompt in enumerate(prompts)
    ]


def _read(ids: Any, *, is_text: bool) -> Read:
    if isinstance(ids, MeshError):
        return Read(is_text=is_text, error=ids)
    if isinstance(ids, bytes | bytearray):
        return Read(error=InvalidRequest("a prompt is a text or ids, not bytes", field="prompts"))
    try:
        # numpy and torch give their numbers much faster at once than one by one.
        numbers = ids.tolist() if hasattr(ids, "tolist") else ids
        return Read(ids=pack_ids(numbers), is_text=is_text)
    except (TypeError, ValueError, OverflowError) as fault:
        error = InvalidRequest(f"a prompt is a text or ids: {fault}", field="prompts")
        return Read(is_text=is_text, error=error)


def sampling_of(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    """Return one sampling for each prompt.

    Raises:
        InvalidRequest: There are not as many as prompts.
    """
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    if len(sampling) != count:
        raise InvalidRequest(
            f"{len(sampling)} sampling parameters for {count} prompts", field="sampling"
        )
    return sampling
