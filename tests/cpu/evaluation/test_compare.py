"""KL, agreement and log-likelihoods of two engines against plain torch, and the intervals around them."""

import json
import math
import random

import numpy as np
import pytest
import torch

from kvforge.common.errors import KvforgeError
from kvforge.evaluation.bootstrap import bootstrap_interval
from kvforge.evaluation.compare import compare_with_teacher, fidelity, kl_divergence, perplexity
from kvforge.evaluation.report import describe
from kvforge.evaluation.run import Report
from kvforge.runtime import LLM
from model_defs.reference import reference_logits
from tests.support.models.checkpoints import load_weights
from tests.support.models.engines import PLAIN, SWIFTKV, EngineSpec
from tests.support.models.shelf import EngineShelf
from tests.support.rounding import config_of, logprob_error, model_error
from tests.support.sessions.fake import changed

VOCAB = 320


def documents(num: int = 5) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.choice((2, 65, 66, 150)))] for _ in range(num)]


def log_probs(engines: EngineShelf, spec: EngineSpec, document: list[int]) -> torch.Tensor:
    checkpoint = engines.checkpoint(spec)
    logits = reference_logits(config_of(checkpoint), load_weights(checkpoint), torch.tensor(document))
    return logits[:-1].double().log_softmax(-1)


def logprob_off(engines: EngineShelf, spec: EngineSpec, tokens: int, largest: float) -> float:
    """What rounding changes of a token's log-probability, the smallest of which is ``largest`` below zero."""
    config = config_of(engines.checkpoint(spec))
    return logprob_error(config.vocab_size, largest, model_error(config, tokens))


@pytest.mark.parametrize("limits", [{}, {"max_num_tokens": 7}], ids=["whole", "small chunks"])
def test_sums_are_those_of_the_all_token_references(limits: dict[str, int], engines: EngineShelf) -> None:
    student = LLM(engines.engine(SWIFTKV), num_pages=64, **limits)
    teacher = LLM(engines.engine(PLAIN), num_pages=64)
    texts = documents()
    result = compare_with_teacher(student, teacher, texts)
    assert result.num_tokens == tuple(len(text) - 1 for text in texts)
    for index, text in enumerate(texts):
        ours, theirs = log_probs(engines, SWIFTKV, text), log_probs(engines, PLAIN, text)
        targets, pairs = torch.tensor(text[1:])[:, None], ((SWIFTKV, ours), (PLAIN, theirs))
        rounding = len(targets) * max(logprob_off(engines, spec, len(text), float(-rows.min())) for spec, rows in pairs)
        # A divergence moves with both log-probabilities, and with the teacher's weights of their differences.
        largest = 1 + float((theirs - ours).abs().max())
        kl = float((theirs.exp() * (theirs - ours)).sum())
        assert result.kl[index] == pytest.approx(kl, abs=(1 + largest) * rounding) and kl > 10 * rounding
        assert result.num_agree[index] == int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        assert result.student_nll[index] == pytest.approx(-float(ours.gather(1, targets).sum()), abs=rounding)
        assert result.teacher_nll[index] == pytest.approx(-float(theirs.gather(1, targets).sum()), abs=rounding)
    measures = fidelity(result)
    assert measures["perplexity"]["value"] == pytest.approx(math.exp(sum(result.student_nll) / sum(result.num_tokens)))
    assert all(m["low"] <= m["value"] <= m["high"] for m in measures.values())
    for llm in (student, teacher):
        llm.engine.check_invariants()


def test_a_model_is_its_own_teacher(engines: EngineShelf) -> None:
    llm = LLM(engines.engine(SWIFTKV), num_pages=64)
    measures = fidelity(compare_with_teacher(llm, llm, documents()))
    assert measures["kl"] == {"value": 0, "low": 0, "high": 0}
    assert measures["agreement"] == {"value": 1, "low": 1, "high": 1}
    assert measures["perplexity"] == measures["teacher_perplexity"]


def test_other_vocabularies_and_documents_that_do_not_fit_are_refused(engines: EngineShelf) -> None:
    teacher = LLM(engines.engine(PLAIN), num_pages=64)
    student = LLM(engines.engine(SWIFTKV), num_pages=64, max_seq_len=100)
    for document, message in (([5] * 101, "document 1 has 101 tokens and 2 to 100"), ([5], "document 1 has 1 tokens")):
        with pytest.raises(KvforgeError, match=message):
            compare_with_teacher(student, teacher, [[5, 6], document])
    with pytest.raises(KvforgeError, match="at least two of them"):
        fidelity(compare_with_teacher(student, teacher, [[5, 6]]))
    manifest = teacher.engine.manifest
    teacher.engine.manifest = changed(manifest, vocab_size=VOCAB + 1)
    with pytest.raises(KvforgeError, match="321 tokens in its vocabulary and the engine 320"):
        compare_with_teacher(student, teacher, [[5, 6]])
    teacher.engine.manifest = manifest
    assert teacher.tokenizer is not None
    teacher.tokenizer.backend.add_tokens(["new"])
    with pytest.raises(KvforgeError, match="tokenizer has other tokens"):
        compare_with_teacher(student, teacher, [[5, 6]])


def test_kl_divergence_by_hand() -> None:
    teacher, student = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.25, 0.25, 0.5]]).log()
    assert kl_divergence(teacher + 3, student - 1).item() == pytest.approx(0.25 * math.log(2), abs=logprob_error(3, 5))


def test_perplexity_is_the_exponential_of_the_mean() -> None:
    estimate = perplexity([2 * math.log(4), 6 * math.log(4)], [2, 6])
    assert estimate.value == estimate.low == estimate.high == pytest.approx(4)


def test_a_perplexity_beyond_floats_is_infinite_and_null_in_json() -> None:
    found = perplexity([1000.0 * 10, 2.0 * 10], [10, 10])
    assert found.value == pytest.approx(math.exp(501)) and found.high == math.inf and math.isfinite(found.low)
    measures = {"source": "x", "num_tokens": 20, "perplexity": vars(found)}
    data = json.loads(json.dumps(Report("engine", None, [], measures).to_json(), allow_nan=False))
    assert data["documents"]["perplexity"]["high"] is None and data["documents"]["perplexity"]["low"] == found.low
    assert "inf" in describe(Report("engine", None, [], measures | {"num_documents": 2}))


def test_bootstrap_means_are_of_tokens_not_of_documents() -> None:
    estimate = bootstrap_interval([1, 30], [1, 10])
    assert estimate.value == pytest.approx(31 / 11)
    assert (estimate.low, estimate.high) == (1, 3), "resamples of two documents reach from one alone to the other alone"
    assert bootstrap_interval([1, 30, 4], [1, 10, 3], seed=5) == bootstrap_interval([1, 30, 4], [1, 10, 3], seed=5)
    with pytest.raises(ValueError, match="at least two"):
        bootstrap_interval([1.0], [3])


def test_the_interval_covers_at_about_its_level() -> None:
    """40 documents of unequal lengths whose tokens share a random effect: percentile intervals cover a little less
    than 95 in 100; intervals that took tokens as independent would cover far less."""
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(300):
        counts = rng.integers(20, 200, size=40)
        sums = counts * rng.normal(1.0, 0.5, size=40) + rng.normal(0, np.sqrt(counts))
        estimate = bootstrap_interval(sums.tolist(), counts.tolist(), num_resamples=400, seed=seed)
        covered += estimate.low <= 1.0 <= estimate.high
    assert 265 <= covered <= 295
