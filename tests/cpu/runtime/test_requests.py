"""Requests that cannot be served are refused in one sentence, and nothing of them is kept."""

import math

import numpy as np
import pytest

from kvforge.errors import EngineError, KvforgeError, RequestError
from kvforge.runtime import LLM, LLMEngine, SamplingParams
from kvforge.runtime.config import resolve_config
from tests.support.fake_session import FakeSession
from tests.support.text_tokenizers import byte_level


def make_engine(**options):
    return LLMEngine(session=FakeSession(), **{"num_pages": 40, **options})


@pytest.mark.parametrize("prompt, changes, says", [
    ([], {}, "the prompt is empty; give at least one token"),
    ([5] * 128, {}, "the prompt has 128 tokens, but the engine takes at most 127"),
    ([5, 64], {}, "token id 64, but the model's ids are 0 to 63"),
    ([5, -1], {}, "token id -1"),
    ([[5]], {}, "flat list of whole numbers"),
    ([5.5], {}, "flat list of whole numbers"),
    (["a"], {}, "flat list of whole numbers"),
    ([[5], [5, 6]], {}, "the prompt"),
    ("text", {}, "prompt_token_ids is text"),
    ([5], {"stop_token_ids": [64]}, "stop_token_ids holds token id 64"),
    ([5], {"stop_words_ids": [[3, 64]]}, "stop_words_ids holds token id 64"),
    ([5], {"bad_words_ids": [[3, 64]]}, "bad_words_ids holds token id 64"),
    ([5], {"bad_words_ids": [[i] for i in range(64)]}, "forbids every token"),
    ([5], {"stop": ["x"]}, "has none; give stop_words_ids"),
    ([5], {"bad_words": ["x"]}, "has none; give bad_words_ids"),
])
def test_refused_requests(prompt, changes, says):
    engine = make_engine()
    with pytest.raises(RequestError) as error:
        engine.add_request("r", prompt, SamplingParams(**changes))
    message = str(error.value)
    assert says in message and message.endswith(".") and "\n" not in message
    assert not engine.has_unfinished() and engine.stats()["num_waiting"] == 0
    engine.add_request("r", [5], SamplingParams())


def test_duplicate_id_is_refused_while_the_first_is_open():
    engine = make_engine()
    engine.add_request("r", [5], SamplingParams(max_tokens=2))
    with pytest.raises(RequestError, match="'r' is in use"):
        engine.add_request("r", [5], SamplingParams())
    while engine.has_unfinished():
        engine.step()
    engine.add_request("r", [5], SamplingParams())


def test_a_request_that_can_never_fit_the_pool_is_refused():
    engine = make_engine(num_pages=5)
    engine.add_request("fits", [5] * 10, SamplingParams(max_tokens=11))
    with pytest.raises(RequestError, match=r"need 6 pages, but the engine has 5 \(21 tokens\)"):
        engine.add_request("too big", [5] * 10, SamplingParams(max_tokens=12))


@pytest.mark.parametrize("changes, says", [
    ({"n": 0}, "n is 0"), ({"n": 1.5}, "n is 1.5"), ({"n": True}, "n is True"),
    ({"max_tokens": 0}, "max_tokens is 0; give a whole number of at least 1"), ({"max_tokens": -3}, "max_tokens is -3"),
    ({"max_tokens": None}, "max_tokens is None"), ({"min_tokens": 17}, "above max_tokens"),
    ({"temperature": -0.1}, "temperature"), ({"temperature": math.nan}, "temperature is nan"),
    ({"temperature": math.inf}, "temperature"), ({"temperature": "1"}, "temperature is '1'"),
    ({"top_p": 0.0}, "top_p is 0.0; give a finite number above 0 and at most 1"), ({"top_p": 1.1}, "top_p"),
    ({"top_p": math.nan}, "top_p"), ({"top_k": -2}, "top_k"), ({"min_p": 1.5}, "min_p"), ({"min_p": -1}, "min_p"),
    ({"seed": 2**64}, "seed"), ({"seed": 1.0}, "seed"), ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 101}, "logprobs is 101; give a whole number from 0 to 100"),
    ({"presence_penalty": math.nan}, "presence_penalty"), ({"frequency_penalty": math.inf}, "frequency_penalty"),
    ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; give a finite number above 0"),
    ({"deadline_s": 0.0}, "deadline_s"), ({"priority": 0.5}, "priority"), ({"stop": [""]}, "stop holds ''"),
    ({"stop": [3]}, "stop holds 3"), ({"bad_words": "no"}, "bad_words is 'no'; give a list"),
    ({"stop_token_ids": [-1]}, "stop_token_ids holds -1"), ({"stop_words_ids": [[]]}, "stop_words_ids holds ()"),
    ({"bad_words_ids": [3]}, "bad_words_ids holds 3"), ({"prompt_logprobs": 0}, "prompt_logprobs is not offered"),
])
def test_wrong_sampling_params(changes, says):
    with pytest.raises(RequestError) as error:
        SamplingParams(**changes)
    assert says in str(error.value) and str(error.value).endswith(".")


def test_values_are_made_plain():
    params = SamplingParams(n=np.int32(2), seed=np.uint64(2**64 - 1), temperature=np.float32(0.5), stop="x",
                            stop_token_ids=np.array([3, 4]), stop_words_ids=[[5], np.array([6, 7])], bad_words=None)
    assert params == SamplingParams(n=2, seed=2**64 - 1, temperature=0.5, stop=["x"], stop_token_ids=[3, 4],
                                    stop_words_ids=[[5], [6, 7]])
    assert type(params.n) is int and hash(params) is not None


def test_llm_refuses_all_prompts_if_one_cannot_be_served():
    llm = LLM(session=FakeSession(vocab_size=330), tokenizer=byte_level(), num_pages=40)
    for prompts in (["fox", ""], [[5], []], ["fox", [400]], [5.5], ["fox", None]):
        with pytest.raises(RequestError):
            llm.generate(prompts, use_tqdm=False)
        assert not llm.engine.has_unfinished()
    with pytest.raises(RequestError, match="2 prompts and 1 sampling params"):
        llm.generate(["a", "b"], [SamplingParams()], use_tqdm=False)
    with pytest.raises(RequestError, match="no tokenizer"):
        LLM(session=FakeSession(), num_pages=40).generate("fox", use_tqdm=False)


@pytest.mark.parametrize("options, says", [
    ({"max_num_seqs": 9}, "max_num_seqs is 9, but the engine was built for 1 to 8"),
    ({"max_num_tokens": 0}, "max_num_tokens is 0"), ({"max_seq_len": 129}, "--max-seq-len 129"),
    ({"num_pages": 0}, "num_pages"), ({"kv_cache_gib": 0.0}, "kv_cache_gib"), ({"kv_cache_gib": math.nan}, "kv_cache"),
])
def test_limits_above_the_engines_are_refused(options, says):
    with pytest.raises(EngineError, match=says):
        LLMEngine(session=FakeSession(), **options)


def test_no_engine_is_refused(tmp_path):
    with pytest.raises(KvforgeError, match="not an engine directory"):
        LLMEngine(tmp_path)
    with pytest.raises(EngineError, match="pass an engine directory"):
        LLMEngine()


def test_default_pool_size():
    manifest = FakeSession().manifest
    per_sequence = manifest.max_seq_len // manifest.page_size
    assert resolve_config(manifest, 2**40).num_pages == manifest.max_num_seqs * per_sequence
    assert resolve_config(manifest, 0).num_pages == manifest.max_num_seqs * per_sequence
    assert resolve_config(manifest, 1000).num_pages == per_sequence, "one sequence always fits"
    quarter = 4 * 100 * manifest.page_bytes
    assert resolve_config(manifest, quarter).num_pages == 100
    gib = 60.5 * manifest.page_bytes / 2**30
    assert resolve_config(manifest, 1000, kv_cache_gib=gib).num_pages == 60
