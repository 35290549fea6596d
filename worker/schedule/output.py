"""What one step says to the front, gathered in columns while the step goes on. Pure."""

from array import array

from radixmesh.blocks import pack_ids
from radixmesh.errors import MeshError
from worker.request import (
    Answer,
    CacheChange,
    CacheDigest,
    Failed,
    LoadReport,
    PromptScores,
    Started,
    StepOutput,
    Tops,
)
from worker.schedule.draws import Draw, part_of


class OutputColumns:
    """Collects until `take`, then begins anew."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._accepted: list[int] = []
        self._started: list[Started] = []
        self._request_ids: list[int] = []
        self._positions: list[int] = []
        self._counts: list[int] = []
        self._finishes: list[int] = []
        self._token_ids: array[int] = array("I")
        self._logprobs: list[float] = []
        self._with_logprobs = False
        self._tops = Tops(counts=[], ids=[], logprobs=[])
        self._prompt_scores: list[PromptScores] = []
        self._failed: list[Failed] = []
        self._answers: list[Answer] = []

    def accept(self, request_id: int) -> None:
        """The request is queued."""
        self._accepted.append(request_id)

    def start(self, request_id: int, *, cached_tokens: int, waited_us: int) -> None:
        """The request's prefill began."""
        self._started.append(Started(request_id, cached_tokens, waited_us))

    def token(
        self, request_id: int, position: int, draw: Draw, finish: int, *, asked: bool
    ) -> None:
        """One id was drawn; `asked` says whether its logprob is wanted."""
        self._request_ids.append(request_id)
        self._positions.append(position)
        self._counts.append(1)
        self._finishes.append(finish)
        self._token_ids.append(draw.token_id)
        self._logprobs.append(draw.logprob)
        self._with_logprobs |= asked
        if draw.top_ids:
            self._fill_counts(len(self._token_ids) - 1)
            self._tops.counts.append(len(draw.top_ids))
            self._tops.ids.extend(draw.top_ids)
            self._tops.logprobs.extend(draw.top_logprobs)

    def prompt_scores(
        self, request_id: int, position: int, logprobs: list[float], tops: Tops, *, skip: int
    ) -> None:
        """Logprobs of the prompt ids from `position` on, of which the first `skip` are known."""
        self._prompt_scores.append(
            PromptScores(request_id, position + skip, logprobs[skip:], part_of(tops, skip))
        )

    def finish_at_once(self, request_id: int, position: int, finish: int) -> None:
        """The journal of a request is its whole output: it ends without a further id."""
        self._request_ids.append(request_id)
        self._positions.append(position)
        self._counts.append(0)
        self._finishes.append(finish)

    def fail(self, request_id: int, error: MeshError) -> None:
        """The request ended by an error."""
        self._failed.append(Failed(request_id, error.reason, error.message))

    def answer(self, answer: Answer) -> None:
        """A control was carried out, or refused."""
        self._answers.append(answer)

    def take(
        self, step: int, *, changes: list[CacheChange], digest: CacheDigest, load: LoadReport
    ) -> StepOutput:
        """Return everything since the last call."""
        if self._tops.ids:
            self._fill_counts(len(self._token_ids))
        output = StepOutput(
            step=step,
            accepted=self._accepted,
            started=self._started,
            request_ids=self._request_ids,
            positions=self._positions,
            counts=self._counts,
            finishes=self._finishes,
            token_ids=pack_ids(self._token_ids),
            logprobs=self._logprobs if self._with_logprobs else [],
            failed=self._failed,
            changes=changes,
            digest=digest,
            load=load,
            answers=self._answers,
            tops=self._tops,
            prompt_scores=self._prompt_scores,
        )
        self._reset()
        return output

    def _fill_counts(self, length: int) -> None:
        # Hardly anybody asks for alternatives: who did not is written down when one did.
        self._tops.counts.extend([0] * (length - len(self._tops.counts)))


def says_something(output: StepOutput) -> bool:
    """Whether anything but the load and the digest is in it."""
    return bool(
        output.accepted
        or output.started
        or output.request_ids
        or output.failed
        or output.changes
        or output.answers
        or output.prompt_scores
    )
