"""Engines whose prompts' cache is predicted: the reference's tokens, whatever the schedule."""

import argparse
import dataclasses
import random
from pathlib import Path

import pytest
import torch

from kvforge.common.errors import BuildError, EngineError, KvforgeError
from kvforge.common.exact_intervals import ExactTokens
from kvforge.compiler.options import BuildOptions
from kvforge.prediction.load import load_pair
from kvforge.prediction.predicted_generation import generate
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.speculation.options import add_speculation_options, speculation_options
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.prediction import own_predictor, random_predictor
from tests.support.schedules.engine_schedules import Plan, check_tokens, random_plan, run_plan
from tests.support.sessions.eager import EagerSession, eager_session

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = {"dtype": "float32", "page_size": 2, "max_num_tokens": 64, "max_num_seqs": 8, "max_seq_len": 128}
AUXILIARY = {"layers": (0, 1, 1, 2), "num_hidden_layers": 3, "hidden_size": 32, "head_dim": 8, "num_key_value_heads": 1}
EXACT = (ExactTokens(), ExactTokens(5, 3), ExactTokens(2, 1, 0.3, 4), ExactTokens(100))


class Pair:
    """A base with a predictor, as an engine's session and as the reference's modules."""

    def __init__(self, base: Path, predictor: Path) -> None:
        self.session: EagerSession = eager_session(base, BuildOptions(**OPTIONS, kv_prediction=str(predictor)))
        self.modules = load_pair(base, predictor, torch.float32)
        self._known: dict[tuple, list[int]] = {}

    def reference(self, prompt: list[int], max_tokens: int, exact: ExactTokens, ignore_eos: bool = True) -> list[int]:
        key = (*prompt, exact)
        if key not in self._known:
            self._known[key] = generate(*self.modules, prompt, 12, exact)
        tokens = self._known[key][:max_tokens]
        return tokens if ignore_eos or 2 not in tokens else tokens[: tokens.index(2) + 1]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def pair(request, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    base = make_checkpoint(folder / "base", request.param)
    return Pair(base, random_predictor(folder / "p", base, **AUXILIARY))


def answer(engine: LLMEngine, prompt: list[int], max_tokens: int) -> list[int]:
    engine.add_request("r", prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    tokens = []
    while engine.has_unfinished():
        for output in engine.step():
            tokens += output.new_token_ids
        engine.check_invariants()
    return tokens


@pytest.mark.parametrize("exact", EXACT)
def test_tokens_are_the_reference_s(pair: Pair, exact: ExactTokens) -> None:
    for seed in range(6):
        rng = random.Random(seed)
        prompt = [rng.randrange(3, 320) for _ in range(rng.choice([1, 2, 9, 40, 100]))]
        engine = LLMEngine(
            session=pair.session, num_pages=128, max_num_tokens=rng.choice([3, 17, 64]), exact_tokens=exact
        )
        assert answer(engine, prompt, 8) == pair.reference(prompt, 8, exact)


def test_a_predicted_prompt_gives_other_tokens_than_a_computed_one(pair: Pair) -> None:
    prompt = [3 + 7 * index % 300 for index in range(50)]
    tokens = [
        answer(LLMEngine(session=pair.session, num_pages=128, exact_tokens=exact), prompt, 8)
        for exact in (ExactTokens(), ExactTokens(50))
    ]
    assert tokens[0] != tokens[1]


@pytest.mark.parametrize("family", ["llama", "qwen2", "glm4", "phi3", "gpt_oss"])
def test_a_base_with_its_own_projections_gives_its_own_tokens(tmp_path: Path, family: str) -> None:
    base = make_checkpoint(tmp_path / "base", family)
    session = eager_session(base, BuildOptions(**OPTIONS, kv_prediction=str(own_predictor(base, tmp_path / "own"))))
    plain = eager_session(base, BuildOptions(**OPTIONS))
    for seed in range(3):
        prompt = [random.Random(seed).randrange(3, 320) for _ in range(60)]
        found = answer(LLMEngine(session=session, num_pages=128, max_num_tokens=23), prompt, 10)
        assert found == answer(LLMEngine(session=plain, num_pages=128), prompt, 10)


def crowd(plan: Plan) -> None:
    """Make prompts and answers so long for the pool that sequences are preempted."""
    plan.num_pages, plan.max_num_seqs, plan.max_num_tokens = 30, 6, 8 + plan.max_num_tokens
    for request in plan.requests:
        request.prompt = (request.prompt * 14)[:14]
        request.params = dataclasses.replace(request.params, max_tokens=12, ignore_eos=True, n=1)
        request.arrival = min(request.arrival, 6)


def test_greedy_tokens_do_not_depend_on_the_schedule(pair: Pair, request: pytest.FixtureRequest) -> None:
    """Batches, chunks, preemption, cancellation, siblings and page order."""
    counts = {"preemptions": 0, "aborted": 0, "chunked": 0}
    for seed in range(200 if request.config.getoption("--full") else 5):
        plan = random_plan(
            seed, page_sizes=(2,), vocab_size=320, max_prompt=48, max_new=12, max_requests=7, sampled=False
        )
        if seed % 2 == 0:
            crowd(plan)
        exact = EXACT[seed % 3]
        engine = LLMEngine(
            session=pair.session,
            num_pages=plan.num_pages,
            max_num_tokens=plan.max_num_tokens,
            max_num_seqs=plan.max_num_seqs,
            exact_tokens=exact,
        )
        tokens, reasons, aborted = run_plan(engine, plan)
        expected = {}
        for each in plan.requests:
            wanted = pair.reference(each.prompt, each.params.max_tokens, exact, each.params.ignore_eos)
            is_ended = not each.params.ignore_eos and wanted[-1] == 2
            for index in range(each.params.n):
                expected[each.request_id, index] = wanted, "stop" if is_ended else "length"
        check_tokens(tokens, reasons, aborted, expected, seed)
        stats = engine.stats()
        assert stats["num_used_pages"] == 0 and stats["num_failed_steps"] == 0
        counts["preemptions"] += stats["num_preemptions"]
        counts["aborted"] += len(aborted)
        counts["chunked"] += plan.max_num_tokens < 48
    assert all(counts.values()), counts


def test_sequences_of_one_request_predict_theirs(pair: Pair) -> None:
    """None takes over pages of another, whose prompt is complete before it begins."""
    prompt = [3 + 7 * index % 300 for index in range(40)]
    engine = LLMEngine(session=pair.session, num_pages=128, exact_tokens=EXACT[1])
    engine.add_request("r", prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, n=3))
    tokens: dict[int, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            tokens.setdefault(output.index, []).extend(output.new_token_ids)
        engine.check_invariants()
    assert tokens == dict.fromkeys(range(3), pair.reference(prompt, 8, EXACT[1]))
    assert engine.stats()["num_reused_tokens"] == 0


def test_of_a_request_that_is_given_up_nothing_is_kept(pair: Pair) -> None:
    engine = LLMEngine(session=pair.session, num_pages=128, max_num_tokens=16, exact_tokens=ExactTokens(share=0.5))
    engine.add_request("gone", [5] * 60, SamplingParams(temperature=0.0, max_tokens=4))
    engine.step()
    gone = engine.requests["gone"].sequences[0]
    assert gone.is_predicting and gone in engine.runner._prediction._queries
    assert engine.abort("gone") and engine.stats()["num_used_pages"] == 0
    prompt = [3 + 7 * index % 300 for index in range(40)]
    assert answer(engine, prompt, 4) == pair.reference(prompt, 4, ExactTokens(share=0.5))
    assert not engine.runner._prediction._queries


def test_the_auxiliary_model_s_cache_is_counted(pair: Pair) -> None:
    manifest = pair.session.manifest
    assert manifest.graphs == ("lower", "upper", "predict")
    assert manifest.auxiliary_bytes_per_token == 2 * 2 * 8 * 4
    pools = pair.session.allocate_auxiliary_pools(3) + pair.session.allocate_pools(3)
    assert sum(tensor.nbytes for pool in pools for tensor in pool) == 3 * manifest.page_bytes


def test_what_does_not_go_with_a_predictor_is_refused(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base")
    predictor = str(own_predictor(base, tmp_path / "own"))
    for options, match in (
        ({"kv_policy": "streaming:budget=64"}, "--kv-policy"),
        ({"max_draft_len": 2}, "--max-draft-len"),
        ({"target": "cuda"}, "--target cpu"),
    ):
        with pytest.raises(BuildError, match=match):
            eager_session(base, BuildOptions(**OPTIONS | options, kv_prediction=predictor))
    with pytest.raises(EngineError, match="--kv-prediction"):
        plain = eager_session(base, BuildOptions(**OPTIONS))
        LLMEngine(session=plain, num_pages=64, exact_tokens=ExactTokens())


def test_the_options_of_a_command_line() -> None:
    parser = argparse.ArgumentParser()
    add_speculation_options(parser)
    four_two = ["--exact-first", "4", "--exact-last", "2", "--exact-share", "0.25"]
    for words, exact in (([], None), (["--exact-last", "1"], ExactTokens()), (four_two, ExactTokens(4, 2, 0.25))):
        assert speculation_options(parser.parse_args(words)).get("exact_tokens") == exact
    with pytest.raises(KvforgeError, match="--exact-share"):
        speculation_options(parser.parse_args(["--exact-share", "2"]))


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "weight_dtype": "int8", "calibration": "none"},
        {"dtype": "bfloat16", "weight_dtype": "int4", "calibration": "none"},
        {"dtype": "bfloat16", "kv_dtype": "int8"},
        {"dtype": "bfloat16", "kv_dtype": "fp8"},
        {"dtype": "bfloat16", "kv_dtype": "int4"},
        {"dtype": "bfloat16", "kv_dtype": "k8v4"},
    ],
    ids=lambda options: " ".join(options.values()),
)
def test_packed_weights_and_quantized_caches_hold_the_base_s_own_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict
) -> None:
    """With its own projections as maps the graph makes the same bits, however weights and caches are stored. The
    auxiliary layers attend to an exact cache: where the base's is quantized, the first owner alone is the same. So it
    is in one basis of the residual stream and by one rounding, where a base with packed weights has its own."""
    monkeypatch.setattr("kvforge.compiler.convert.can_change", lambda _: False)
    base = make_checkpoint(tmp_path / "base", "qwen2", dtype=torch.bfloat16)
    predictor, prompt = str(own_predictor(base, tmp_path / "own")), [3 + 7 * index % 300 for index in range(40)]
    pools, pages = [], []
    for more in ({"kv_prediction": predictor}, {}):
        session = eager_session(base, BuildOptions(**OPTIONS | options | more))
        engine = LLMEngine(session=session, num_pages=64, max_num_tokens=17)
        pages.append(engine.scheduler.pool.free_pages[-20:])
        answer(engine, prompt, 1)
        pools.append(engine.runner.pools[: 1 if "kv_dtype" in options else None])
    assert pages[0] == pages[1]
    for found, wanted in zip(*pools, strict=True):
        for got, want in zip(found, wanted, strict=True):
            held = want[pages[0]].view(torch.uint8)
            assert held.any() and torch.equal(got[pages[0]].view(torch.uint8), held)
