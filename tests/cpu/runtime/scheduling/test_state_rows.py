"""States of linear attention, on a session that says of which tokens each is: no schedule gives one to others."""

import dataclasses
import random
from collections import Counter

import pytest

from kvforge.common.errors import EngineError
from kvforge.manifest import load_manifest, save_manifest
from kvforge.runtime import LLM, LLMEngine, SamplingParams
from kvforge.runtime.config import resolve_config
from kvforge.runtime.prefixes.options import PrefixOptions
from kvforge.runtime.scoring.score import score
from kvforge.runtime.sessions.pools import allocate_pools, device_bytes
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.speculation.draft_model import DraftModel, make_drafter
from tests.cpu.gateway.engine_files import write_engine_files
from tests.support.schedules.drafters import AdversarialDrafter, RandomLengths
from tests.support.schedules.engine_schedules import alone, check_tokens, random_plan, run_plan
from tests.support.sessions.fake import FakeSession, changed
from tests.support.sessions.fake_states import STATES, StatefulSession

MEMORY = 1
LARGE = dataclasses.replace(STATES, value_dim=300)
"""A state of 2408 bytes."""
PROMPT = [3 + index % 60 for index in range(31)]
"""Seven whole pages of 4 tokens; those of 3, 6 and 7 pages have snapshots."""

pytestmark = pytest.mark.usefixtures("one_thread")


def drafting_engine(drafts, plan, rng, **snapshots):
    longest = 0 if drafts == "none" else rng.choice([1, 3, 7])
    ngram = SpeculativeConfig("ngram", longest, prompt_lookup_min=1) if longest else None
    suffix = SpeculativeConfig("suffix", longest, suffix_sharing="all") if drafts == "suffix" else None
    session = StatefulSession(page_size=plan.page_size, memory=MEMORY, max_draft_len=longest)
    limits = plan.limits | plan.prefixes(**snapshots)
    engine = LLMEngine(session=session, **limits, speculative=suffix or ngram)
    if drafts == "adversary":
        engine.drafting.drafter = AdversarialDrafter(rng, alone(plan.seed, MEMORY))
    if drafts == "draft_model":
        model = FakeSession(memory=MEMORY)
        engine.drafting.drafter = DraftModel(model, resolve_config(model.manifest, 0, num_pages=64, max_seq_len=64))
    if longest:
        engine.drafting._lengths = RandomLengths(rng, longest)
    return engine, session


@pytest.mark.parametrize("drafts", ["none", "ngram", "suffix", "draft_model", "adversary"])
def test_tokens_equal_one_at_a_time(drafts, seeds):
    """In small pools, chunks and batches, with few snapshots and many, preempted and aborted."""
    counts = Counter()
    for seed in (schedules := seeds(32, 200)):
        plan, rng = random_plan(seed), random.Random(seed)
        every, count = rng.choice([0, 1, 1, 2, 5]), rng.choice([1, 2, 4, 100])
        snapshots = {"snapshot_every": every} | ({"num_snapshots": count} if every else {})
        engine, session = drafting_engine(drafts, plan, rng, **snapshots)
        rows = engine.scheduler.state_rows
        rng.shuffle(rows.free_rows)

        def poison(session=session, engine=engine, rows=rows):
            session.poison_pages(engine.scheduler.pool.free_pages)
            session.rows[[*rows.free_rows, *rows.free_snapshots]] = -7

        tokens, reasons, aborted = run_plan(engine, plan, poison)
        stats = engine.stats()
        assert stats["num_failed_steps"] == stats["num_used_pages"] == stats["num_used_state_rows"] == 0, seed
        check_tokens(tokens, reasons, aborted, alone(seed, MEMORY), seed)
        assert not rows.read and len(rows.free_snapshots) + len(rows.snapshots) == rows.num_snapshots
        assert engine.config.enable_prefix_cache or stats["num_reused_tokens"] == stats["num_snapshots"] == 0
        counts.update(
            preemptions=stats["num_preemptions"],
            reused=stats["num_reused_tokens"] // plan.page_size,
            aborted=len(aborted),
            more_rows=session.counts["more_rows"],
            full=rows.num_snapshots > 0 and not rows.free_snapshots,
        )
        if drafts != "none":
            accepted = stats["num_accepted_draft_tokens"]
            counts.update(accepted=accepted, rejected=stats["num_draft_tokens"] - accepted)
    assert min(counts.values()) > len(schedules) // 20, counts


def engine_of(**limits):
    return LLMEngine(session=StatefulSession(), **{"num_pages": 64, "snapshot_every": 3, "num_snapshots": 8, **limits})


def reused(engine, prompt, num_tokens=1, **params):
    """Generate, and return how many tokens of the prompt were not computed, and the answer."""
    before, tokens = engine.scheduler.admissions.num_reused_tokens, []
    engine.add_request("one", prompt, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, **params))
    while engine.has_unfinished():
        for output in engine.step():
            tokens += output.new_token_ids
        engine.check_invariants()
    assert engine.stats()["num_failed_steps"] == 0
    return engine.scheduler.admissions.num_reused_tokens - before, tokens


@pytest.mark.parametrize("chunk", [1, 4, 5, 64])
def test_a_prefix_reaches_to_a_snapshot(chunk):
    engine = engine_of(max_num_tokens=chunk, max_num_seqs=1)
    assert reused(engine, PROMPT)[0] == 0 and engine.stats()["num_held_snapshots"] == 3
    assert reused(engine, PROMPT)[0] == 28, "the last page of a prompt"
    assert reused(engine, PROMPT[:27] + [9] * 9)[0] == 24, "six pages"
    assert reused(engine, [*PROMPT[:23], 9])[0] == 12, "three pages of five that are cached"
    assert reused(engine, [*PROMPT[:11], 9])[0] == 0


@pytest.mark.parametrize("drafts", [0, 1, 2, 3, 7])
def test_an_answer_is_gone_on_from(drafts):
    """Every third page of what is generated has a snapshot too, also where a draft is its last token."""
    plan = dataclasses.replace(random_plan(0), page_size=4, num_pages=64, max_num_tokens=64, enable_prefix_cache=True)
    rng = random.Random(drafts)
    rng.choice = lambda _: drafts
    engine, _ = drafting_engine("ngram" if drafts else "none", plan, rng, snapshot_every=3, num_snapshots=20)
    answer = reused(engine, PROMPT, 60)[1]
    assert (engine.stats()["num_accepted_draft_tokens"] > 10) == bool(drafts)
    for num_pages in (9, 12, 15, 18, 21):
        assert reused(engine, [*[*PROMPT, *answer][: 4 * num_pages], 9])[0] == 4 * num_pages


def test_snapshots_go_alone_or_with_their_pages():
    engine = engine_of(num_snapshots=3)
    reused(engine, PROMPT)
    pages = len(engine.scheduler.prefix_cache)
    reused(engine, PROMPT)
    reused(engine, [5] * 9)  # of two pages, the second has one
    assert len(engine.scheduler.prefix_cache) == pages + 2 and engine.stats()["num_held_snapshots"] == 3
    assert reused(engine, PROMPT[:13])[0] == 0, "the snapshot of three pages has gone"
    assert reused(engine, PROMPT)[0] == 28
    engine = engine_of(num_pages=10)
    reused(engine, PROMPT)
    reused(engine, [5] * 36)  # ten pages, of which the third, sixth, eighth and ninth have one
    assert engine.stats()["num_held_snapshots"] == 4
    assert reused(engine, PROMPT)[0] == 0


def test_without_snapshots_nothing_is_reused(caplog):
    assert reused(engine_of(), PROMPT, 3, n=3)[0] == 2 * 28
    for off in ({"snapshot_every": 0}, {"enable_prefix_cache": False}):
        engine = LLMEngine(session=StatefulSession(), num_pages=64, **off)
        assert not engine.config.enable_prefix_cache and engine.config.num_snapshots == 0
        assert reused(engine, PROMPT, 3, n=3)[0] == reused(engine, PROMPT)[0] == 0 and not caplog.messages
    for given in ({}, {"snapshot_every": 2}):
        caplog.clear()
        engine = LLMEngine(session=StatefulSession(linear=LARGE), num_pages=32, **given)
        assert engine.config.num_snapshots == 0 and "no prefix is reused, as the cache has no room" in caplog.text


def test_a_failing_step_gives_its_rows_back():
    engine = engine_of(snapshot_every=1, max_num_tokens=6)
    engine.runner._session.fail_on = lambda session: session.num_lower_calls == 3
    engine.add_request("one", PROMPT, SamplingParams(max_tokens=4))
    while engine.has_unfinished():
        engine.step()
        engine.check_invariants()
    assert engine.stats()["num_failed_steps"] == 1 and engine.stats()["num_used_state_rows"] == 0


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_scored_sequences_go_on_from_snapshots(chunk):
    """Contexts that begin alike, beside each other and after."""
    session = StatefulSession()
    llm = LLM(session=session, num_pages=64, snapshot_every=2, num_snapshots=8, max_num_tokens=chunk, max_num_seqs=3)
    requests, calls, found = [(PROMPT[:size], [5, 6, 7]) for size in (1, 9, 20, 30, 31)], [0], []
    for _ in range(2):
        found.append([one.logprobs.tolist() for one in score(llm, requests)])
        calls.append(session.num_lower_calls)
        llm.engine.check_invariants()
        assert llm.engine.stats()["num_used_state_rows"] == 0 < llm.engine.stats()["num_held_snapshots"]
    assert found[0] == found[1] and (calls[2] < 2 * calls[1] or chunk == 64)


def test_what_does_not_keep_states_is_refused(tmp_path):
    session = StatefulSession()
    with pytest.raises(EngineError, match="num_snapshots is for kvforge's own engines"):
        PrefixOptions(num_snapshots=4).check(changed(session.manifest, target="vllm"))
    with pytest.raises(EngineError, match="prefix_dir keeps K and V, and prompts of a model with linear attention"):
        LLMEngine(session=session, num_pages=8, prefix_dir=tmp_path)
    folder = write_engine_files(tmp_path / "draft")
    states = {"linear": STATES, "num_layers": 3, "cut": 3, "early_exit": False}
    save_manifest(changed(load_manifest(folder), **states), folder)
    config = SpeculativeConfig("draft_model", 2, draft_engine=folder)
    with pytest.raises(EngineError, match="the draft engine's model has linear attention"):
        make_drafter(config, load_manifest(folder), resolve_config(session.manifest, 0))


def test_memory_is_divided():
    """A state is of 24 bytes in one layer; a page of 4 tokens of 2 owners of 2 x 2 numbers is of 128."""
    session = StatefulSession(max_draft_len=2)
    manifest = session.manifest
    config = resolve_config(manifest, 0)
    assert (config.max_num_seqs, config.num_state_rows, config.snapshot_every) == (8, 24, 1)
    assert config.num_snapshots == 8 * (1 + 32), "one for each page that there can be"
    for num_bytes in (5000, 6000, 9000, 38000):
        config = resolve_config(manifest, 0, kv_cache_gib=num_bytes / 2**30)
        pools = allocate_pools(manifest, config.num_pages, num_rows=config.num_state_rows + config.num_snapshots)
        assert len(pools) == 3 and num_bytes - 128 < device_bytes(manifest, pools) <= num_bytes
        assert config.num_pages >= 32 and config.num_state_rows == 3 * config.max_num_seqs
        assert config.enable_prefix_cache == (config.num_snapshots > 0)
        engine = LLMEngine(session=session, kv_cache_gib=num_bytes / 2**30)
        assert engine.stats()["kv_device_bytes"] == device_bytes(manifest, pools)
    with pytest.raises(EngineError, match="num_snapshots is 100, but beside one sequence the KV cache holds 55"):
        resolve_config(manifest, 0, kv_cache_gib=6000 / 2**30, num_snapshots=100)
    large = StatefulSession(linear=LARGE).manifest
    assert resolve_config(large, 40000).max_num_seqs == 6, "half of 0.8 of the memory"
    assert resolve_config(large, 50000).max_num_seqs == 8, "more than a quarter, for states"
    config = resolve_config(large, 0, kv_cache_gib=20000 / 2**30)
    assert (config.max_num_seqs, config.num_snapshots, config.snapshot_every) == (4, 0, 0)
    with pytest.raises(EngineError, match="holds 16 tokens, but one sequence of 128 tokens needs"):
        resolve_config(large, 0, kv_cache_gib=3000 / 2**30)


@pytest.mark.parametrize(
    ("session", "given", "said"),
    [
        (StatefulSession, {"snapshot_every": -1}, "snapshot_every is -1; give 0 or more"),
        (
            StatefulSession,
            {"num_snapshots": 0},
            "num_snapshots is 0; give 1 or more, or --snapshot-every 0 to keep none",
        ),
        (StatefulSession, {"num_snapshots": 5, "snapshot_every": 0}, "num_snapshots is 5, but snapshot_every 0 keeps"),
        (
            StatefulSession,
            {"num_snapshots": 5, "enable_prefix_cache": False},
            "num_snapshots is of .*--no-prefix-cache",
        ),
        (StatefulSession, {"snapshot_every": 5, "enable_prefix_cache": False}, "snapshot_every is of .* leave one"),
        (StatefulSession, {"num_snapshots": 10**12}, "the KV cache of .* is more than .* lower num_pages or num_snap"),
        (FakeSession, {"snapshot_every": 4}, "snapshot_every is for models with layers that keep a state"),
    ],
)
def test_wrong_numbers_are_refused(session, given, said):
    with pytest.raises(EngineError, match=said):
        LLMEngine(session=session(), num_pages=8, **given)
