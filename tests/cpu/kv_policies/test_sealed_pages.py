"""A cache of 2 or 4 bits in groups: what a query reads, by what path soever it comes to be computed."""

import dataclasses
import json
import random

import pytest
import torch

from kvforge.cli import main
from kvforge.common.byte_sizes import format_bytes
from kvforge.common.errors import BuildError
from kvforge.compiler.options import BuildOptions
from kvforge.manifest import save_manifest
from kvforge.runtime import LLM, LLMEngine, SamplingParams
from kvforge.runtime.scoring.score import score
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.speculation.draft_length import DraftLength
from model_defs.reference import reference_logits
from perf.quality.cache_codecs import asymmetric, by_channel
from perf.quality.cache_formats import attend_residual
from tests.support.models.checkpoints import load_weights, make_checkpoint
from tests.support.models.small_models import small_session
from tests.support.random_cases import Seeds
from tests.support.rounding import sum_error
from tests.support.schedules.engine_schedules import random_plan, run_plan
from tests.support.schedules.step_driver import StepDriver
from tests.support.sessions.eager import EagerSession, eager_session

pytestmark = pytest.mark.usefixtures("one_thread")
PAGE_SIZE, TOKENS = 32, 150
FORMATS = (("kivi2", 2), ("kivi3", 3), ("kivi4", 4))
"""And their bits."""
OPTIONS = {"kv_dtype": "kivi2", "page_size": PAGE_SIZE, "max_seq_len": 256}
SUM_OF_LOGITS = sum_error(96) * 10
"""Between two orders of adding up the exponentials of 96 equal logits, of log-probabilities down to -10."""
CHUNKS = ((150,), (1,) * 150, (31, 1, 1, 63, 54), (32, 32, 32, 32, 22), (70, 7, 73))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    sizes = {"num_hidden_layers": 5, "head_dim": 32}
    return make_checkpoint(tmp_path_factory.mktemp("model") / "m", cut=2, group_size=2, **sizes)


def logits_in_chunks(session: EagerSession, tokens: list[int], chunks: tuple[int, ...], seed: int) -> torch.Tensor:
    driver, begin, found = StepDriver(session, 8, seed), 0, []
    for count in chunks:
        found.append(driver.run(tokens[begin : begin + count]))
        begin += count
    return torch.cat(found)


def some_tokens(seed: int = 3, count: int = TOKENS) -> list[int]:
    return torch.randint(3, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(("kv_dtype", "bits"), FORMATS)
@torch.inference_mode()
def test_logits_are_those_of_a_simulated_cache(kv_dtype: str, bits: int, checkpoint) -> None:
    """A query's own page exact, those before it in few bits: the two round the same numbers, up to float32's own error,
    and agree far better than either does with an exact cache."""
    session = eager_session(checkpoint, BuildOptions(dtype="float32", **OPTIONS | {"kv_dtype": kv_dtype}))
    config, weights, tokens = session.config, load_weights(checkpoint), some_tokens()

    def sealed(owner, q, k, v, window):
        stored = by_channel(k, bits, 32), asymmetric(v, bits, 32)
        return attend_residual(q, (k, v), stored, PAGE_SIZE)

    ids = torch.tensor(tokens)
    exact = reference_logits(config, weights, ids)
    expected = reference_logits(config, weights, ids, attend=sealed)
    found = logits_in_chunks(session, tokens, CHUNKS[2], 0)
    effect, error = ((other - expected).square().mean().sqrt() for other in (exact, found))
    assert error < effect / 10
    assert (found[:PAGE_SIZE] - exact[:PAGE_SIZE]).square().mean().sqrt() < effect / 100
    assert effect / exact.std() > 1e-2


@pytest.mark.parametrize("kv_dtype", dict(FORMATS))
@torch.inference_mode()
def test_bits_do_not_depend_on_chunks_and_pages(kv_dtype: str, checkpoint) -> None:
    options = OPTIONS | {"kv_dtype": kv_dtype}
    session = eager_session(checkpoint, BuildOptions(dtype="bfloat16", weight_dtype="int8", **options))
    whole, *others = (logits_in_chunks(session, some_tokens(), chunks, seed) for seed, chunks in enumerate(CHUNKS))
    for other in others:
        assert torch.equal(other, whole)


def generate(engine: LLMEngine, prompt: list[int], params: SamplingParams) -> list[tuple[int, dict[int, float]]]:
    """Tokens of one sequence with the log-probabilities of the most probable ones."""
    engine.add_request("alone", prompt, dataclasses.replace(params, n=1, logprobs=3, draft_token_ids=()))
    found = []
    while engine.has_unfinished():
        for output in engine.step():
            found += [(entry.token_id, entry.top) for entry in output.logprobs]
    return found


@pytest.mark.parametrize("kv_dtype", dict(FORMATS))
@pytest.mark.parametrize("draws_drafts", [False, True], ids=["plain", "drafts"])
def test_schedules_give_the_bits_of_one_at_a_time(draws_drafts: bool, kv_dtype: str, seeds: Seeds) -> None:
    """Chunks, neighbours, pages, preemptions, prefixes, and drafts of up to two pages that are right, partly right or
    wrong: tokens and their log-probabilities are those of each sequence alone, in every bit."""
    options = OPTIONS | {"dtype": "bfloat16", "max_draft_len": 48, "max_num_tokens": 128, "kv_dtype": kv_dtype}
    session = small_session(options, head_dim=32, num_layers=3)
    lonely = LLMEngine(session=session, num_pages=16, enable_prefix_cache=False)
    counts = dict.fromkeys(("preemptions", "reused_tokens", "draft_tokens", "accepted_draft_tokens"), 0)
    num_equal, schedules = 0, seeds(8, 200)
    for seed in schedules:
        rng = random.Random(seed)
        limits = {"page_sizes": (PAGE_SIZE,), "max_prompt": 70, "max_new": 100, "max_requests": 6, "sampled": False}
        plan = random_plan(seed, vocab_size=96, **limits)
        plan.max_num_tokens, plan.num_pages = rng.choice((7, 33, 64, 128)), rng.randint(6, 8)
        expected = {}
        for planned in plan.requests:
            text = expected[planned.request_id] = generate(lonely, planned.prompt, planned.params)
            planned.params = dataclasses.replace(planned.params, logprobs=3)
            if draws_drafts:
                drafts = [token for token, _ in text] + [6] * rng.randint(0, 3)
                most = min(plan.max_num_tokens, 48) - 1
                planned.params = dataclasses.replace(planned.params, draft_token_ids=drafts[: rng.randint(0, most)])
        engine = LLMEngine(
            session=session,
            num_pages=plan.num_pages,
            max_num_tokens=plan.max_num_tokens,
            max_num_seqs=plan.max_num_seqs,
            enable_prefix_cache=plan.enable_prefix_cache,
        )

        def propose(scheduler=engine.scheduler, rng=rng, expected=expected):
            for sequence in scheduler.running if draws_drafts else ():
                if sequence.num_generated > 0 and rng.random() < 0.5:
                    future = [token for token, _ in expected[sequence.request_id][sequence.num_generated :]]
                    drafts = (*future[: rng.randint(0, 40)], *[7] * rng.randint(0, 40))
                    scheduler.propose(sequence, drafts[:48])

        found: dict[tuple[str, int], list] = {}
        step = engine.step

        def recorded(step=step, found=found):
            outputs = step()
            for output in outputs:
                entries = [(entry.token_id, entry.top) for entry in output.logprobs]
                found.setdefault((output.request_id, output.index), []).extend(entries)
            return outputs

        engine.step = recorded  # type: ignore[method-assign]
        _, _, aborted = run_plan(engine, plan, after_step=propose)
        for key, got in found.items():
            text = expected[key[0]]
            assert got == text[: len(got)], (seed, key)
            assert len(got) == len(text) or key[0] in aborted, (seed, key)
            num_equal += 1
        stats = engine.stats()
        assert stats["num_used_pages"] == 0 and stats["num_failed_steps"] == 0
        assert len(engine.scheduler.exact_pages.free_pages) == engine.scheduler.exact_pages.num_pages
        for name in counts:
            counts[name] += stats[f"num_{name}"]
    print(f"\n{len(schedules)} schedules, {num_equal} sequences equal; {counts}")
    assert num_equal > 2 * len(schedules) and counts["preemptions"] and counts["reused_tokens"]
    if draws_drafts:
        assert 0 < counts["accepted_draft_tokens"] < counts["draft_tokens"]


GREEDY = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
BFLOAT16 = OPTIONS | {"dtype": "bfloat16", "max_draft_len": 48, "max_num_tokens": 128}


def sealed_bytes(engine: LLMEngine, pages: list[int]) -> list[torch.Tensor]:
    return [tensor[pages].clone() for pool in engine.runner.pools for tensor in pool[2:]]


def test_a_page_sealed_with_drafts_that_are_not_accepted_is_sealed_again() -> None:
    """Every step drafts none, one or two right tokens and 40 others, over the end of a page: what is sealed in the end
    has the bits of plain decoding, and so has every token."""
    session, prompt = small_session(BFLOAT16, head_dim=32, num_layers=3), list(range(5, 64))
    ends, texts = [], []
    for drafts in (False, True):
        engine = LLMEngine(session=session, num_pages=16)
        engine.add_request("one", prompt, GREEDY)
        text: list[int] = []
        while len(text) < GREEDY.max_tokens - 2:
            if drafts and text:
                (sequence,) = engine.scheduler.running
                right = texts[0][len(text) : len(text) + len(text) % 3]
                engine.scheduler.propose(sequence, (*right, *range(20, 60)))
            text += [token for output in engine.step() for token in output.new_token_ids]
            engine.check_invariants()
            (sequence,) = engine.scheduler.running
            num_sealed = sequence.num_computed // PAGE_SIZE
        texts.append(text)
        ends.append(sealed_bytes(engine, sequence.pages[:4]))
        assert num_sealed >= 4 and (engine.stats()["num_draft_tokens"] > 500) == drafts
        engine.abort("one")
    assert texts[1][: len(texts[0])] == texts[0][: len(texts[1])]
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_an_exit_drafts_and_ends_tokens_as_with_any_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftLength, "is_due", lambda self, num_sequences: True)
    monkeypatch.setattr(DraftLength, "choose", lambda self, num_sequences, available: dict(available))
    session = small_session(BFLOAT16, head_dim=32, num_layers=5, early_exit=True)
    prompts = [list(range(5, 64)), [9] * 33, [3, 4], list(range(5, 40))]

    def texts(**options) -> tuple[list[list[int]], LLMEngine]:
        engine = LLMEngine(session=session, num_pages=20, **options)
        engine.runner.self_draft.min_confidence = 0.0
        found: list[list[int]] = [[] for _ in prompts]
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), prompt, GREEDY)
        while engine.has_unfinished():
            for output in engine.step():
                found[int(output.request_id)] += output.new_token_ids
            engine.check_invariants()
        return found, engine

    plain, _ = texts()
    drafted, engine = texts(speculative=SpeculativeConfig("early_exit", 37))
    assert drafted == plain and engine.stats()["num_draft_tokens"] > 500
    for of_prompts in (False, True):
        options = {"early_exit_threshold": 0.5, "early_exit_prompts": of_prompts}
        (exits, engine), (alone, _) = texts(**options), texts(**options, max_num_seqs=1)
        assert exits == alone != plain and engine.stats()["num_early_exits"] > 20


def test_scores_are_the_log_probabilities_of_generation() -> None:
    """Beside a sequence that runs in the same engine, which keeps its own exact page."""
    session = small_session(BFLOAT16, head_dim=32, num_layers=3)
    prompt = list(range(5, 60))
    generated = generate(LLMEngine(session=session, num_pages=16), prompt, GREEDY)
    text, expected = [token for token, _ in generated], [top[token] for token, top in generated]
    engine = LLMEngine(session=session, num_pages=24, max_num_tokens=50)
    engine.add_request("beside", prompt[7:], GREEDY)
    for _ in range(10):
        engine.step()
    llm = LLM.__new__(LLM)
    llm.engine = engine
    found, other = score(llm, [(prompt, text), (prompt[:40], prompt[40:])])
    torch.testing.assert_close(found.logprobs, torch.tensor(expected), rtol=0, atol=SUM_OF_LOGITS)
    assert found.is_top.all()
    assert len(other.logprobs) == 15
    engine.check_invariants()
    beside = engine.scheduler.running[0]
    while engine.has_unfinished():
        engine.step()
    again = generate(LLMEngine(session=session, num_pages=16), prompt[7:], GREEDY)
    assert beside.tokens[len(prompt) - 7 : beside.length].tolist() == [token for token, _ in again]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"page_size": 16},
            "--kv-dtype kivi2, kivi3 and kivi4 have groups of 32 numbers, but --page-size is 16; give a multiple.",
        ),
        ({"kv_policy": "keydiff"}, "with --kv-dtype kivi2 what is sealed stays as it was rounded"),
        ({"kv_policy": "quest"}, "with --kv-dtype kivi2 the numbers in it have another"),
        ({"target": "cuda"}, "with target cuda no kernel seals them; build with --target cpu"),
        ({"target": "tensorrt"}, "with target tensorrt no kernel seals them; build with --target cpu"),
    ],
    ids=["pages", "eviction", "quest", "cuda", "tensorrt"],
)
def test_what_does_not_go_together_is_said_in_a_sentence(options: dict, message: str) -> None:
    with pytest.raises(BuildError) as error:
        small_session(OPTIONS | options, head_dim=32)
    assert message in str(error.value) and str(error.value).count(". ") == 0


def test_heads_that_are_no_multiple_of_a_group_are_refused() -> None:
    with pytest.raises(BuildError, match="the model's head_dim is 16; give --kv-dtype int4"):
        small_session(OPTIONS, head_dim=16)


def test_what_the_cache_takes_is_what_is_allocated() -> None:
    """Two exact pages of each sequence and those of a step's tokens are a part that does not grow."""
    session = small_session(BFLOAT16, head_dim=32, num_layers=3)
    engine = LLMEngine(session=session, num_pages=16)
    pools = [tensor for pool in engine.runner.pools for tensor in pool]
    assert engine.stats()["kv_device_bytes"] == sum(tensor.nbytes for tensor in pools)
    manifest, exact = session.manifest, 2 * session.manifest.max_num_seqs + 128 // PAGE_SIZE
    assert manifest.page_bytes == PAGE_SIZE * manifest.model.num_owners * 2 * manifest.model.num_kv_heads * 32 * 3 // 8
    assert sum(tensor.nbytes for tensor in pools) == 16 * manifest.page_bytes + exact * manifest.exact_page_bytes


def test_inspect_and_plan_count_exact_pages(tmp_path, capsys) -> None:
    """Of all sequences and a step, two of each sequence; an engine's plan takes its page size and its step's tokens."""
    manifest = dataclasses.replace(small_session(BFLOAT16, head_dim=32, num_layers=3).manifest, isa=("x86_64",))
    save_manifest(manifest, tmp_path)
    exact_page = PAGE_SIZE * manifest.model.num_owners * 2 * manifest.model.num_kv_heads * 32 * 2
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["exact_bytes"] == (2 * manifest.max_num_seqs + 128 // PAGE_SIZE) * exact_page
    sealed = 256 // PAGE_SIZE * manifest.page_bytes
    assert found["sequence_device_bytes"] == found["sequence_full_bytes"] == sealed + 2 * exact_page
    assert main(["inspect", str(tmp_path)]) == 0
    assert f"exact pages take {format_bytes(found['exact_bytes'])} more" in capsys.readouterr().out
    arguments = ["plan", "--model", str(tmp_path), "--input", "100", "--output", "50", "--json"]
    assert main(arguments) == 0
    plan = json.loads(capsys.readouterr().out)
    (row,) = (
        row for row in plan["variants"] if row["num_owners"] == manifest.model.num_owners and row["name"] != "no cut"
    )
    assert row["kv_exact_bytes_per_request"] == 2 * exact_page
    assert row["kv_exact_bytes_per_step"] == 128 // PAGE_SIZE * exact_page
    assert "kv_policy" not in plan
    assert main([*arguments, "--kv-dtype", "bfloat16", "--kv-policy", "full"]) == 0
    plan = json.loads(capsys.readouterr().out)
    for row, of_policy in zip(plan["variants"], plan["kv_policy"]["variants"], strict=True):
        assert row["kv_exact_bytes_per_request"] == row["kv_exact_bytes_per_step"] == 0
        assert of_policy["device_bytes"] == 128 * row["kv_bytes_per_token"]
