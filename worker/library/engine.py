"""`Engine`: a worker group inside a program, without gRPC.

Turns calls of any thread or event loop into runs and back; the work is done by ranks.
"""

import asyncio
import os
import queue
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, Unpack

from radixmesh.blocks import unpack_ids
from radixmesh.errors import InvalidRequest
from radixmesh.models import resolve
from worker.front.ask import GroupInfo
from worker.library.options import make_settings
from worker.library.prompts import Options, Prompt, make_runs
from worker.library.run import Delta, Output, Piece, Run, finish_reason
from worker.library.sampling import SamplingParams
from worker.library.text import Text
from worker.library.thread import GroupThread
from worker.request import GOES_ON

_T = TypeVar("_T")


class Engine:
    """A model that runs in rank processes of this program.

        with Engine("smollm2", dp=2) as engine:
            outputs = engine.generate(["The capital of France is"], SamplingParams(max_tokens=8))
            print(outputs[0].text)

    All methods may be called from any thread, and from inside a running event loop. The ranks
    are gone when `close` returns, when the engine is collected, and when the program ends,
    however it ends. A rank that dies is replaced, and what ran there goes on where it was.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        dp: int = 1,
        pp: int = 1,
        tp: int = 1,
        dtype: Literal["auto", "bfloat16", "float32", "float16"] = "auto",
        engine: Literal["torch", "fake"] = "torch",
        **settings: Any,
    ) -> None:
        """Start the ranks and wait until all replicas are ready.

        Args:
            model: Hugging Face directory, or the name of a model converted before.
            dp: Data-parallel replicas.
            pp: Pipeline stages of a replica.
            tp: Tensor-parallel ranks of a stage.
            dtype: Number format.
            engine: What computes.
            settings: Further fields of `worker.settings.WorkerSettings`, by name.

        Raises:
            InvalidRequest: There is no such model or setting, or the ranks refuse them.
            NoReplicaReady: The replicas were not ready within `startup_timeout_s`.
            GroupLost: The ranks failed again and again.
        """
        self._settings = make_settings(
            model, dp=dp, pp=pp, tp=tp, dtype=dtype, engine=engine, **settings
        )
        model_dir = resolve(self._settings.model)
        self._text = Text(model_dir)
        self._thread = GroupThread(self._settings, model_dir)
        # Runs when the engine is collected, and at the exit of the interpreter.
        self._close = weakref.finalize(self, self._thread.close)
        try:
            self._thread.start()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        settings = self._settings
        shape = f"dp={settings.dp}, pp={settings.pp}, tp={settings.tp}"
        state = "open" if self._close.alive else "closed"
        return f"<Engine {settings.served_name} {shape}, {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs, and the ranks. Does nothing when called again."""
        self._thread.close()
        self._close.detach()

    @property
    def info(self) -> GroupInfo:
        """What the group is: its limits, its vocabulary, its weight version."""
        return self._thread.info

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer of the model, for chat templates and the like.

        Raises:
            InvalidRequest: The model directory has none.
        """
        return self._text.tokenizer

    # Outputs.

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raise_errors: bool = True,
        on_output: Callable[[Output], None] | None = None,
        **options: Unpack[Options],
    ) -> list[Output]:
        """Generate outputs for any number of prompts; the group gets as many as it takes.

        Args:
            prompts: Texts, or ids (lists, arrays, numpy arrays).
            sampling: For all prompts, or one for each.
            raise_errors: Raise the first failure, and give up the rest. Otherwise failures
                stay in `Output.error`.
            on_output: Called in this thread with each output that is done, in no order.
            options: See `Options`.

        Returns:
            Outputs in the order of the prompts, the choices of a prompt one after another.

        Raises:
            InvalidRequest: Arguments do not fit each other.
            MeshError: A prompt failed, or the engine is closed.
        """
        finished: queue.SimpleQueue[Run] = queue.SimpleQueue()
        runs = self._runs(prompts, sampling, finished.put, options)
        outputs: dict[int, Output] = {}
        with self._under_way(runs):
            for _ in runs:
                run = finished.get()
                outputs[run.slot] = self._output(run, options, raise_errors=raise_errors)
                if on_output is not None:
                    on_output(outputs[run.slot])
        return [outputs[slot] for slot in range(len(runs))]

    async def generate_async(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raise_errors: bool = True,
        on_output: Callable[[Output], None] | None = None,
        **options: Unpack[Options],
    ) -> list[Output]:
        """Do as `generate` does, without blocking the caller's event loop.

        Cancelling it gives up what runs.
        """
        finished: asyncio.Queue[Run] = asyncio.Queue()
        put = _crossing(asyncio.get_running_loop(), finished.put_nowait)
        runs = await asyncio.to_thread(self._runs, prompts, sampling, put, options)
        outputs: dict[int, Output] = {}
        with self._under_way(runs):
            for _ in runs:
                run = await finished.get()
                outputs[run.slot] = self._output(run, options, raise_errors=raise_errors)
                if on_output is not None:
                    on_output(outputs[run.slot])
        return [outputs[slot] for slot in range(len(runs))]

    async def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerator[Piece, None]:
        """Yield the output of one prompt as it comes.

        Leaving the iteration (`aclose`) gives up the rest.

        Raises:
            InvalidRequest: `n` is not 1.
            MeshError: The prompt failed, or the engine is closed.
        """
        told: asyncio.Queue[Delta | Run] = asyncio.Queue()
        put = _crossing(asyncio.get_running_loop(), told.put_nowait)
        runs = await asyncio.to_thread(self._runs, [prompt], sampling, put, options)
        if len(runs) != 1:
            raise InvalidRequest("a stream has one output", field="n")
        [run] = runs
        run.on_delta = put
        wanted = options.get("decode", run.is_text)
        text = await asyncio.to_thread(self._text.stream) if wanted else None
        with self._under_way(runs):
            while isinstance(item := await told.get(), Delta):
                last = item.finish != GOES_ON
                ids = unpack_ids(item.ids).tolist()
                yield Piece(
                    ids=ids,
                    text=text.step(ids, last=last) if text else "",
                    logprobs=list(item.logprobs) if run.sampling.logprobs else [],
                    tops=list(item.tops) if run.sampling.top_logprobs else [],
                    finish_reason=finish_reason(item.finish),
                    weight_version=item.weight_version,
                )
        if item.error is not None:
            raise item.error

    # Operation.

    def flush_cache(self) -> int:
        """Empty the prefix caches of all replicas. Returns how many blocks left them.

        Raises:
            GroupLost: A replica died meanwhile.
            Draining: The engine is closed.
        """
        return self._thread.call(lambda group: group.flush())

    def pause(self) -> None:
        """Have nothing computed until `resume`. What runs keeps its place, what comes waits.

        Returns when no step is under way. A replica that is replaced meanwhile is paused too.

        Raises:
            Draining: The engine is closed.
        """
        self._thread.call(lambda group: group.operation.pause())

    def resume(self) -> None:
        """Go on after `pause`.

        Raises:
            Draining: The engine is closed.
        """
        self._thread.call(lambda group: group.operation.resume())

    def update_weights(self, folder: str | os.PathLike[str], version: str) -> None:
        """Compute with the weights of another directory of the same model from now on.

        Caches are emptied. Outputs under way keep the ids that they have and go on with the
        new weights; `Output.weight_version` tells which weights chose the last id. Returns
        when all replicas compute with them; one that can't is started anew with them.

        Raises:
            InvalidRequest, NotSupported: The weights do not fit, or `version` is no text,
                empty or in use; nothing has changed.
            NoReplicaReady: No replica is up.
            GroupLost: The replica that tried them first died; nothing has changed.
            Draining: The engine is closed.
        """
        path = Path(folder).absolute()
        _check_texts(folder=str(path), version=version)
        if not path.is_dir():
            raise InvalidRequest(f"there is no directory {path}", field="folder")
        self._thread.call(lambda group: group.operation.update_weights(str(path), version))

    # Within.

    def _runs(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        put: Callable[[Any], None],
        options: Options,
    ) -> list[Run]:
        return make_runs(prompts, sampling, options, text=self._text, info=self.info, on_end=put)

    @contextmanager
    def _under_way(self, runs: Sequence[Run]) -> Iterator[None]:
        self._thread.begin(runs)
        try:
            yield
        finally:
            if not all(run.over for run in runs):
                self._thread.cancel(runs)

    def _output(self, run: Run, options: Options, *, raise_errors: bool) -> Output:
        if raise_errors and run.error is not None:
            raise run.error
        wanted = options.get("decode", run.is_text)
        return run.output(self._text.decode(run.ids) if wanted else None)


def _check_texts(**texts: object) -> None:
    """Refuse, by name, what is no string or has no bytes in UTF-8: it can't travel."""
    for name, text in texts.items():
        try:
            str.encode(text)  # type: ignore[arg-type]
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest(f"{name}: expected a text, got {text!r}", field=name) from error


def _crossing(loop: asyncio.AbstractEventLoop, take: Callable[[_T], None]) -> Callable[[_T], None]:
    """Return `take` for calls from another thread; a loop that is closed takes nothing."""

    def put(item: _T) -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(take, item)

    return put
