"""Quest: chunks and attention against brute force in float64, engines against themselves and full attention."""

import dataclasses
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

import plugins
from kvforge.common.errors import BuildError
from kvforge.compiler import BuildOptions, build_engine
from kvforge.compiler.options import resolve
from kvforge.kv_policies import parse
from kvforge.kv_policies.quest import Quest
from kvforge.runtime import LLMEngine, SamplingParams
from model_defs.cache_insertion import Pages
from model_defs.page_selection import PageSelection, SelectedAttention
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.small_models import small_session
from tests.support.random_cases import Seeds
from tests.support.schedules.engine_schedules import check_tokens, random_plan, run_plan
from tests.support.sessions.eager import eager_session

pytestmark = pytest.mark.usefixtures("one_thread")
DIM, PAGE = 16, 8
NEAR_TIE = 1e-5
"""Of logarithms of scores, which are sums of 32 products of float32."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, return_logits=True)


def bound(q: torch.Tensor, keys: torch.Tensor) -> float:
    """The largest that any key between the extremes of ``keys`` [n, d] can score with ``q`` [d]."""
    low, high = keys.min(0).values, keys.max(0).values
    return float(sum(max(a * b, a * c) for a, b, c in zip(q.tolist(), low.tolist(), high.tolist(), strict=True)))


def brute_force(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chunks: int, most: int, size: int):
    """One query ``[group, d]`` over a head's tokens ``[N, d]`` in float64: the output, and the smallest difference that
    decided which of the first ``chunks`` chunks are read."""
    q, keys, values = q.double(), keys.double(), values.double()
    tokens, gap = list(range(len(keys))), 1.0
    if chunks:
        bounds = torch.tensor([[bound(one, keys[c * size : c * size + size]) for c in range(chunks)] for one in q])
        score = (bounds * DIM**-0.5).double().log_softmax(-1).amax(0)
        order = score.argsort(descending=True, stable=True).tolist()
        gap = float(score[order[most - 1]] - score[order[most]])
        chosen = {c for c in order[:most]}
        tokens = [i for i in tokens if i // size >= chunks or i // size in chosen]
    weights = (q @ keys[tokens].T * DIM**-0.5).softmax(-1)
    return weights @ values[tokens], gap


def test_attention_reads_the_chunks_with_the_largest_bounds() -> None:
    plugins.load_library()
    counts: Counter[str] = Counter()
    for seed in range(100):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        size, heads, group = rng.choice((1, 2, 4, 8)), rng.choice((1, 2, 3)), rng.choice((1, 2))
        most, sequences, width = rng.randint(1, 4), rng.randint(1, 4), 6
        pages, state_pages = rng.sample(range(40), 40), rng.sample(range(40), 40)
        k_pool, v_pool = (torch.randn(40, PAGE, heads, DIM) for _ in range(2))
        bounds = torch.randn(40, PAGE // size, heads, 2 * DIM)
        table = torch.zeros(sequences, width, dtype=torch.int32)
        state_table = torch.zeros(sequences, width, dtype=torch.int32)
        num_chunks, lengths, queries, expected = [], [], [], []
        for s in range(sequences):
            own, states = [pages.pop() for _ in range(width)], [state_pages.pop() for _ in range(width)]
            table[s], state_table[s] = torch.tensor(own), torch.tensor(states)
            length = rng.randint(1, width * PAGE)
            chunks = rng.randint(0, (length - 1) // size)
            chunks = chunks if chunks > most else 0
            count = 1 if chunks else rng.randint(1, min(4, length))
            keys, values = (torch.cat([pool[page] for page in own])[:length] for pool in (k_pool, v_pool))
            for i in range(chunks):
                part = keys[i * size : i * size + size]
                place = states[i * size // PAGE], i % (PAGE // size)
                bounds[place] = torch.cat((part.amax(0), part.amin(0)), -1)
            q = torch.randn(count, heads * group, DIM)
            rows = []
            for i in range(count):
                seen = length - count + 1 + i
                each = [
                    brute_force(q[i, h * group : (h + 1) * group], keys[:seen, h], values[:seen, h], chunks, most, size)
                    for h in range(heads)
                ]
                rows.append(torch.cat([out for out, _ in each]))
                counts["near"] += chunks > 0 and min(gap for _, gap in each) < NEAR_TIE
            expected.append(torch.stack(rows))
            num_chunks.append(chunks)
            lengths.append(length)
            queries.append(q)
            counts["selected"] += chunks > 0
        attend = SelectedAttention(PageSelection(size, most), state_table, torch.tensor(num_chunks, dtype=torch.int32))
        starts = torch.tensor([0, *torch.tensor([len(q) for q in queries]).cumsum(0)], dtype=torch.int32)
        got = attend(
            torch.cat(queries),
            (k_pool, v_pool, bounds, torch.zeros(40, PAGE // size, heads, dtype=torch.uint8)),
            Pages(starts, torch.tensor(lengths, dtype=torch.int32), table),
            DIM**-0.5,
            (1.0, 1.0),
            0,
        )
        # Sums of at most 48 weighted values, each weight and value rounded once.
        tolerance = 4 * 48 * torch.finfo(torch.float32).eps * float(v_pool.abs().max())
        assert (got.double() - torch.cat(expected)).abs().max() <= tolerance, seed
    assert counts["selected"] > 60 and counts["near"] == 0, counts


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 96) for _ in range(length)]


def answers(engine: LLMEngine, prompts: list[list[int]]) -> tuple[dict[str, list[int]], dict[str, list]]:
    tokens: dict[str, list[int]] = {}
    logits: dict[str, list] = {}
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, GREEDY)
    while engine.has_unfinished():
        for output in engine.step():
            assert output.finish_reason in (None, "length"), output.stop_reason
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            logits.setdefault(output.request_id, []).extend(output.logits)
        engine.check_invariants()
    return tokens, logits


@pytest.mark.parametrize("shape", [{"cut": 3, "num_layers": 3}, {"cut": 1}])
def test_a_budget_that_covers_the_prompt_gives_the_bits_of_full_attention(shape: dict) -> None:
    results = []
    for policy in ("full", "quest:budget=80,chunk_size=4", "quest:budget=40,chunk_size=4"):
        engine = LLMEngine(session=small_session({"kv_policy": policy}, head_dim=10, **shape), num_pages=64)
        results.append(answers(engine, [prompt_of(80), prompt_of(83, 1)])[1])
    for request in results[0]:
        for full, covered in zip(results[0][request], results[1][request], strict=True):
            assert (full == covered).all()
        assert any((full != less).any() for full, less in zip(results[0][request], results[2][request], strict=True))


@pytest.mark.parametrize("shape", [{"cut": 3, "num_layers": 3}, {"cut": 1}])
def test_texts_over_schedules_equal_those_alone(shape: dict, seeds: Seeds, full: bool) -> None:
    session, counts = small_session({"kv_policy": "quest:budget=4,chunk_size=2"}, head_dim=10, **shape), Counter()
    for seed in seeds(12, 200):
        rng = random.Random(seed)
        plan = random_plan(seed, page_sizes=(4,), vocab_size=96, max_requests=5, sampled=False)
        expected = {}
        for request in plan.requests:
            engine = LLMEngine(session=session, num_pages=32, enable_prefix_cache=False)
            engine.add_request("alone", request.prompt, dataclasses.replace(request.params, n=1))
            tokens, reason = [], None
            while engine.has_unfinished():
                for output in engine.step():
                    tokens += output.new_token_ids
                    reason = output.finish_reason
            for index in range(request.params.n):
                expected[request.request_id, index] = tokens, reason
        most = max(-(-(len(r.prompt) + r.params.max_tokens) // 4) for r in plan.requests)
        engine = LLMEngine(
            session=session,
            num_pages=most + rng.choice([0, 1, 3, 8]),
            max_num_tokens=plan.max_num_tokens,
            max_num_seqs=plan.max_num_seqs,
            enable_prefix_cache=plan.enable_prefix_cache,
        )
        for pool in engine.runner.pools:
            for tensor in pool[:3]:
                tensor.fill_(float("nan"))
        tokens, reasons, aborted = run_plan(engine, plan)
        check_tokens(tokens, reasons, aborted, expected, seed)
        stats = engine.stats()
        assert stats["num_used_pages"] == stats["num_used_state_pages"] == 0 == stats["num_failed_steps"]
        counts.update(preempted=stats["num_preemptions"], transitions=stats["num_transitions"])
    assert counts["transitions"] > (10 if full else 3) and counts["preempted"] > (2 if full else 0), counts


@pytest.mark.parametrize("shape", [{"cut": 3, "num_layers": 3}, {"cut": 1}])
def test_what_was_generated_is_not_another_prompts_prefix(shape: dict) -> None:
    """A second turn, its prompt made of the first one's and its answer: computed from chunks, the answer's K and V are
    not those of a prompt."""
    session = small_session({"kv_policy": "quest:budget=8,chunk_size=4"}, **shape)
    for seed in range(10):
        first = prompt_of(24, seed)
        engine = LLMEngine(session=session, num_pages=64)
        second = [*first, *answers(engine, [first])[0]["0"], 5]
        before = engine.stats()["num_reused_tokens"]
        found = answers(engine, [second])
        assert engine.stats()["num_reused_tokens"] - before == 24
        assert found[0] == answers(LLMEngine(session=session, num_pages=64, enable_prefix_cache=False), [second])[0]


def test_bytes_that_are_used_are_the_policys() -> None:
    policy = parse("quest:budget=8,chunk_size=4")
    session = small_session({"kv_policy": str(policy)}, head_dim=10, cut=3, num_layers=3)
    manifest, cache = session.manifest, session.manifest.owner_cache
    engine = LLMEngine(session=session, num_pages=32, max_num_seqs=1, max_num_tokens=8)
    engine.add_request("r", prompt_of(50), GREEDY)
    for _ in range(20):
        engine.step()
        sequence = engine.scheduler.running[0]
        expected = policy.device_bytes(cache, 50, sequence.num_computed - 50)
        assert engine.stats()["kv_device_used_bytes"] == manifest.model.num_owners * expected
    assert policy.device_bytes_read(cache, 50, 3) == (8 + 2 + 3) * cache.token_bytes + 12 * cache.num_kv_heads * (
        2 * 10 * cache.element_bytes + 1
    )


def test_a_compiled_engine_does_what_its_graphs_do(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "llama", seed=5, num_hidden_layers=3, cut=2)
    options = BuildOptions(
        dtype="float32", page_size=8, kv_policy="quest:budget=16,chunk_size=8", max_num_seqs=4, max_num_tokens=64,
        max_seq_len=256,
    )  # fmt: skip
    build_engine(checkpoint, tmp_path / "engine", options)
    prompts = [prompt_of(length, length) for length in (100, 20, 61)]
    compiled, eager = (
        answers(engine, prompts)[0]
        for engine in (LLMEngine(tmp_path / "engine"), LLMEngine(session=eager_session(checkpoint, options)))
    )
    assert compiled == eager


def test_what_does_not_go_together_is_refused() -> None:
    config = small_session({}, head_dim=10).config
    limits = {"max_num_tokens": 64, "max_num_seqs": 4, "max_seq_len": 128, "page_size": 16}
    for more, words in (
        ({"kv_dtype": "fp8"}, "--kv-policy quest needs K,V in the model's dtype"),
        ({"max_draft_len": 4}, "--kv-policy quest needs one query per sequence and step"),
        ({"kv_policy": "quest:budget=64,chunk_size=32"}, "--page-size 16 is no multiple of quest's chunk_size 32"),
    ):
        with pytest.raises(BuildError, match=words):
            resolve(BuildOptions(**{"kv_policy": "quest", **limits, **more}), config, "F32")
    with pytest.raises(BuildError, match="budget 20 is no multiple of chunk_size 16"):
        Quest(budget=20)
    with pytest.raises(BuildError, match="chunk_size is 0; give at least 1"):
        parse("quest:chunk_size=0")
