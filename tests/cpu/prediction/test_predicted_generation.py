"""Generation over a predicted cache: with a perfect predictor, or with everything computed, the plain model's."""

import json
from pathlib import Path

import pytest
import torch

from kvforge.common.errors import CheckpointError
from kvforge.common.exact_intervals import ExactTokens
from kvforge.common.mean_attention import mean_attention
from kvforge.prediction.filled_cache import compute
from kvforge.prediction.load import load_base, load_pair, load_predictor
from kvforge.prediction.predicted_generation import generate, predicted_prompt
from kvforge.rewire.source import open_source
from tests.support.models.checkpoints import WITH_HEADS, make_checkpoint
from tests.support.models.prediction import own_predictor, random_predictor
from tests.support.rounding import assert_near, model_error, relative_error, sum_error

PROMPT = [3 + (7 * index) % 300 for index in range(90)]


def plain(base, prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        with torch.inference_mode():
            tokens.append(int(base(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("family", sorted(WITH_HEADS))
def test_a_base_with_its_own_projections_gives_its_own_tokens(tmp_path: Path, family: str) -> None:
    checkpoint = make_checkpoint(tmp_path / "base", family)
    base, predictor = load_pair(checkpoint, own_predictor(checkpoint, tmp_path / "own"), torch.float32)
    assert generate(base, predictor, PROMPT, 8) == plain(base, PROMPT, 8)


@pytest.fixture(scope="module")
def random_pair(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("random")
    checkpoint = make_checkpoint(folder / "base")
    options = {"layers": (0, 0, 1, 1), "num_hidden_layers": 3, "hidden_size": 32, "head_dim": 8}
    return load_pair(checkpoint, random_predictor(folder / "p", checkpoint, **options), torch.float32)


def test_computing_everything_again_equals_the_base(random_pair) -> None:
    base, predictor = random_pair
    want = plain(base, PROMPT, 8)
    assert generate(base, predictor, PROMPT, 8) != want
    for exact in (ExactTokens(first=90), ExactTokens(last=90), ExactTokens(share=1.0), ExactTokens(40, 50)):
        assert generate(base, predictor, PROMPT, 8, exact) == want


def test_a_prompt_of_one_token(random_pair) -> None:
    base, predictor = random_pair
    assert generate(base, predictor, [5], 6, ExactTokens(share=0.5)) == plain(base, [5], 6)


def test_exact_first_tokens_are_the_base_s_and_the_rest_is_predicted(random_pair) -> None:
    base, predictor = random_pair
    caches = {}
    for first in (0, 20, 90):
        cache, intervals = predicted_prompt(base, predictor, PROMPT, ExactTokens(first), len(PROMPT))
        for start, end in intervals:
            compute(base, cache, torch.tensor([PROMPT[start:end]]), start)
        caches[first] = cache
    for owner in base.sizes.owners:
        none, some, whole = (caches[first].read(owner, 89) for first in (0, 20, 90))
        for half in (0, 1):
            assert_near(some[half][:, :20], whole[half][:, :20], model_error(base.sizes, 90))
            assert torch.equal(some[half][:, 20:], none[half][:, 20:])
            assert not torch.equal(some[half][:, 20:], whole[half][:, 20:])


def test_predicted_keys_are_rotated_as_the_base_rotates(random_pair) -> None:
    base, predictor = random_pair
    cache, _ = predicted_prompt(base, predictor, [9] * 12, ExactTokens(), 12)
    k, v = cache.read(0, 12)  # layer 0's input is the same at each position
    bound = model_error(predictor.sizes, 12)
    assert_near(v, v[:, :1].expand_as(v), bound)
    assert_near(k.norm(dim=-1), k[:, :1].norm(dim=-1).expand(1, 12, -1), bound)
    assert relative_error(k[:, 1], k[:, 0]) > 100 * bound


def test_importance_chooses_what_the_end_attends_to() -> None:
    q, k = torch.zeros(4, 2, 8), torch.zeros(20, 1, 8)
    q[..., 0], k[7, 0, 0] = 10.0, 10.0
    scores = mean_attention(q, k, 1.0)
    assert int(scores.argmax()) == 7 and scores[7] > 0.99
    # Without any preference each query divides its attention evenly; the last keys are seen by fewer queries.
    even = mean_attention(torch.zeros(4, 2, 8), torch.zeros(20, 1, 8), 1.0)
    assert_near(even[19], torch.tensor(1 / 20), sum_error(20))
    assert_near(even[0], sum(1 / torch.arange(17.0, 21)) / 4, sum_error(20))


def test_base_and_predictor_have_to_belong_together(tmp_path: Path) -> None:
    base, other = make_checkpoint(tmp_path / "base"), make_checkpoint(tmp_path / "other", num_hidden_layers=3)
    predictor = own_predictor(base, tmp_path / "p")
    with pytest.raises(CheckpointError, match="predicts the cache of"):
        load_predictor(predictor, open_source(other).config, torch.float32)
    file = predictor / "config.json"
    hf = json.loads(file.read_text())
    for said in (None, ["x" * 5000], {"model_type": "x" * 5000}):
        file.write_text(json.dumps(hf | {"kv_prediction": {**hf["kv_prediction"], "base": said}}))
        with pytest.raises(CheckpointError, match="cache of another model: its model_type is") as refused:
            load_predictor(predictor, open_source(base).config, torch.float32)
        assert len(str(refused.value)) < 500
    with pytest.raises(CheckpointError, match="is no KV predictor; make one with"):
        load_predictor(base, open_source(base).config, torch.float32)
    assert load_base(open_source(base), torch.float32).sizes.num_layers == 4
