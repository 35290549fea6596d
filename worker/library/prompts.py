"""Prompts and sampling as users give them -> runs. Knows text; knows no replica and no thread."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict

import msgspec

from radixmesh.blocks import ID_BYTES, pack_ids
from radixmesh.errors import InvalidRequest, MeshError
from worker.front.ask import GroupInfo, to_add
from worker.library.run import Run
from worker.library.sampling import SamplingParams, to_samplings
from worker.library.text import Text
from worker.request import Add, Sampling

_TRAVELS: Final = msgspec.msgpack.Decoder(Add)
# What values of a wrong kind raise on that way.
_WRONG: Final = (TypeError, AttributeError, ValueError, OverflowError, msgspec.MsgspecError)
_NO_SAMPLING: Final = Sampling(seed=0)

# Text, or ids: a list, an array, or anything else that gives whole numbers, numpy's included.
Prompt = str | Iterable[int]


class Options(TypedDict, total=False):
    """What else a call may say of its prompts.

    `cache_salt`: only prompts with the same salt share cache. `priority`: higher goes first.
    `decode`: whether outputs get text; by default those of prompts that are text.
    """

    cache_salt: str
    priority: int
    decode: bool


def make_runs(
    prompts: Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    options: Options,
    *,
    text: Text,
    info: GroupInfo,
    on_end: Callable[[Run], None],
) -> list[Run]:
    """Return a run for each choice of each prompt, in order; a bad one holds its error.

    Args:
        prompts: What to go on from.
        sampling: For all prompts, or one for each.
        options: Of all prompts.
        text: Reads those that are text.
        info: Of the group that will take them.
        on_end: Told the end of each.

    Raises:
        InvalidRequest: Arguments do not fit each other, or there is no tokenizer for texts.
    """
    _check_names(options)
    reads = _read_all(prompts, text)
    runs: list[Run] = []
    for at, (read, params) in enumerate(
        zip(reads, _one_for_each(sampling, len(reads)), strict=True)
    ):
        samplings, error = _samplings(read, params, info)
        choices: list[Run] = []
        for each in samplings:
            run = Run(
                slot=len(runs) + len(choices),
                prompt_index=at,
                prompt=read.ids,
                sampling=each,
                is_text=read.is_text,
                cache_salt=options.get("cache_salt", ""),
                priority=options.get("priority", 0),
                on_end=on_end,
                first=choices[0] if choices else None,
                error=error,
            )
            choices.append(run)
        _check(choices, info)
        runs += choices
    return runs


def _check_names(options: Options) -> None:
    for name in options:
        if name not in Options.__annotations__:
            known = ", ".join(Options.__annotations__)
            raise InvalidRequest(f"{name}: there is no such option, only {known}", field=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """A prompt as ids (little-endian uint32), or why it has none."""

    ids: bytes = b""
    is_text: bool = False
    error: MeshError | None = None


def _read_all(prompts: Sequence[Prompt], text: Text) -> list[_Read]:
    if isinstance(prompts, str | bytes):
        raise InvalidRequest("a list of prompts is expected; for one, give [prompt]")
    texts = [at for at, prompt in enumerate(prompts) if isinstance(prompt, str)]
    encoded = text.encode([str(prompts[at]) for at in texts]) if texts else []
    by_place = dict(zip(texts, encoded, strict=True))
    return [
        _read(by_place[at], is_text=True) if at in by_place else _read(prompt, is_text=False)
        for at, prompt in enumerate(prompts)
    ]


def _read(ids: Any, *, is_text: bool) -> _Read:
    if isinstance(ids, MeshError):
        return _Read(is_text=is_text, error=ids)
    if isinstance(ids, bytes | bytearray):
        return _Read(error=InvalidRequest("a prompt is a text or ids, not bytes", field="prompts"))
    try:
        # numpy and torch give their numbers much faster at once than one by one.
        numbers = ids.tolist() if hasattr(ids, "tolist") else ids
        return _Read(ids=pack_ids(numbers), is_text=is_text)
    except (TypeError, ValueError, OverflowError) as fault:
        error = InvalidRequest(f"a prompt is a text or ids: {fault}", field="prompts")
        return _Read(is_text=is_text, error=error)


def _one_for_each(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    _check_kind(sampling)
    if len(sampling) != count:
        raise InvalidRequest(
            f"{len(sampling)} sampling parameters for {count} prompts", field="sampling"
        )
    return sampling


def _check_kind(sampling: object) -> None:
    each = sampling if isinstance(sampling, list | tuple) else [sampling]
    for one in each:
        if not isinstance(one, SamplingParams):
            kind = type(one).__name__
            raise InvalidRequest(
                f"sampling: expected SamplingParams, or a list of them, got {kind}",
                field="sampling",
            )


def _samplings(
    read: _Read, params: SamplingParams, info: GroupInfo
) -> tuple[list[Sampling], MeshError | None]:
    if read.error is not None:
        return [_NO_SAMPLING], read.error
    try:
        room = info.max_model_len - len(read.ids) // ID_BYTES
        return to_samplings(params, room=room), None
    except MeshError as error:
        return [_NO_SAMPLING], error


def _check(choices: Sequence[Run], info: GroupInfo) -> None:
    # As the group does, but before anything else is computed.
    if choices[0].error is None:
        error: MeshError | None = None
        try:
            # There and back as it travels: what ranks can't read would take them down.
            _TRAVELS.decode(msgspec.msgpack.encode(to_add(choices[0].ask(), info, request_id=0)))
        except MeshError as refusal:
            error = refusal
        except _WRONG as fault:
            error = InvalidRequest(f"a value is of no kind that is expected: {fault}")
        for run in choices:
            run.error = error
