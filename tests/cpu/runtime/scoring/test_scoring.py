"""Scored log-probabilities are the model's, whatever is scored beside them and in whatever chunks."""

import random
from pathlib import Path

import pytest
import torch

from kvforge.common.errors import EngineError, RequestError
from kvforge.runtime import LLM, SamplingParams
from kvforge.runtime.scoring.score import LogitsChunk, lowest_argmax, score, score_chunk, stream_logits
from model_defs.reference import reference_logits
from tests.support.models.checkpoints import load_weights
from tests.support.models.engines import AWKWARD, PLAIN, SWIFTKV, SWIFTKV_FP8, EngineSpec
from tests.support.models.shelf import EngineShelf
from tests.support.rounding import assert_within, config_of, logprob_error, model_error, sum_error, turned_code_error

WINDOW = EngineSpec("mistral", 2, early_exit=True, model=(("num_hidden_layers", 3), ("sliding_window", 24)))
QWEN3 = EngineSpec("qwen3", 1, 3, early_exit=True, model=(("num_hidden_layers", 4), ("tie_word_embeddings", True)))
VOCAB, PAGE_SIZE, TOKENS = 320, 8, 150

pytestmark = pytest.mark.usefixtures("one_thread")
Requests = list[tuple[list[int], list[int]]]


def assert_logprobs_near(checkpoint: Path, got: torch.Tensor, want: torch.Tensor, turned: float = 0.0) -> None:
    """Log-probabilities of tokens drawn at random reach as far down as the logits are large."""
    if len(want):
        off = model_error(config_of(checkpoint), TOKENS) + turned
        assert_within(got, want, logprob_error(VOCAB, float(want.abs().max()), off))


def random_requests(seed: int, num: int = 7) -> Requests:
    """Contexts of 1 to 60 tokens, some with a common beginning, and continuations of 0 to 90, the first one of 90."""
    rng = random.Random(seed)
    common = [rng.randrange(3, VOCAB) for _ in range(30)]
    requests = []
    for _ in range(num):
        shared = common[: rng.choice((0, 0, 8, 17, 30))]
        context = shared + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 30))]
        length = rng.choice((0, 1, 2, 10, 90)) if requests else 90
        requests.append((context, [rng.randrange(3, VOCAB) for _ in range(length)]))
    return requests


def expected_logits(checkpoint, context: list[int], continuation: list[int]) -> torch.Tensor:
    logits = reference_logits(config_of(checkpoint), load_weights(checkpoint), torch.tensor(context + continuation))
    return logits[len(context) - 1 : -1]


SPECS = {"cut": SWIFTKV, "cut-ragged-qwen2": AWKWARD, "plain": PLAIN, "mistral-window": WINDOW, "qwen3": QWEN3}


@pytest.mark.with_full(name=("mistral-window", "qwen3"))
@pytest.mark.parametrize("name", SPECS)
def test_scores_are_those_of_the_all_token_reference(name: str, engines: EngineShelf) -> None:
    spec = SPECS[name]
    llm, checkpoint = LLM(engines.engine(spec), num_pages=64), engines.checkpoint(spec)
    requests = random_requests(1)
    for (context, continuation), scored in zip(requests, score(llm, requests), strict=True):
        if not continuation:
            assert len(scored.logprobs) == len(scored.is_top) == 0
            continue
        expected = expected_logits(checkpoint, context, continuation)
        logprobs = expected.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])[:, 0]
        assert_logprobs_near(checkpoint, scored.logprobs, logprobs)
        assert scored.is_top.tolist() == (expected.argmax(-1) == torch.tensor(continuation)).tolist()


def test_scores_of_a_plain_engine_are_those_of_transformers(engines: EngineShelf) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(engines.checkpoint(PLAIN)).eval()
    context, continuation = random_requests(2)[0][0], list(range(5, 80))
    with torch.no_grad():
        logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])[:, 0]
    (scored,) = score(LLM(engines.engine(PLAIN), num_pages=64), [(context, continuation)])
    assert_logprobs_near(engines.checkpoint(PLAIN), scored.logprobs, expected)


@pytest.mark.parametrize("seed", range(6))
def test_scores_depend_on_neither_neighbours_nor_chunks(seed: int, engines: EngineShelf) -> None:
    """Few tokens and sequences a step, few pages, with and without kept prefixes, against each request alone."""
    requests, rng = random_requests(seed + 10), random.Random(seed)
    engine = engines.engine(SWIFTKV)
    alone = LLM(engine, num_pages=32, enable_prefix_cache=False)
    expected = [score(alone, [request])[0] for request in requests]
    llm = LLM(
        engine,
        num_pages=rng.choice((20, 30, 60)),
        max_num_tokens=rng.choice((7, 40, 200)),
        max_num_seqs=rng.randint(1, 5),
        max_seq_len=160,
        enable_prefix_cache=rng.random() < 0.7,
    )
    for _ in range(2):  # the second time from kept prefixes
        for actual, wanted in zip(score(llm, requests), expected, strict=True):
            assert_logprobs_near(engines.checkpoint(SWIFTKV), actual.logprobs, wanted.logprobs)
            assert torch.equal(actual.is_top, wanted.is_top)
        llm.engine.check_invariants()
        assert llm.engine.stats()["num_used_pages"] == 0
    chunks = list(stream_logits(llm, requests, max_survivors=3))
    assert max(len(chunk.logits) for chunk in chunks) == 3
    for index, wanted in enumerate(expected):
        mine = [chunk for chunk in chunks if chunk.request == index]
        assert [chunk.start for chunk in mine] == [sum(len(c.logits) for c in mine[:i]) for i in range(len(mine))]
        if mine:
            logprobs = torch.cat([score_chunk(chunk)[0] for chunk in mine])
            assert_logprobs_near(engines.checkpoint(SWIFTKV), logprobs, wanted.logprobs)


@pytest.mark.parametrize("spec", [SWIFTKV, SWIFTKV_FP8], ids=["fp32", "fp8-cache-drafts"])
def test_scores_are_those_of_generation(spec: EngineSpec, engines: EngineShelf) -> None:
    """What the engine generated greedily is at the top everywhere, with the log-probabilities it reported. An engine
    with drafts has more survivors a step than sequences; in an 8-bit cache float32's error may turn a rounding."""
    turned = turned_code_error(torch.float8_e4m3fn, head_dim=16) if spec == SWIFTKV_FP8 else 0.0
    llm = LLM(engines.engine(spec), num_pages=64)
    prompts = [context for context, _ in random_requests(3)]
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=1, ignore_eos=True)
    outputs = [result.outputs[0] for result in llm.generate(prompts, params, use_tqdm=False)]
    scores = score(llm, [(p, output.token_ids) for p, output in zip(prompts, outputs, strict=True)])
    for output, scored in zip(outputs, scores, strict=True):
        assert scored.is_top.all()
        reported = torch.tensor([entry.logprob for entry in output.logprobs])
        assert_logprobs_near(engines.checkpoint(spec), scored.logprobs, reported, turned)


def test_a_common_beginning_is_computed_once(engines: EngineShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, num_computed = LLM(engines.engine(SWIFTKV), num_pages=64), []
    run_batch = llm.engine.runner.run_batch
    monkeypatch.setattr(
        llm.engine.runner,
        "run_batch",
        lambda batch: num_computed.append(len(batch.lower.input_ids)) or run_batch(batch),
    )
    score(llm, [(list(range(3, 60)), [choice, 7]) for choice in range(4)])
    last_page = 57 - 56 // PAGE_SIZE * PAGE_SIZE  # the last context token is computed for every continuation
    assert sum(num_computed) == 58 + 3 * (last_page + 1)


def test_pages_come_back_when_scoring_is_given_up(engines: EngineShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(engines.engine(SWIFTKV), num_pages=32)
    stream = stream_logits(llm, [([3, 4, 5], list(range(3, 100))), ([6], list(range(50)))], max_survivors=4)
    next(stream)
    assert llm.engine.stats()["num_used_pages"] > 0
    with pytest.raises(RequestError, match="in use by unfinished requests"):
        score(llm, [([3], list(range(3, 250)))])
    stream.close()
    llm.engine.check_invariants()
    monkeypatch.setattr(llm.engine.runner, "run_batch", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        score(llm, [([3], [4])])
    llm.engine.check_invariants()


@pytest.mark.parametrize("place", ["runner.run_batch", "scheduler.pool.allocate", "scheduler.prefix_cache.publish"])
def test_pages_come_back_after_an_interrupt(place: str, engines: EngineShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(engines.engine(SWIFTKV), num_pages=32)
    owner = llm.engine
    for name in place.split(".")[:-1]:
        owner = getattr(owner, name)
    call, calls = getattr(owner, place.split(".")[-1]), iter(range(3))

    def interrupted(*arguments):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return call(*arguments)

    monkeypatch.setattr(owner, place.split(".")[-1], interrupted)
    requests = [([3] * 20, [4] * 20), ([3] * 20, [5] * 90), ([6] * 20, [7] * 90)]
    with pytest.raises(KeyboardInterrupt):
        score(llm, requests)
    llm.engine.check_invariants()
    assert llm.engine.stats()["num_used_pages"] == 0


def test_logits_that_are_not_finite_end_it_and_the_pages_come_back(
    engines: EngineShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(engines.engine(SWIFTKV), num_pages=32)
    run_batch = llm.engine.runner.run_batch

    def broken(batch):
        logits = run_batch(batch).clone()
        logits[-1, 7] = float("-inf")
        return logits

    monkeypatch.setattr(llm.engine.runner, "run_batch", broken)
    with pytest.raises(EngineError, match="not finite") as error:
        score(llm, [([3], [4] * 80)])
    assert error.traceback and llm.engine.stats()["num_used_pages"] == 0, "before the exception is forgotten"
    llm.engine.check_invariants()


def test_scoring_and_generation_share_the_pages(engines: EngineShelf) -> None:
    """Scores between the steps of a running request; and generation that an open iterator leaves no pages ends."""
    llm, request = LLM(engines.engine(SWIFTKV), num_pages=20), ([5] * 33, [7] * 20)
    (expected,), params = score(llm, [request]), SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    alone = llm.generate([[3, 4, 5]], params, use_tqdm=False)[0].outputs[0].token_ids
    tokens: list[int] = []
    llm.engine.add_request("running", [3, 4, 5], params)
    while llm.engine.has_unfinished():
        tokens += [token for output in llm.engine.step() for token in output.new_token_ids]
        if len(tokens) % 20 == 1:
            (scored,) = score(llm, [request])
            assert_logprobs_near(engines.checkpoint(SWIFTKV), scored.logprobs, expected.logprobs)
            llm.engine.check_invariants()
    assert tokens == alone
    stream = stream_logits(llm, [([3], list(range(3, 120)))], max_survivors=4)
    next(stream)
    with pytest.raises(RequestError, match="open iterator of scored logits holds the engine's pages; close it"):
        llm.generate([[3, 4, 5]], params, use_tqdm=False)
    stream.close()
    llm.engine.check_invariants()
    assert llm.generate([[3, 4, 5]], params, use_tqdm=False)[0].outputs[0].token_ids == alone


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (([], [1]), "the prompt is empty"),
        (([1, 2], [VOCAB]), "token id 320"),
        (([1.5], [1]), "not a flat list of whole numbers"),
        (([3] * 250, [3] * 263), "250 context and 263 continuation tokens, but the engine takes at most 512 together"),
        (([3] * 200, [3] * 200), "request 1 has 400 tokens, but the KV cache holds 256"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_anything_is_computed(
    request_, message: str, engines: EngineShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(engines.engine(SWIFTKV), num_pages=32)
    monkeypatch.setattr(llm.engine.runner, "run_batch", lambda _: 1 / 0)
    with pytest.raises(RequestError, match=message):
        score(llm, [([3], [4]), request_])


def test_ties_go_to_the_lowest_token_and_logits_must_be_finite() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -2.0, -3.0, -0.5]])
    assert lowest_argmax(logits).tolist() == [1, 0, 3]
    logprobs, is_top = score_chunk(LogitsChunk(0, 0, torch.tensor([2, 0, 3]), logits))
    assert is_top.tolist() == [False, True, True] and logprobs[1].exp().item() == pytest.approx(0.25, rel=sum_error(4))
    logits[1, 2] = float("nan")
    with pytest.raises(EngineError, match="not finite"):
        score_chunk(LogitsChunk(0, 0, torch.tensor([2, 0, 3]), logits))
