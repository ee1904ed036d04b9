"""Requests that cannot be served are refused in one sentence, and nothing of them is kept."""

import math

import numpy as np
import pytest

from kvforge.common.errors import EngineError, KvforgeError, RequestError
from kvforge.runtime import LLM, LLMEngine, SamplingParams
from kvforge.runtime.config import resolve_config
from tests.support.models.text_tokenizers import byte_level
from tests.support.sessions.fake import FakeSession, fake_manifest


def make_engine(**options):
    return LLMEngine(session=FakeSession(), **{"num_pages": 40, **options})


@pytest.mark.parametrize(
    "prompt, changes, says",
    [
        ([], {}, "the prompt is empty; give at least one token"),
        ([5] * 128, {}, "the prompt has 128 tokens, but the engine takes at most 127"),
        ([5, 64], {}, "token id 64, but the model's ids are 0 to 63"),
        ([5, -1], {}, "token id -1"),
        ([[5]], {}, "flat list of whole numbers"),
        ([5.5], {}, "flat list of whole numbers"),
        (["a"], {}, "flat list of whole numbers"),
        ([[5], [5, 6]], {}, "the prompt"),
        ("text", {}, "the prompt is text"),
        ([5], {"stop_token_ids": [64]}, "stop_token_ids holds token id 64"),
        ([5], {"stop_words_ids": [[3, 64]]}, "stop_words_ids holds token id 64"),
        ([5], {"bad_words_ids": [[3, 64]]}, "bad_words_ids holds token id 64"),
        ([5], {"bad_words_ids": [[i] for i in range(64)]}, "forbid every token"),
        ([5], {"stop": ["x"]}, "has none; give stop_words_ids"),
        ([5], {"bad_words": ["x"]}, "has none; give bad_words_ids"),
    ],
)
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


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"n": 0}, "n is 0"),
        ({"n": 1.5}, "n is 1.5"),
        ({"n": True}, "n is True"),
        ({"max_tokens": 0}, "max_tokens is 0; give a whole number of at least 1"),
        ({"max_tokens": -3}, "max_tokens is -3"),
        ({"max_tokens": None}, "max_tokens is None"),
        ({"min_tokens": 17}, "raise max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": "1"}, "temperature is '1'"),
        ({"top_p": 0.0}, "top_p is 0.0; give a finite number above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": -1}, "min_p"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 101}, "logprobs is 101; give a whole number from 0 to 100"),
        ({"presence_penalty": math.nan}, "presence_penalty"),
        ({"frequency_penalty": math.inf}, "frequency_penalty"),
        (
            {"repetition_penalty": 0.0},
            "repetition_penalty is 0.0; give a finite number of at least 0.001 and at most 1000",
        ),
        ({"repetition_penalty": 1e39}, "repetition_penalty"),
        ({"repetition_penalty": 1e-45}, "repetition_penalty"),
        ({"presence_penalty": 1e300}, "presence_penalty is 1e+300"),
        ({"frequency_penalty": -4e38}, "frequency_penalty"),
        ({"temperature": 1e300}, "temperature is 1e+300; give a finite number of at least 0 and at most 10000"),
        ({"presence_penalty": 10**400}, "presence_penalty"),
        ({"deadline_s": 1e300}, "deadline_s"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"priority": 0.5}, "priority"),
        ({"stop": [""]}, "stop holds ''"),
        ({"stop": [3]}, "stop holds 3"),
        ({"bad_words": "no"}, "bad_words is 'no'; give a list"),
        ({"stop_token_ids": [-1]}, "stop_token_ids holds -1"),
        ({"stop_words_ids": [[]]}, "stop_words_ids holds ()"),
        ({"bad_words_ids": [3]}, "bad_words_ids holds 3"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 101}, "prompt_logprobs"),
    ],
)
def test_wrong_sampling_params(changes, says):
    with pytest.raises(RequestError) as error:
        SamplingParams(**changes)
    assert says in str(error.value) and str(error.value).endswith(".")


def test_values_are_made_plain():
    params = SamplingParams(
        n=np.int32(2),
        seed=np.uint64(2**64 - 1),
        temperature=np.float32(0.5),
        stop="x",
        stop_token_ids=np.array([3, 4]),
        stop_words_ids=[[5], np.array([6, 7])],
        bad_words=None,
    )
    assert params == SamplingParams(
        n=2, seed=2**64 - 1, temperature=0.5, stop=["x"], stop_token_ids=[3, 4], stop_words_ids=[[5], [6, 7]]
    )
    assert type(params.n) is int and hash(params) is not None


def test_llm_refuses_all_prompts_if_one_cannot_be_served():
    llm = LLM(session=FakeSession(vocab_size=330), tokenizer=byte_level(), num_pages=40)
    wrong = (
        ["fox", ""],
        [[5], []],
        ["fox", [400]],
        [5.5],
        ["fox", None],
        {"a": 1},
        b"abc",
        [b"abc"],
        None,
        5.5,
        [bytearray(b"abc")],
        [{5}],
        [[2**70]],
        [[True]],
        "half \udc80 a character",
        np.array(5),
    )
    for prompts in wrong:
        with pytest.raises(RequestError, match=r"^[^\n]*\.$"):
            llm.generate(prompts, use_tqdm=False)
        assert not llm.engine.has_unfinished()
    with pytest.raises(RequestError, match="2 prompts and 1 sampling params"):
        llm.generate(["a", "b"], [SamplingParams()], use_tqdm=False)
    for params in ({"n": 1}, 5, ["a"]):
        with pytest.raises(RequestError, match="give one for all or a list"):
            llm.generate(["a"], params, use_tqdm=False)
    with pytest.raises(RequestError, match="not Unicode"):
        llm.generate("a", SamplingParams(bad_words=["\udc80"]), use_tqdm=False)
    with pytest.raises(RequestError, match="no tokenizer"):
        LLM(session=FakeSession(), num_pages=40).generate("fox", use_tqdm=False)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"max_num_seqs": 9}, "max_num_seqs is 9, but the engine was built for 1 to 8"),
        ({"max_num_tokens": 0}, "max_num_tokens is 0"),
        ({"max_seq_len": 129}, "--max-seq-len 129"),
        ({"num_pages": 0}, "num_pages"),
        ({"kv_cache_gib": 0.0}, "kv_cache_gib"),
        ({"kv_cache_gib": math.nan}, "kv_cache"),
        ({"kv_cache_gib": math.inf}, "kv_cache_gib is inf; give a finite size above 0"),
        ({"kv_cache_gib": -1.0}, "kv_cache_gib is -1.0"),
        ({"num_pages": 2**31}, "num_pages is 2147483648; give 1 to 536870911"),
        (
            {"kv_cache_gib": 1e-9},
            "holds 0 tokens, but one sequence of 128 tokens needs .* raise --kv-cache-gib or lower --max-seq-len",
        ),
    ],
)
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
    one = per_sequence * manifest.page_bytes
    assert resolve_config(manifest, 2 * one).num_pages == per_sequence, "one sequence takes more than a quarter"
    with pytest.raises(EngineError, match=r"\(from free memory\) holds 100 tokens, but one sequence of 128 tokens"):
        resolve_config(manifest, one)
    assert resolve_config(manifest, one, max_seq_len=100).num_pages == 25
    quarter = 4 * 100 * manifest.page_bytes
    assert resolve_config(manifest, quarter).num_pages == 100
    gib = 60.5 * manifest.page_bytes / 2**30
    assert resolve_config(manifest, 1000, kv_cache_gib=gib).num_pages == 60
    assert resolve_config(manifest, 1000, kv_cache_gib=1e308).num_pages == manifest.max_num_seqs * per_sequence


def test_an_explicit_cache_size_is_never_exceeded():
    manifest = fake_manifest(max_seq_len=1 << 17, max_position=1 << 17)
    for length in (1 << 10, 1 << 14, 1 << 17):
        needed = length // manifest.page_size * manifest.page_bytes
        for size in (needed // 2, needed - 1, needed, needed + 1, 3 * needed + 1):
            if size < needed:
                with pytest.raises(EngineError, match="--max-seq-len"):
                    resolve_config(manifest, 1 << 40, kv_cache_gib=size / 2**30, max_seq_len=length)
            else:
                config = resolve_config(manifest, 1 << 40, kv_cache_gib=size / 2**30, max_seq_len=length)
                assert needed <= config.num_pages * manifest.page_bytes <= size


def test_sequences_are_no_more_than_a_step_can_hold():
    manifest = fake_manifest(max_num_seqs=10**12)
    assert resolve_config(manifest, 1 << 30).max_num_seqs == manifest.max_num_tokens
    engine = LLMEngine(session=FakeSession(max_num_seqs=10**12), num_pages=40)
    assert engine.stats()["max_num_seqs"] == 40 and engine.scheduler.slots.page_table.shape == (40, 32)
    for i in range(50):
        engine.add_request(str(i), [5], SamplingParams(max_tokens=2))
    while engine.has_unfinished():
        engine.step()
        engine.check_invariants()


def test_memory_that_cannot_be_had_is_one_sentence():
    session = FakeSession()

    def no_memory(*counts):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    session.allocate_pools = no_memory
    with pytest.raises(EngineError, match=r"^the KV cache of .* GiB cannot be allocated; lower --kv-cache-gib\.$"):
        LLMEngine(session=session)
