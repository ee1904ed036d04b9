"""Log-probabilities of prompts are those that generation would see after each beginning, and change nothing else."""

import dataclasses
import random

import pytest
import torch

from kvforge.common.errors import RequestError
from kvforge.common.exact_intervals import ExactTokens
from kvforge.runtime import LLM, LLMEngine, SamplingParams
from kvforge.runtime.requests.outputs import SequenceOutput
from kvforge.runtime.requests.prompt_scores import PromptScores
from kvforge.runtime.sampling.sampler import NOT_FINITE
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.vllm_engine.params import check_honoured
from tests.support.models.engines import SWIFTKV
from tests.support.models.shelf import EngineShelf
from tests.support.models.small_models import small_session
from tests.support.random_cases import Seeds
from tests.support.rounding import assert_within, logprob_error, model_error
from tests.support.schedules.engine_schedules import Plan, check_tokens, random_plan, run_plan
from tests.support.sessions.eager import EagerSession

pytestmark = pytest.mark.usefixtures("one_thread")
ONE = SamplingParams(temperature=0.0, max_tokens=1, return_logits=True)
CUTS = {"cut": {}, "no cut": {"cut": 4}}
POLICIES = {
    "snapkv": "snapkv:budget=12,window=4,kernel=3",
    "h2o": "h2o:budget=12",
    "adakv": "adakv:budget=12,window=4",
    "quest": "quest:budget=8,chunk_size=4",
    "shadowkv": "shadowkv:rank=8,chunk_size=4,sparse_budget=8,num_outlier_chunks=1,num_local_tokens=4",
}


def outputs_of(engine: LLMEngine, plan: Plan) -> tuple[tuple, dict[tuple[str, int], list[SequenceOutput]]]:
    """What ``run_plan`` returns, and all outputs by sequence."""
    seen: dict[tuple[str, int], list[SequenceOutput]] = {}
    step = engine.step

    def recorded() -> list[SequenceOutput]:
        outputs = step()
        for output in outputs:
            seen.setdefault((output.request_id, output.index), []).append(output)
        return outputs

    engine.step = recorded  # type: ignore[method-assign]
    return run_plan(engine, plan), seen


def asking(plan: Plan, rng: random.Random) -> Plan:
    """The plan with two of three requests asking for log-probabilities of their prompts."""
    counts = [rng.choice([None, 0, 3]) for _ in plan.requests]
    requests = [
        dataclasses.replace(request, params=dataclasses.replace(request.params, prompt_logprobs=count))
        for request, count in zip(plan.requests, counts, strict=True)
    ]
    return dataclasses.replace(plan, requests=requests)


def short_plan(seed: int, **more) -> Plan:
    return random_plan(seed, page_sizes=(4,), vocab_size=96, max_prompt=30, max_new=14, max_requests=6, **more)


class Expected:
    """The model's distribution after each beginning of a prompt, by generating one token after it, alone."""

    def __init__(self, session: EagerSession) -> None:
        self._engine = LLMEngine(session=session, num_pages=40, enable_prefix_cache=False)
        self._found: dict[tuple[int, ...], torch.Tensor] = {}
        self.bound = 0.0
        self._config = session.config

    def after(self, prefix: list[int]) -> torch.Tensor:
        key = tuple(prefix)
        if key not in self._found:
            self._engine.add_request("alone", prefix, ONE)
            (output,) = (output for _ in iter(self._engine.has_unfinished, False) for output in self._engine.step())
            assert output.logits is not None
            self._found[key] = torch.from_numpy(output.logits[0])
        return self._found[key]

    def check(self, scores: PromptScores, prompt: list[int], num_top: int) -> None:
        assert (len(scores), scores.num_done) == (len(prompt) - 1,) * 2
        assert scores.is_finite
        for row, token in enumerate(prompt[1:]):
            logits = self.after(prompt[: row + 1])
            want = logits.log_softmax(-1)
            largest = float(logits.abs().max())
            bound = logprob_error(len(want), largest, model_error(self._config, len(prompt)))
            got = torch.from_numpy(scores.logprobs[row : row + 1])
            assert_within(got, want[token : token + 1], bound)
            assert (want > got + bound).sum() < scores.ranks[row] <= (want > got - bound).sum() + 1
            top = torch.from_numpy(scores.top[row])
            assert_within(top, want.topk(num_top).values, bound)
            assert_within(top, want[torch.from_numpy(scores.top_ids[row]).long()], bound)


@pytest.mark.parametrize("name", CUTS)
def test_random_schedules(name: str, seeds: Seeds) -> None:
    """Chunks, preemptions, prefixes of others and several sequences change nothing of them; nor do they of tokens."""
    session = small_session({}, **CUTS[name])
    expected, num_checked, num_preempted = Expected(session), 0, 0
    for seed in seeds(25, 200):
        plain = short_plan(seed)
        plan = asking(plain, random.Random(seed))
        engines = [
            LLMEngine(session=session, enable_prefix_cache=plan.enable_prefix_cache, **plan.limits) for _ in range(2)
        ]
        (tokens, reasons, aborted), seen = outputs_of(engines[0], plan)
        wanted_tokens, wanted_reasons, wanted_aborted = run_plan(engines[1], plain)
        whole = {key: (wanted_tokens.get(key, []), reason) for key, reason in wanted_reasons.items()}
        both = {key: value for key, value in whole.items() if key in reasons}
        check_tokens(tokens, reasons, aborted | wanted_aborted, both, seed)
        num_preempted += engines[0].stats()["num_preemptions"]
        for request in plan.requests:
            count = request.params.prompt_logprobs
            for index in range(request.params.n):
                outputs = seen.get((request.request_id, index), [])
                given = [output.prompt_scores for output in outputs if output.prompt_scores is not None]
                has_token = any(output.new_token_ids for output in outputs)
                assert len(given) == (count is not None and has_token), (seed, request.request_id, index)
                if given:
                    expected.check(given[0], request.prompt, count)
                    num_checked += 1
    assert num_checked > 40
    assert num_preempted > 2


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_keep_their_tokens(policy: str, seeds: Seeds) -> None:
    """With a policy that takes it, the prompt's log-probabilities are those of all its tokens, as the cache changes
    after it."""
    session = small_session({"kv_policy": POLICIES[policy]}, **CUTS["no cut"])
    expected = Expected(session)
    for seed in seeds(6, 60):
        plain = short_plan(seed, sampled=False)
        plan = asking(plain, random.Random(seed))
        results = []
        for each in (plan, plain):
            engine = LLMEngine(session=session, enable_prefix_cache=plan.enable_prefix_cache, **plan.limits)
            results.append(outputs_of(engine, each))
        (tokens, reasons, aborted), seen = results[0]
        whole = {key: (results[1][0][0].get(key, []), reason) for key, reason in results[1][0][1].items()}
        check_tokens(tokens, reasons, aborted, {key: v for key, v in whole.items() if key in reasons}, seed)
        for request in plan.requests:
            for output in seen.get((request.request_id, 0), []):
                if output.prompt_scores is not None:
                    expected.check(output.prompt_scores, request.prompt, request.params.prompt_logprobs)


def test_beside_early_exits_and_drafts() -> None:
    """Rows of prompts go through all layers whatever exits, and before the step's own drafts."""
    session = small_session({"max_draft_len": 4}, early_exit=True)
    expected = Expected(session)
    for options in (
        {"early_exit_threshold": 0.01, "early_exit_prompts": True},
        {"speculative": SpeculativeConfig("early_exit", 4)},
        {"speculative": SpeculativeConfig("ngram", 4)},
    ):
        results = []
        for plan in (plain := short_plan(11, sampled=False), asking(plain, random.Random(1))):
            engine = LLMEngine(session=session, **{**options, **plan.limits})
            results.append(outputs_of(engine, plan))
        assert results[0][0] == results[1][0]
        checked = [
            expected.check(output.prompt_scores, request.prompt, request.params.prompt_logprobs)
            for request in plan.requests
            for output in results[1][1].get((request.request_id, 0), [])
            if output.prompt_scores is not None
        ]
        assert checked


def test_a_compiled_engine_through_llm(engines: EngineShelf) -> None:
    llm = LLM(engines.engine(SWIFTKV), num_pages=64)
    prompts = [[5], [7, 8, 9, 10, 11] * 9]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=2))
    assert outputs[0].prompt_logprobs == [None]
    entries = outputs[1].prompt_logprobs
    assert entries is not None and entries[0] is None
    assert [entry.token_id for entry in entries[1:]] == prompts[1][1:]
    assert all(len(entry.top) == 2 and entry.logprob <= max(entry.top.values()) for entry in entries[1:])
    assert llm.generate([[5]], SamplingParams(max_tokens=1))[0].prompt_logprobs is None


def test_what_is_not_finite_ends_its_own_request() -> None:
    session = small_session({})
    upper = session.upper

    def spoilt(step, pools):
        logits = upper(step, pools)
        return torch.where((step.positions[step.survivor_index.long()] == 1)[:, None], torch.nan, logits)

    session.upper = spoilt  # type: ignore[method-assign]
    engine = LLMEngine(session=session, num_pages=40)
    for name, count in (("asks", 0), ("asks not", None)):
        engine.add_request(name, [5, 6, 7, 8], dataclasses.replace(ONE, prompt_logprobs=count))
    found = {output.request_id: output for output in engine.step()}
    assert (found["asks"].finish_reason, found["asks"].stop_reason) == ("error", NOT_FINITE.words)
    assert found["asks not"].finish_reason == "length"
    engine.check_invariants()


@pytest.mark.parametrize(
    ("options", "changes", "sentence"),
    [
        ({"kv_policy": POLICIES["snapkv"]}, {}, "counts the attention of all that goes past the cut"),
        ({"kv_policy": "streaming:budget=12,sinks=2"}, {"cut": 4}, "changes the cache before the prompt's end"),
        ({"kv_policy": "batchmax:budget=14,block=5"}, {"cut": 4}, "changes the cache before the prompt's end"),
    ],
)
def test_refusals(options, changes, sentence) -> None:
    engine = LLMEngine(session=small_session(options, **changes), num_pages=40)
    with pytest.raises(RequestError, match=sentence):
        engine.add_request("r", [5] * 60, dataclasses.replace(ONE, prompt_logprobs=1))
    assert not engine.has_unfinished()


def test_more_than_the_vocabulary() -> None:
    engine = LLMEngine(session=small_session({}), num_pages=40)
    with pytest.raises(RequestError, match="prompt_logprobs is 97, but the model has 96 tokens; lower it"):
        engine.add_request("r", [5, 6], dataclasses.replace(ONE, prompt_logprobs=97))


def test_predicted_prompts_have_none() -> None:
    engine = LLMEngine(session=small_session({}), num_pages=40)
    engine.config = dataclasses.replace(engine.config, exact_tokens=ExactTokens(first=4))
    with pytest.raises(RequestError, match="an auxiliary model predicts the cache"):
        engine.add_request("r", [5, 6], dataclasses.replace(ONE, prompt_logprobs=1))


def test_vllm_is_not_asked() -> None:
    with pytest.raises(RequestError, match="prompt_logprobs is not offered by an engine of target vllm"):
        check_honoured(SamplingParams(prompt_logprobs=0))
