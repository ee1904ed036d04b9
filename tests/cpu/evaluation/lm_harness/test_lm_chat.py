"""Chat templates and special tokens around what lm-evaluation-harness asks an engine."""

import pytest

from kvforge.common.errors import KvforgeError
from kvforge.runtime import SamplingParams

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is an extra")
from kvforge.evaluation.lm_harness import EngineLM
from tests.support.lm_harness import TEMPLATE, TEXTS, byte_ids


def test_chat_templates(model: EngineLM, chat_model: EngineLM) -> None:
    history = [{"role": "user", "content": "two and two?"}, {"role": "assistant", "content": "The answer is "}]
    assert chat_model.chat_template(True) == TEMPLATE and chat_model.chat_template(False) is None
    assert chat_model.apply_chat_template(history[:1]) == "[user]two and two?</s>[assistant]"
    continued = chat_model.apply_chat_template(history, add_generation_prompt=False)
    assert continued == "[user]two and two?</s>[assistant]The answer is"
    assert chat_model.tokenizer_name != model.tokenizer_name
    for call in (lambda: model.chat_template(True), lambda: model.apply_chat_template(history)):
        with pytest.raises(KvforgeError, match="this engine has no chat template"):
            call()
    with pytest.raises(KvforgeError, match="not written by the chat template 'rag'"):
        chat_model.chat_template("rag")


def test_what_stands_before_a_text(model: EngineLM, chat_model: EngineLM) -> None:
    assert (model.prefix_token_id, model.eot_token_id) == (1, 2)
    assert model.tok_encode("a") == byte_ids("a")
    assert chat_model.tok_encode("a") == [1, *byte_ids("a")]
    assert chat_model.tok_encode("a", add_special_tokens=False) == byte_ids("a")
    assert chat_model.tok_encode("<s>a") == [1, *byte_ids("a")], "only once"


def test_a_swiftkv_engine_scores_what_it_generates(chat_model: EngineLM) -> None:
    """Greedy tokens are the most probable ones, though they are scored together and were generated one by one."""
    prompts = [chat_model.tok_encode(text) for text in TEXTS]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers = [r.outputs[0].token_ids for r in chat_model.llm.generate(prompts, params, use_tqdm=False)]
    pairs = [(None, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    assert all(top for _, top in chat_model._loglikelihood_tokens(pairs, disable_tqdm=True))
    spoiled = [(None, prompt, [*answer[:5], answer[5] ^ 1, *answer[6:]]) for _, prompt, answer in pairs]
    assert not any(top for _, top in chat_model._loglikelihood_tokens(spoiled, disable_tqdm=True))
