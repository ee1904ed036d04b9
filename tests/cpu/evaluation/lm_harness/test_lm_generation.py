"""Texts that an engine generates for lm-evaluation-harness: where they end, and refusals."""

from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as BackendTokenizer

from kvforge.common.errors import KvforgeError
from kvforge.runtime.text.tokenizer import Tokenizer
from tests.support.models.engines import PLAIN
from tests.support.models.shelf import EngineShelf

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is an extra")
from kvforge.evaluation.lm_harness import EngineLM
from tests.support.lm_harness import TEXTS, Reference, byte_ids, instance


def test_answers_leave_room_for_the_prompt(engines: EngineShelf) -> None:
    model = EngineLM(engines.engine(PLAIN), max_length=20, max_gen_toks=1024)
    assert model.max_gen_toks == 10
    request = instance("generate_until", "a" * 30, {"until": []})
    assert len(model.tokens.encode(model.generate_until([request], disable_tqdm=True)[0])) <= 40
    for count in (20, 0):
        request = instance("generate_until", "a", {"until": [], "max_gen_toks": count})
        with pytest.raises(KvforgeError, match=f"generates {count} tokens and the engine takes 20, prompt included"):
            model.generate_until([request], disable_tqdm=True)


def test_generation_is_greedy_and_ends_at_stop_strings(model: EngineLM, reference: Reference) -> None:
    def generate(context: str, **options: Any) -> str:
        return model.generate_until([instance("generate_until", context, options)], disable_tqdm=True)[0]

    ids = reference.greedy(byte_ids(TEXTS[0]), 24)
    ids = ids[: ids.index(2)] if 2 in ids else ids
    whole = model.tokens.decode(ids)
    assert generate(TEXTS[0], until=[], max_gen_toks=24) == whole
    assert generate(TEXTS[0], until="", max_gen_toks=24, do_sample=False, temperature=1.0) == whole
    place = next(i for i in range(2, len(whole)) if whole[i].isascii() and whole[i] not in whole[:i])
    assert generate(TEXTS[0], until=["never", whole[place]], max_gen_toks=24) == whole[:place]
    stop = next(whole[i : i + 3] for i in range(2, len(whole) - 2) if whole[i : i + 3].isascii())
    assert generate(TEXTS[0], until=[stop], max_gen_toks=24) == whole[: whole.index(stop)], "of three tokens"
    end = next(i for i, token in enumerate(ids) if token >= 3 and token not in ids[:i] and i > 2)
    special = {"until": ["</s>", model.tokens.backend.id_to_token(ids[end])], "max_gen_toks": 24}
    assert whole.startswith(generate(TEXTS[0], **special))
    sampled = {generate(TEXTS[0], until=[], do_sample=True, temperature=5.0, seed=s, max_gen_toks=8) for s in range(4)}
    assert len(sampled) > 1
    with pytest.raises(KvforgeError, match="sets num_beams for generation, which the engine does not have"):
        generate(TEXTS[0], until=[], num_beams=4)
    model.llm.engine.runner, runner = None, model.llm.engine.runner  # type: ignore[assignment]
    try:
        with pytest.raises(KvforgeError, match="no score"):
            generate(TEXTS[0], until=[])
    finally:
        model.llm.engine.runner = runner


def test_stop_strings_that_are_special_tokens_are_ids_and_other_added_tokens_are_not(
    model: EngineLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = BackendTokenizer.from_str(model.tokens.backend.to_str())
    backend.add_tokens([AddedToken("\n\n", special=False)])
    monkeypatch.setattr(model, "tokens", Tokenizer(backend))
    params = model._sampling({"until": ["</s>", "\n\n", ""]})
    assert (params.stop, params.stop_token_ids) == (("\n\n",), (2,))
