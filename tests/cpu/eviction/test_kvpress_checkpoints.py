"""The checkpoints of the kvpress fixtures can be made again, and give what the fixtures hold."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.support.eviction.kvpress import Case, case_names, load_case, weights_sha256
from tests.support.models.checkpoints import make_checkpoint
from tests.support.rounding import assert_near, config_of, model_error


@pytest.fixture(scope="module", params=case_names())
def case(request: pytest.FixtureRequest) -> Case:
    return load_case(request.param)


@pytest.fixture(scope="module")
def checkpoint(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kvpress") / case.name
    return make_checkpoint(folder, seed=case.recipe.seed, **case.recipe.overrides)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")


def test_the_weights_are_those_of_the_fixture(case: Case, checkpoint: Path) -> None:
    assert weights_sha256(checkpoint) == case.recipe.weights_sha256, (
        "make_checkpoint gives other weights than when the fixtures were made: make them again (docs/kv-policies.md)"
    )


@torch.no_grad()
def test_the_prompt_has_the_keys_and_values_of_the_fixture(
    case: Case, model: LlamaForCausalLM, checkpoint: Path
) -> None:
    bound = model_error(config_of(checkpoint), case.num_tokens)
    cache = model(torch.tensor([case.recipe.prompt_ids]), use_cache=True).past_key_values
    for layer, keys, norms in zip(cache.layers, case.keys, case.value_norms, strict=True):
        assert_near(layer.keys[0], keys, bound)
        assert_near(layer.values[0].norm(dim=-1), norms, bound)


def range_of_logarithms(weights: torch.Tensor) -> float:
    """The largest difference of two scores of a query, or more: a weight is relatively as far off as its score and its
    denominator are absolutely."""
    return -float(weights[weights > 0].log().min())


@torch.no_grad()
def test_kvzip_scores_are_the_largest_weights_of_a_repetition(
    case: Case, model: LlamaForCausalLM, checkpoint: Path
) -> None:
    """KVzip (arXiv 2505.23416): the prompt, a request to repeat it and the prompt again; of each key of the first, the
    maximum over all later queries and over all heads of its KV head, where h2o and others have the heads' mean."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    request = tokenizer.encode("\n\nRepeat the previous context exactly.\n", add_special_tokens=False)
    prompt = case.recipe.prompt_ids
    attentions = model(torch.tensor([[*prompt, *request, *prompt]]), output_attentions=True).attentions
    bound = 2 * model_error(config_of(checkpoint), len(attentions[0][0, 0]))
    recorded = case.of("kvzip")
    assert recorded
    for run in recorded:
        assert run.scores is not None
        for weights, scores in zip(attentions, run.scores, strict=True):
            largest = weights[0, :, len(prompt) :, : len(prompt)].unflatten(0, (len(scores), -1)).amax((1, 2))
            sinks = run.parameters["n_sink"]
            assert_near(scores[:, sinks:], largest[:, sinks:], bound * range_of_logarithms(weights))
            assert bool((scores[:, :sinks] > 1).all())
