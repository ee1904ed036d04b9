"""Engines of target ``vllm`` give the tokens of kvforge's own, offline and behind Triton, on one rank and on two."""

from pathlib import Path
from typing import Any

import pytest

from kvforge import LLM, SamplingParams
from kvforge.compiler import BuildOptions
from kvforge.evaluation.engine import EngineGenerator
from kvforge.evaluation.score import is_correct
from kvforge.serving.server.launcher import TritonServer
from kvforge.tasks.prompt import make_examples
from tests.support.serving.contract_outputs import LOG_PROBS
from tests.support.serving.server import streamed, used_pages, wait_until
from tests.support.sessions.eager import eager_session
from tests.vllm.conftest import build

SWIFTKV = Path(__file__).resolve().parents[2] / "model_defs" / "assets" / "tiny-swiftkv"
PROMPTS = [[(7 * i * i + 3 * i + length) % 300 + 4 for i in range(length)] for length in (5, 40, 90, 300)]
"""The last one is longer than a step."""


def generated(llm: LLM, **params: Any) -> list[list[int]]:
    given = SamplingParams(**{"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, **params})
    return [list(out.token_ids) for result in llm.generate(PROMPTS, given, use_tqdm=False) for out in result.outputs]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"n": 2},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.25},
        {"frequency_penalty": -1.25},
        {"logit_bias": {70: 3.0, 71: 3.0, 5: -100.0}},
        {"bad_words_ids": [[270], [280, 281]]},
        {"guided_decoding": {"kind": "regex", "guide": "[0-9]{3}[a-f]{2}"}, "ignore_eos": False},
        {"guided_decoding": {"kind": "json_schema", "guide": '{"enum": ["abc", 12345, null]}'}, "ignore_eos": False},
        {"guided_decoding": {"kind": "ebnf_grammar", "guide": 'root ::= [a-c]{2} ("x" | "yz")'}, "ignore_eos": False},
    ],
    ids=str,
)
def test_greedy_tokens_are_those_of_our_own_graphs(llm: LLM, own: LLM, params: dict[str, Any]) -> None:
    assert generated(llm, **params) == generated(own, **params)


def test_what_ends_a_text_is_the_same(llm: LLM, own: LLM) -> None:
    plain = generated(own)
    for params in (
        {"stop_token_ids": [tokens[6] for tokens in plain]},
        {"stop_words_ids": [tokens[3:5] for tokens in plain], "min_tokens": 2},
        {"stop_token_ids": [tokens[2] for tokens in plain], "min_tokens": 9},
    ):
        assert generated(llm, **params) == generated(own, **params)
        assert generated(llm, **params) != plain


def test_log_probs_are_those_of_our_own_graphs(llm: LLM, own: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, repetition_penalty=1.5, ignore_eos=True)
    for found, expected in zip(*(each.generate(PROMPTS, params, use_tqdm=False) for each in (llm, own)), strict=True):
        for ours, theirs in zip(expected.outputs[0].logprobs or (), found.outputs[0].logprobs or (), strict=True):
            assert (theirs.token_id, theirs.rank, list(theirs.top)) == (ours.token_id, ours.rank, list(ours.top))
            size = max(map(abs, ours.top.values()))
            assert list(theirs.top.values()) == pytest.approx(list(ours.top.values()), abs=LOG_PROBS * size)


def test_seeds_repeat_a_text(llm: LLM) -> None:
    sampled = {"temperature": 1.0, "n": 2}
    first = generated(llm, **sampled, seed=11)
    assert generated(llm, **sampled, seed=11) == first and first[0] != first[1]
    assert generated(llm, **sampled, seed=12) != first


def test_a_seeded_prompt_may_be_longer_than_a_step(llm: LLM) -> None:
    """Its text is that of the same prompt in one step, which the prefix cache makes of it, and of it among others."""
    prompt = [token % 251 + 5 for token in range(9000, 9620)]
    params = SamplingParams(temperature=1.0, seed=11, n=2, max_tokens=16, ignore_eos=True)
    before = llm.engine.stats()["num_reused_tokens"]
    texts = [[list(out.token_ids) for out in llm.generate([prompt], params, use_tqdm=False)[0].outputs]]
    assert llm.engine.stats()["num_reused_tokens"] - before < len(prompt), "only the second sequence may reuse pages"
    texts += [[list(out.token_ids) for out in llm.generate([prompt], params, use_tqdm=False)[0].outputs]]
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]


def test_tasks_are_answered_alike(tmp_path: Path) -> None:
    """The needle of the trained model: through kvforge's own graphs, and on vLLM with one rank and with two."""
    answers: list[list[str]] = []
    for num_ranks in (1, 2):
        engine = build(SWIFTKV, tmp_path / f"ranks-{num_ranks}", num_ranks)
        generator = EngineGenerator(engine, 400, show_progress=False)
        examples = make_examples("needle_single", 399, generator._tokenizer.count, 24, 5)
        answers.append(generator([example.prompt for example in examples]))
    generator.llm = LLM(session=eager_session(SWIFTKV, BuildOptions(dtype="float32")), tokenizer=generator._tokenizer)
    own = generator([example.prompt for example in examples])
    assert answers == [own, own]
    assert sum(map(is_correct, examples, own)) > len(examples) // 2


def test_two_ranks_behind_triton(two_ranks: TritonServer, own: LLM) -> None:
    assert [streamed(two_ranks, prompt) for prompt in PROMPTS] == generated(own)
    wait_until(lambda: used_pages(two_ranks) == 0, "all pages free")
