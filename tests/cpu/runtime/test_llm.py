"""Texts: generate and its stream agree, stop strings cut, closing a stream gives the request up."""

import numpy as np
import pytest

from kvforge.common.errors import RequestError
from kvforge.runtime import LLM, SamplingParams
from tests.support.models.text_tokenizers import byte_level
from tests.support.sessions.fake import FakeSession

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENIZER = byte_level()


@pytest.fixture
def llm():
    return LLM(session=FakeSession(vocab_size=TOKENIZER.backend.get_vocab_size()), tokenizer=TOKENIZER, num_pages=200)


def test_shapes_of_prompts_and_results(llm):
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=1, n=2)
    (one,) = llm.generate("The fox", params, use_tqdm=False)
    assert one.prompt == "The fox" and one.prompt_token_ids == TOKENIZER.encode("The fox") and one.finished
    assert [c.index for c in one.outputs] == [0, 1]
    for completion in one.outputs:
        assert len(completion.token_ids) == len(completion.logprobs) == 5
        assert completion.cumulative_logprob == pytest.approx(sum(e.logprob for e in completion.logprobs))
        assert completion.finish_reason == "length"
    (ids,) = llm.generate(one.prompt_token_ids, params, use_tqdm=False)
    assert ids.prompt is None and ids.outputs[0].token_ids == one.outputs[0].token_ids
    several = llm.generate(
        ["The fox", one.prompt_token_ids, "dog"], [params, params, SamplingParams(max_tokens=1)], use_tqdm=False
    )
    assert [len(r.outputs) for r in several] == [2, 2, 1]
    assert several[0].outputs[0].text == several[1].outputs[0].text == one.outputs[0].text
    assert llm.generate([], params, use_tqdm=False) == []
    arrays = llm.generate([np.array(one.prompt_token_ids)] * 2, params, use_tqdm=False)
    assert [r.outputs[0].text for r in arrays] == [one.outputs[0].text] * 2


@pytest.mark.parametrize("prompts", [["Once", 5], [5, "Once"], [5, [6, 7]], [np.array([6, 7]), 5]])
def test_token_ids_among_prompts_are_in_a_list_of_their_own(llm, prompts):
    with pytest.raises(RequestError, match=r'such as \["Once", \[5, 6, 7\]\]'):
        llm.generate(prompts, use_tqdm=False)
    assert not llm.engine.has_unfinished()


def test_text_is_the_decoded_tokens_without_what_ended_it(llm):
    results = llm.generate(["The fox"] * 20, [SamplingParams(seed=i, max_tokens=60) for i in range(20)], use_tqdm=False)
    assert {r.outputs[0].finish_reason for r in results} <= {"stop", "length"}
    for result in results:
        completion = result.outputs[0]
        ids = completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids
        readable = [c for c in TOKENIZER.decode(ids) if ord(c) < 128]
        assert [c for c in completion.text if ord(c) < 128] == readable


def test_stream_grows_to_the_result(llm):
    params = SamplingParams(seed=5, max_tokens=40, ignore_eos=True, n=2)
    (whole,) = llm.generate("naïve", params, use_tqdm=False)
    texts = ["", ""]
    for output in llm.generate_stream("naïve", params):
        for completion in output.outputs:
            assert completion.text.startswith(texts[completion.index])
            texts[completion.index] = completion.text
    assert output.finished and texts == [c.text for c in whole.outputs]


def test_stop_string_ends_text_and_tokens(llm):
    params = SamplingParams(seed=1, max_tokens=60, ignore_eos=True)
    (free,) = llm.generate("The fox", params, use_tqdm=False)
    text = free.outputs[0].text
    at = next(i for i in range(5, len(text)) if text[i : i + 2].isascii() and text[i : i + 2].isprintable())
    stop = text[at : at + 2]
    (cut,) = llm.generate("The fox", SamplingParams(seed=1, max_tokens=60, ignore_eos=True, stop=stop), use_tqdm=False)
    completion = cut.outputs[0]
    assert completion.text == text[: text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert len(completion.token_ids) < 60
    for output in llm.generate_stream("The fox", SamplingParams(seed=1, max_tokens=60, ignore_eos=True, stop=stop)):
        assert completion.text.startswith(output.outputs[0].text), "part of the stop string was given out"


def test_bad_words_never_appear(llm):
    params = {"seed": 3, "max_tokens": 80, "ignore_eos": True}
    (free,) = llm.generate("The fox", SamplingParams(**params), use_tqdm=False)
    words = [TOKENIZER.decode([t]) for t in free.outputs[0].token_ids]
    word = next(w for w in words if w.strip().isascii() and w.strip().isalpha())
    (clean,) = llm.generate("The fox", SamplingParams(**params, bad_words=[word.strip()]), use_tqdm=False)
    forbidden = {tuple(TOKENIZER.encode(v, add_special_tokens=False)) for v in (word.strip(), " " + word.strip())}
    for ids in forbidden:
        taken = clean.outputs[0].token_ids
        assert all(tuple(taken[i : i + len(ids)]) != ids for i in range(len(taken)))


def test_closing_a_stream_frees_its_pages(llm):
    stream = llm.generate_stream("The fox", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    assert llm.engine.stats()["num_used_pages"] > 0
    stream.close()
    assert llm.engine.stats()["num_used_pages"] == 0 and not llm.engine.has_unfinished()
