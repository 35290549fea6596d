"""What all outputs of a request have in common, decided before any place is booked.

The prompt becomes ids, limits and seed are decided, and everything that is wrong
with the request is said here. Knows the fleet's limits and the tokenizers; books
and sends nothing.
"""

import asyncio
import random
from dataclasses import dataclass

from radixmesh.blocks import ID_BYTES
from radixmesh.errors import NoReplicaReady
from router.checks import check_ids, decide
from router.fleet.ask import Ask, ModelInfo, SubmitSpec
from router.journal import Journal
from router.output import Output
from router.ports import Encoder, Fleet
from router.request import GenerateRequest, IdsPrompt, Sampling
from router.text.detokenizers import DecodeOptions
from router.text.pool import Serving

# A replica as a wish: group and rank.
Home = tuple[str, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A request whose prompt is ids and whose sampling is decided."""

    request: GenerateRequest
    model: ModelInfo
    prompt_ids: bytes
    fingerprint: str
    sampling: Sampling

    @property
    def prompt_tokens(self) -> int:
        """Ids of the prompt."""
        return len(self.prompt_ids) // ID_BYTES

    @property
    def serving(self) -> Serving:
        """What a detokenizer must have loaded."""
        return Serving(self.model.name, self.fingerprint)

    @property
    def options(self) -> DecodeOptions:
        """How outputs are turned into text."""
        request, sampling = self.request, self.sampling
        return DecodeOptions(
            stop_strings=request.stop,
            include_stop=request.include_stop,
            min_tokens=sampling.min_tokens,
            keep_special_tokens=request.keep_special_tokens,
            render_tokens=sampling.logprobs,
        )

    def journal(self) -> Journal:
        """Return a new journal for one output."""
        sampling = self.sampling
        ends = () if sampling.ignore_eos else self.model.eos_ids
        return Journal(
            limit=sampling.max_tokens or 1,
            stop_ids=(*sampling.stop_token_ids, *ends),
            min_tokens=sampling.min_tokens,
            logprobs=sampling.logprobs,
            vocab_size=self.model.vocab_size,
        )

    def ask(self, output: Output | None = None, home: Home | None = None) -> Ask:
        """Return the wish for a place.

        Args:
            output: What continues; None before there is one.
            home: The replica of the request's first output, for the others.
        """
        request = self.request
        resuming = output is not None and output.retries.resuming
        hint = (request.hint_group, request.hint_dp_rank) if resuming or home is None else home
        return Ask(
            model=self.model.name,
            ids=self.prompt_ids + (output.journal.ids if output else b""),
            fingerprint=self.fingerprint,
            max_tokens=self.sampling.max_tokens or 1,
            cache_salt=request.cache_salt,
            session=request.session,
            hint_group=hint[0],
            hint_dp_rank=hint[1],
            avoid=output.retries.avoid if output else frozenset(),
            resume=resuming,
        )

    def spec(self, output: Output, timeout_s: float) -> SubmitSpec:
        """Return what is missing of an output, for a replica."""
        return SubmitSpec(
            prompt_ids=self.prompt_ids,
            output_ids=output.journal.ids,
            sampling=self.sampling,
            choice=output.choice,
            cache_salt=self.request.cache_salt,
            timeout_s=timeout_s,
            priority=self.request.priority,
            fingerprint=self.fingerprint,
        )


class Planner:
    """Makes plans.

    Args:
        fleet: Says what models take.
        encoder: Turns prompts into ids.
        ready_wait_s: How long to wait for groups to say what they serve.
        default_max_tokens: Output limit of requests that bring none.
        rng: Draws seeds.
    """

    def __init__(
        self,
        fleet: Fleet,
        encoder: Encoder,
        *,
        ready_wait_s: float,
        default_max_tokens: int,
        rng: random.Random,
    ) -> None:
        self._fleet = fleet
        self._encoder = encoder
        self._ready_wait_s = ready_wait_s
        self._default_max_tokens = default_max_tokens
        self._rng = rng

    async def plan(self, request: GenerateRequest, timeout_s: float) -> Plan:
        """Return the plan of a request that passed `checks.check`.

        Raises:
            MeshError: Something is wrong with it, or nobody can turn it into ids.
        """
        model = await self._model(request.model)
        if isinstance(request.prompt, IdsPrompt):
            ids, fingerprint = request.prompt.ids, model.fingerprint
        else:
            wanted = Serving(model.name, model.fingerprint)
            encoded = await self._encoder.encode(request.prompt, wanted, timeout_s=timeout_s)
            ids, fingerprint = encoded.ids, encoded.fingerprint
        check_ids(ids, vocab_size=model.vocab_size)
        sampling = decide(
            request.sampling,
            prompt_tokens=len(ids) // ID_BYTES,
            max_model_len=model.max_model_len,
            default_max_tokens=self._default_max_tokens,
            rng=self._rng,
        )
        return Plan(
            request=request,
            model=model,
            prompt_ids=ids,
            fingerprint=fingerprint,
            sampling=sampling,
        )

    async def _model(self, name: str) -> ModelInfo:
        try:
            return self._fleet.limits(name)
        except NoReplicaReady as error:
            # Some group has not said yet what it serves.
            try:
                async with asyncio.timeout(self._ready_wait_s):
                    await self._fleet.wait_ready(name)
            except TimeoutError:
                raise error from None
        return self._fleet.limits(name)
