"""The library with the torch engine on a tiny model, against transformers' own generate."""

from pathlib import Path

import pytest

from tests.fakes.model_dir import VOCAB_SIZE, make_model_dir
from tests.fakes.tiny_models import generate, make_tiny_model
from worker import Engine, SamplingParams

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def make_model(folder: Path, seed: int) -> Path:
    make_model_dir(folder)
    return make_tiny_model(folder, "llama", seed=seed, vocab_size=VOCAB_SIZE)


def test_a_training_loop_samples_scores_and_swaps_weights(tmp_path: Path) -> None:
    first, second = make_model(tmp_path / "first", 1), make_model(tmp_path / "second", 2)
    prompts = [[5, 6, 7, 8], list(range(40, 70))]
    greedy = SamplingParams(
        temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=True, top_logprobs=2
    )
    with Engine(first, dtype="float32", kv_tokens=2048, weight_version="1") as engine:
        for folder, version in ((first, "1"), (second, "2")):
            if folder is second:
                engine.update_weights(second, "2")
            for output in engine.generate(prompts, greedy):
                assert output.ids == generate(folder, output.prompt_ids, 8)
                assert output.weight_version == version
                assert [tops[0][0] for tops in output.tops] == output.ids
                assert [tops[0][1] for tops in output.tops] == pytest.approx(output.logprobs)
        # What was drawn is scored the same when it comes as a prompt.
        [drawn] = engine.generate([prompts[0]], SamplingParams(max_tokens=6, logprobs=True, seed=3))
        scoring = SamplingParams(max_tokens=1, prompt_logprobs=True)
        [scored] = engine.generate([drawn.prompt_ids + drawn.ids], scoring)
        assert scored.prompt_logprobs[len(prompts[0]) :] == pytest.approx(drawn.logprobs, abs=1e-4)
        again = SamplingParams(max_tokens=6, seed=3, n=2)
        same, other = engine.generate([prompts[0]], again)
        assert same.ids == drawn.ids
        assert other.ids != drawn.ids
        [output] = engine.generate(["The river was wide"], SamplingParams(max_tokens=3))
        assert output.text is not None
