"""KVzap: scorers that kvpress wrote, which tokens go and which pages with them, and how scorers are trained.

``data/kvzap-*`` are random scorers that kvpress 0.5.5's KVzapModel saved, with its scores of ``INPUTS``."""

import dataclasses
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.checkpoint.scorer import open_scorer
from kvforge.common.errors import BuildError, CheckpointError, KvforgeError
from kvforge.compiler import BuildOptions
from kvforge.distill import loop, world
from kvforge.prediction import scorer_training
from kvforge.prediction.repetition_scores import repetition_scores
from kvforge.prediction.scorer_training import LOOP, ScorerOptions, train_scorer
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.swiftkv import load_model
from model_defs.token_scores import GRAIN
from tests.support.eviction.cases import write_model
from tests.support.models.small_models import small_session
from tests.support.sessions.eager import eager_session

pytestmark = pytest.mark.usefixtures("one_thread")
DATA = Path(__file__).with_name("data")
INPUTS = torch.linspace(-2, 2, 4 * 3 * 32).sin().view(4, 3, 32)
TO_A_GRAIN = GRAIN / 2 + 2**-20
"""Half a grain, and what float32 makes of a sum of 32 products below 1."""
IN_LOGARITHMS = 1e-4
"""800 roundings of float32 in weights, norms and sums of up to 64 products, twice."""
OF_BFLOAT16 = 2**-8
"""Its rounding, relative."""
PLAIN = {"head_dim": 10, "cut": 3, "num_layers": 3, "kv_scorer": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kvzap") / "llama"
    write_model("llama", path)
    return path


def options_of(scorer: Path | None, policy: str = "kvzap", **more) -> BuildOptions:
    limits = {"max_num_tokens": 64, "max_num_seqs": 4, "max_seq_len": 128, "kv_policy": policy}
    return BuildOptions(**{"dtype": "float32", **limits, "kv_scorer": scorer and str(scorer), **more})


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_scorers_of_kvpress_score_as_there(checkpoint: Path, kind: str) -> None:
    session = eager_session(checkpoint, options_of(DATA / f"kvzap-{kind}"))
    wanted = load_file(DATA / f"kvzap-{kind}" / "scores")["scores"]
    for owner in range(3):
        scores = session._lower.scorers[str(owner)](INPUTS[:, owner], None)
        assert scores.dtype == torch.float32
        assert (scores - wanted[:, owner]).abs().max() <= TO_A_GRAIN


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, "is no scorer of KVzap: its model_type is 'llama'"),
        ({"input_dim": 64}, "its input_dim is 64, and 32 in this one"),
        ({"output_dim": 8}, "its output_dim is 8, and 2"),
        ({"n_modules": 4}, "its n_modules is 4, and 3"),
        ({"cut": 2}, "its cut is 2, and None in this one"),
        ({"hidden_dim": 8}, "hidden_dim is 8; give a scorer with 16 to 65536"),
        ({"hidden_dim": 16}, "layers.0.0.weight"),
        ({"tensors": {"layers.3.weight": torch.zeros(2, 32)}}, "has layers.3.weight, which no scorer of KVzap has"),
        ({"tensors": {"layers.1.weight": torch.zeros(2, 31)}}, "layers.1.weight"),
    ],
)
def test_what_is_no_scorer_of_the_model_is_refused(checkpoint: Path, tmp_path: Path, change: dict, words: str) -> None:
    shutil.copytree(DATA / "kvzap-linear", tmp_path / "scorer")
    tensors = load_file(tmp_path / "scorer/model.safetensors") | change.pop("tensors", {})
    save_file(tensors, tmp_path / "scorer/model.safetensors")
    file = tmp_path / "scorer/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=words):
        open_scorer(tmp_path / "scorer", read_model_config(open_model(checkpoint)))


def test_a_policy_and_its_scorer_go_together(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="--kv-policy kvzip has no scorer; leave --kv-scorer out"):
        eager_session(checkpoint, options_of(DATA / "kvzap-mlp", "kvzip:budget=64"))
    shutil.copytree(checkpoint, tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare/kvzap")
    with pytest.raises(BuildError, match=r"kvzap needs a scorer, and .* has none in kvzap/; give one by --kv-scorer"):
        eager_session(tmp_path / "bare", options_of(None))
    with pytest.raises(BuildError, match="kvzap: block 24 is no multiple of the 16 tokens of a page; give 32"):
        eager_session(checkpoint, options_of(None, "kvzap:budget=64,block=24", page_size=16))


def run(policy: str, length: int, bias: float, generated: int = 30) -> list[tuple[int, int]]:
    """Return the tokens computed and the pages held after each step of a prompt of ``length`` tokens."""
    session = small_session({"kv_policy": policy}, **PLAIN)
    for scorer in session._lower.scorers.values():
        scorer.last_bias.fill_(bias)
    engine, rng = LLMEngine(session=session, num_pages=64, enable_prefix_cache=False), random.Random(3)
    params = SamplingParams(temperature=0.0, max_tokens=generated, ignore_eos=True)
    engine.add_request("r", [rng.randrange(3, 96) for _ in range(length)], params)
    seen = []
    while engine.has_unfinished():
        engine.step()
        engine.check_invariants()
        if running := engine.scheduler.running:
            seen.append((running[0].num_computed, len(running[0].pages)))
    return seen


def test_pages_of_what_is_below_the_threshold_are_given_back() -> None:
    """Of 40 tokens, then 30: the window of 8 stays, the page that is not full, and what came since."""
    below = dict(run("kvzap:budget=64,block=8,window=8,threshold=400", 41, -50.0))
    assert [below[computed] for computed in (41, 42, 48, 49, 50)] == [11, 3, 4, 5, 3]
    assert max(pages for computed, pages in below.items() if computed > 41) == 5
    alone = dict(run("kvzap:budget=64,block=8,window=2,threshold=400", 42, -50.0))  # both in the last page
    assert [alone[computed] for computed in (42, 43, 50, 51)] == [11, 1, 3, 1]


@pytest.mark.parametrize(("length", "threshold", "bias"), [(41, 400, 50.0), (41, 0, -50.0), (5, 400, -50.0)])
def test_nothing_goes_above_the_threshold_or_within_the_window(length: int, threshold: int, bias: float) -> None:
    window = 100 if length == 5 else 8
    seen = run(f"kvzap:budget=112,block=8,window={window},threshold={threshold}", length, bias)
    assert all(pages == -(-computed // 4) for computed, pages in seen) and len(seen) >= 29


def test_the_budget_bounds_what_the_threshold_leaves() -> None:
    seen = run("kvzap:budget=16,block=8,window=4,threshold=400", 64, 50.0)
    assert max(pages for computed, pages in seen if computed > 64) == (16 + 8) // 4


def test_int8_weights_score_as_float32_does(checkpoint: Path) -> None:
    """The residual stream is in another basis there, and gains of norms are part of what reads it."""
    prompt, found = [random.Random(1).randrange(3, 320) for _ in range(40)], []
    for more in ({}, {"dtype": "bfloat16", "weight_dtype": "int8"}):
        session = eager_session(checkpoint, options_of(None, **more))
        engine = LLMEngine(session=session, num_pages=8, enable_prefix_cache=False)
        engine.add_request("r", prompt, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
        engine.step()
        page = engine.scheduler.running[0].pages[0]
        index = [pool.name for pool in session.manifest.policy.keeping.named_pools].index("score") - 5
        found.append(torch.stack([pool[index][page] for pool in engine.runner.pools]))
    assert (found[0] - found[1]).abs().max() < 0.2 * found[0].std() and found[0].std() > 0.3


def test_scores_are_those_of_kvzip_plus(checkpoint: Path) -> None:
    """Against transformers' attention weights."""
    source = open_model(checkpoint)
    model = load_model(source, read_model_config(source), torch.float32)
    ids, request = [random.Random(2).randrange(3, 320) for _ in range(23)], [5, 6, 7]
    other = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager", dtype=torch.float32)
    entering = {}
    for index, layer in enumerate(other.model.layers):
        layer.self_attn.register_forward_hook(
            lambda module, args, kwargs, output, index=index: entering.update({index: kwargs["hidden_states"][0]}),
            with_kwargs=True,
        )
    with torch.no_grad():
        told = other.model(torch.tensor([[*ids, *request, *ids]]), output_attentions=True).attentions
        for index, (inputs, scores) in enumerate(repetition_scores(model, ids, request)):
            attention, h = other.model.layers[index].self_attn, entering[index]
            values = F.linear(h, attention.v_proj.weight).unflatten(1, (2, -1)).repeat_interleave(2, 1)[:23]
            out = attention.o_proj.weight.unflatten(1, (4, -1))
            written = torch.einsum("thd,nhd->thn", values, out).norm(dim=-1)
            weights = told[index][0][:, -23:, :23] / h[-23:].norm(dim=-1)[:, None]
            wanted = (weights.amax(1) * written.T).unflatten(0, (2, 2)).amax(1).log().T
            assert (scores - wanted).abs().max() < IN_LOGARITHMS
            assert ((inputs.float() - h[:23]).abs() <= OF_BFLOAT16 * h[:23].abs() + IN_LOGARITHMS).all()


@pytest.mark.parametrize("model", ["llama", "qwen3-across"])
def test_a_trained_scorer_predicts_and_is_served(model: str, tmp_path: Path) -> None:
    write_model(model, tmp_path / "model")
    summary = train_scorer(tmp_path / "model", tmp_path / "scorer", ScorerOptions(0, 32, 96), progress=False)
    assert len(summary.unexplained) == 3 and max(summary.unexplained) < 0.9
    session = eager_session(tmp_path / "model", options_of(tmp_path / "scorer"))
    assert session.config.kv_scorer == 0


def test_an_interrupted_training_goes_on_where_it_was(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ScorerOptions(16, 6, 64, loop=dataclasses.replace(LOOP, max_steps=12, batch_size=32))
    train_scorer(checkpoint, tmp_path / "whole", options, progress=False)
    with monkeypatch.context() as patch:
        take = loop.take_steps
        patch.setattr(
            scorer_training, "take_steps", lambda run, work, every, stop, *rest: take(run, work, every, 5, *rest)
        )
        train_scorer(checkpoint, tmp_path / "part", options, progress=False)
    train_scorer(checkpoint, tmp_path / "part", options, progress=False, overwrite=True)
    whole, part = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "part"))
    assert all((whole[name] == part[name]).all() for name in whole)
    with pytest.raises(KvforgeError, match="holds a run with units 16"):
        other = dataclasses.replace(options, units=32)
        train_scorer(checkpoint, tmp_path / "part", other, progress=False, overwrite=True)


def test_several_processes_are_refused(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "size", lambda: 2)
    options = ScorerOptions(16, 2, 64, loop=dataclasses.replace(LOOP, max_steps=1, batch_size=8))
    with pytest.raises(KvforgeError, match="scorer runs in one process; start it without torchrun"):
        train_scorer(checkpoint, tmp_path / "scorer", options, progress=False)


def test_impossible_options_are_refused() -> None:
    with pytest.raises(KvforgeError, match="--hidden-units is 7; give 0, or 16 to 65536"):
        ScorerOptions(7)
    with pytest.raises(KvforgeError, match="--num-samples must be at least 2"):
        ScorerOptions(num_samples=1)
