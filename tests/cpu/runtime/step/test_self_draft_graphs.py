"""Self-drafts and early exits on the graphs of real models: tokens, K and V are those of plain decoding in fp32."""

import dataclasses
import itertools
import random
from collections import Counter

import pytest
import torch

from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.sessions.cuda import CudaSession
from kvforge.runtime.sessions.inputs import LowerStep, VerifyStep
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.speculation.draft_length import DraftLength
from tests.support.models.small_models import small_session
from tests.support.rounding import assert_near, assert_within, model_error, turned_code_error
from tests.support.schedules.engine_schedules import random_plan, run_plan
from tests.support.sessions.eager import EagerSession

pytestmark = pytest.mark.usefixtures("one_thread")
PAGE_SIZE = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9] * 11, [5, 6, 7, 8], [3]]


def make_session(changes=(), **options) -> EagerSession:
    """A model of 5 layers, cut at 2, with AcrossKV groups of 2 and a ragged last one."""
    return small_session({"max_draft_len": 5, **options}, **{"num_layers": 5, "early_exit": True, **dict(changes)})


@pytest.fixture(scope="module")
def session() -> EagerSession:
    return make_session()


@pytest.fixture(scope="module")
def agreeing() -> EagerSession:
    """Its upper layers add nothing and its exit is its head: every draft of a greedy sequence is right."""
    session = make_session()
    with torch.no_grad():
        for name, weight in session._upper.named_parameters():
            if name.startswith("layers.") and (".o." in name or ".down." in name):
                weight.zero_()
        session._early_exit.norm_early_exit.weight.copy_(session._upper.norm.weight)
        session._early_exit.lm_head_early_exit.weight.copy_(session._upper.lm_head.weight)
    return session


@pytest.fixture(autouse=True)
def as_long_as_possible(monkeypatch):
    """Draft lengths that do not depend on times."""
    monkeypatch.setattr(DraftLength, "is_due", lambda self, num_sequences: True)
    monkeypatch.setattr(DraftLength, "choose", lambda self, num_sequences, available: dict(available))


def drafting(session, count=4, **options) -> LLMEngine:
    """An engine that drafts however unsure its exit is."""
    engine = LLMEngine(session=session, speculative=SpeculativeConfig("early_exit", count), **options)
    engine.runner.self_draft.min_confidence = 0.0
    return engine


def serve(engine, prompts=PROMPTS, params=GREEDY, after_step=lambda: None) -> dict[tuple[str, int], list[int]]:
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    texts: dict[tuple[str, int], list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            texts.setdefault((output.request_id, output.index), []).extend(output.new_token_ids)
        engine.check_invariants()
        after_step()
    return texts


def plain(session, prompts=PROMPTS, params=GREEDY) -> dict[tuple[str, int], list[int]]:
    """Each prompt alone."""
    texts = {}
    for index, prompt in enumerate(prompts):
        engine = LLMEngine(session=session, num_pages=64, enable_prefix_cache=False)
        texts |= {(str(index), i): text for (_, i), text in serve(engine, [prompt], params).items()}
    return texts


@pytest.mark.parametrize("changes", [{}, {"layer_windows": (6, 0, 6, 0, 6), "num_kv_heads": 1}, {"cut": 4}])
def test_greedy_texts_over_schedules_equal_plain_ones(changes, seeds, full):
    """Preemption, chunks, prefix hits, cancellation and prefills beside drafts of which few are right."""
    session, counts = make_session(changes), Counter()
    for seed in seeds(10, 67):
        limits = dict(page_sizes=(PAGE_SIZE,), vocab_size=96, max_prompt=40, max_new=16, max_requests=6)
        plan = random_plan(seed, sampled=False, **limits)
        rng = random.Random(seed)
        for request in plan.requests:
            words = {"stop_words_ids": ((5,), (9, 11)), "presence_penalty": 0.4, "repetition_penalty": 1.2}
            request.params = dataclasses.replace(request.params, **(words if rng.random() < 0.3 else {}))
        limits = {name: getattr(plan, name) for name in ("num_pages", "max_num_tokens", "max_num_seqs")}
        engine = drafting(session, rng.randint(1, 5), enable_prefix_cache=plan.enable_prefix_cache, **limits)
        tokens, reasons, aborted = run_plan(engine, plan)
        for request in plan.requests:
            for (_, index), text in plain(session, [request.prompt], request.params).items():
                got = tokens.get((request.request_id, index), [])
                is_whole = request.request_id not in aborted or (request.request_id, index) in reasons
                assert got == (text if is_whole else text[: len(got)]), (seed, request.request_id)
        stats = engine.stats()
        assert stats["num_failed_steps"] == 0 and stats["num_used_pages"] == 0
        counts.update(drafted=stats["num_draft_tokens"], preempted=stats["num_preemptions"], aborted=len(aborted))
        counts["accepted"] += stats["num_accepted_draft_tokens"]
    assert counts["drafted"] - counts["accepted"] > (100 if full else 30), counts
    assert counts["preempted"] > 0 and counts["aborted"] > 0, counts


@pytest.mark.parametrize("count", [1, 4, 5])
def test_an_exit_that_is_the_model_gives_a_token_more_than_drafts_in_each_step(agreeing, count):
    engine = drafting(agreeing, count, num_pages=64)
    assert serve(engine) == plain(agreeing)
    stats = engine.stats()
    assert stats["num_draft_tokens"] == stats["num_accepted_draft_tokens"] > 0
    # The prompts' step, then 24 tokens each.
    assert stats["num_iterations"] == stats["num_upper_calls"] == 1 + -(-24 // (count + 1))


@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8"}], ids=["fp32", "8-bit cache"])
def test_after_every_step_the_cache_is_that_of_a_prefill(options):
    """Whatever drafts were right or wrong, and whatever they left in the pages beyond."""
    session = make_session(**options)
    engine = drafting(session, num_pages=64)
    num_checked = 0
    turned = turned_code_error(torch.int8, session.config.head_dim) if options else 0.0

    def check() -> None:
        nonlocal num_checked
        for sequence in engine.scheduler.running:
            count = sequence.num_computed
            pools = session.allocate_pools(32)
            places = torch.arange(count, dtype=torch.int32)
            step = LowerStep(
                torch.from_numpy(sequence.tokens[:count]),
                places,
                places,
                torch.tensor([0, count], dtype=torch.int32),
                torch.tensor([count], dtype=torch.int32),
                torch.arange(32, dtype=torch.int32)[None],
            )
            session.lower(step, pools)
            for mine, fresh in zip(
                itertools.chain(*engine.runner.pools), itertools.chain.from_iterable(pools), strict=True
            ):
                got = mine[sequence.pages].flatten(0, 1)[:count].float()
                wanted = fresh.flatten(0, 1)[:count].float()
                if mine.dtype == torch.int8:
                    assert_within(got, wanted, 1)  # a code that rounds the other way
                else:
                    assert_near(got, wanted, model_error(session.config, count) + turned)
            num_checked += 1

    serve(engine, after_step=check)
    stats = engine.stats()
    assert num_checked > 60 and stats["num_draft_tokens"] > stats["num_accepted_draft_tokens"]


class Recorder:
    """Captures nothing: a replay runs the function on what its static inputs hold by then."""

    def __call__(self, function):
        self.function, self.result = function, function().clone()
        return Replay(function, self.result), self.result


class Replay:
    def __init__(self, function, result):
        self.function, self.result = function, result

    def replay(self):
        self.result.copy_(self.function())


@pytest.mark.parametrize("capture", [None, Recorder()])
def test_sessions_that_keep_hidden_states_in_one_place(session, capture):
    """The cuda session's buffers, staging and padding, on the CPU."""

    def paired(pools):
        return list(zip(pools[0::2], pools[1::2], strict=True))

    graphs = {
        "lower": lambda flat: [session._lower(*flat[:6], paired(flat[6:]), ())],
        "upper": lambda flat: [session._upper(*flat[:6], paired(flat[6:]), ())],
        "early_exit": lambda flat: [session.early_exit(*flat)],
        "verify": lambda flat: list(session.verify(VerifyStep(*flat))),
    }
    expected = plain(session)
    for options in ({"early_exit_threshold": 1.0}, {"speculative": SpeculativeConfig("early_exit", 5)}):
        cuda = CudaSession(session.manifest, {}, graphs, torch.device("cpu"), capture)
        engine = LLMEngine(session=cuda, num_pages=64, **options)
        engine.runner.self_draft.min_confidence = 0.0
        assert serve(engine) == expected and engine.stats()["num_failed_steps"] == 0
        if "speculative" in options:
            assert engine.stats()["num_draft_tokens"] > 50
    for threshold in (0.1, 0.3):
        engines = [
            LLMEngine(session=one, num_pages=64, early_exit_threshold=threshold)
            for one in (session, CudaSession(session.manifest, {}, graphs, torch.device("cpu"), capture))
        ]
        assert serve(engines[0]) == serve(engines[1])
        exits = [engine.stats()["num_early_exits"] for engine in engines]
        assert exits[0] == exits[1] and 5 < exits[0] < 24 * len(PROMPTS)


@pytest.mark.parametrize("prompts", [False, True])
def test_a_threshold_that_everyone_passes_gives_the_text_of_the_lower_half(session, prompts):
    """After the first token, which comes of the whole model, unless prompts exit too."""
    engine = LLMEngine(session=session, num_pages=64, early_exit_threshold=1e-9, early_exit_prompts=prompts)
    texts, stats = serve(engine), engine.stats()
    assert stats["num_upper_calls"] == (not prompts) and stats["num_early_exits"] == (24 + prompts) * len(PROMPTS)
    assert stats["num_prompt_early_exits"] == prompts * len(PROMPTS)
    for (request_id, _), text in texts.items():
        tokens = [*PROMPTS[int(request_id)], *text[: not prompts]]
        assert prompts or text[0] == plain(session)[request_id, 0][0]
        while len(tokens) < len(PROMPTS[int(request_id)]) + len(text):
            count, places = len(tokens), torch.arange(len(tokens), dtype=torch.int32)
            lengths = torch.tensor([0, count], dtype=torch.int32)
            pages = torch.arange(32, dtype=torch.int32)[None]
            ids = torch.tensor(tokens, dtype=torch.int32)
            step = LowerStep(ids, places, places, lengths, lengths[1:], pages)
            hidden = session.lower(step, session.allocate_pools(32))
            tokens.append(int(session.early_exit(hidden, places[-1:]).argmax()))
        assert tokens[-len(text) :] == text


@pytest.mark.parametrize("prompts", [False, True])
def test_neighbours_and_chunks_do_not_move_exits(session, prompts):
    options = {"num_pages": 64, "early_exit_threshold": 0.1, "early_exit_prompts": prompts}
    engines = [LLMEngine(session=session, max_num_tokens=size, **options) for size in (64, 5, 4)]
    texts = [serve(engine) for engine in engines]
    assert texts[0] == texts[1] == texts[2]
    alone = {}
    for index, prompt in enumerate(PROMPTS):
        engine = LLMEngine(session=session, **options)
        alone[str(index), 0] = serve(engine, [prompt])["0", 0]
    assert texts[0] == alone
    of_prompts = [engine.stats()["num_prompt_early_exits"] for engine in engines]
    assert of_prompts == of_prompts[:1] * 3 and (of_prompts[0] > 0) == prompts
    assert 10 < engines[0].stats()["num_early_exits"] < (24 + prompts) * len(PROMPTS)
