"""KVzip: what a model is asked, where its repetition is computed, and what others notice of it."""

import dataclasses
import random

import pytest

from kvforge.common.errors import BuildError
from kvforge.kv_policies import parse
from kvforge.kv_policies.eviction.rules.kvzip import KVzip
from kvforge.manifest.check import is_possible
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.cache_capacity import cache_shape
from kvforge.runtime.sessions.pools import device_bytes
from tests.support.models.small_models import small_session

pytestmark = pytest.mark.usefixtures("one_thread")
PLAIN = {"head_dim": 10, "cut": 3, "num_layers": 3}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def kvzip(text: str) -> KVzip:
    policy = parse(text)
    assert isinstance(policy, KVzip)
    return policy


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 96) for _ in range(length)]


def texts_of(engine: LLMEngine, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, GREEDY)
    texts: dict[str, list[int]] = {name: [] for name in prompts}
    while engine.has_unfinished():
        for output in engine.step():
            texts[output.request_id] += output.new_token_ids
        engine.check_invariants()
    return texts


def test_the_prompt_is_asked_for_part_by_part() -> None:
    policy, tokens, texts = kvzip("kvzip:budget=8,chunk=10"), list(range(100, 125)), ((1, 2), (3,), (4, 5))
    assert [policy.probing.num_probes(length) for length in (8, 9, 10, 11, 25)] == [0, 1, 1, 2, 3]
    parts = [policy.probing.tokens(tokens, texts, index) for index in range(3)]
    assert parts[0] == [1, 2, *range(100, 110)]
    assert parts[1] == [3, *range(102, 110), 4, 5, *range(110, 120)]
    assert parts[2] == [3, *range(112, 120), 4, 5, *range(120, 125)]
    many = tuple((7,) * 1000 for _ in texts)  # of no tokenizer
    most = 16 * policy.probing.num_scratch_pages(16)
    assert all(len(policy.probing.tokens(tokens, many, index)) <= most for index in range(3))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kvzip:chunk=0", "kvzip: chunk is 0; give at least 1"),
        ("kvzip:budget=4,sinks=5", "an eviction leaves 4 tokens, but 5 are protected"),
        ("kvzip:ceiling_percent=99", "kvzip: ceiling_percent is 99; give at least 100"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(BuildError, match=words):
        parse(text)


def test_a_manifest_has_the_texts_that_its_policy_asks_for() -> None:
    manifest = small_session({"kv_policy": "kvzip:budget=8"}, **PLAIN).manifest
    manifest = dataclasses.replace(manifest, isa=("x86_64",))
    assert is_possible(manifest)
    assert not is_possible(dataclasses.replace(manifest, policy_texts=manifest.policy_texts[:2]))
    assert not is_possible(dataclasses.replace(manifest, policy_texts=((96,), (), ())))


def test_memory_for_what_nobody_keeps_is_counted() -> None:
    """Once for all sequences, beside the pages that they have."""
    session = small_session({"kv_policy": "kvzip:budget=8,chunk=20"}, **PLAIN)
    engine = LLMEngine(session=session, num_pages=11)
    scratch = engine.scheduler.policy.probing.num_scratch_pages(4)
    assert scratch * 4 >= 20 + len("\n\nRepeat the previous context exactly.\n")
    assert len(engine.runner.pools[0][0]) == session.manifest.model.num_owners * (11 + scratch)
    assert engine.stats()["num_pages"] == 11
    assert engine.stats()["kv_device_bytes"] == device_bytes(session.manifest, engine.runner.pools)
    cache, policy = session.manifest.owner_cache, engine.scheduler.policy
    more = policy.prefill_bytes(cache, 50) - parse("adakv:budget=8,window=4").prefill_bytes(cache, 50)
    pool_bytes = sum(tensor[:scratch].nbytes for tensor in engine.runner.pools[0][:4])
    assert more == pool_bytes
    shape = cache_shape(session.manifest, 4, 100)
    for num_bytes in (shape.least_bytes, shape.least_bytes + 9000):
        pages, state_pages = shape.divide(num_bytes)
        assert pages >= shape.pages and shape.device_bytes(pages, state_pages) <= num_bytes


def test_others_decode_while_a_prompt_is_repeated() -> None:
    """One part a step, of the first who waits."""
    session = small_session({"kv_policy": "kvzip:budget=8,chunk=10"}, **PLAIN)
    prompts = {"short": prompt_of(6), "long": prompt_of(45, 1), "other": prompt_of(30, 2)}
    alone = {name: texts_of(LLMEngine(session=session, num_pages=40), {name: prompts[name]})[name] for name in prompts}
    engine = LLMEngine(session=session, num_pages=60)
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, GREEDY)
    texts: dict[str, list[int]] = {name: [] for name in prompts}
    waited = 0
    while engine.has_unfinished():
        due = [sequence for sequence in engine.scheduler.running if sequence.is_due]
        before = {sequence.request_id: sequence.num_computed for sequence in due}
        outputs = engine.step()
        for output in outputs:
            texts[output.request_id] += output.new_token_ids
        if any(sequence.is_due for sequence in due):
            waited += 1
            assert "short" in {output.request_id for output in outputs}
            assert all(s.num_computed == before[s.request_id] for s in due if s.is_due)
        engine.check_invariants()
    assert texts == alone and waited == 5 + 3
    assert engine.stats()["num_evictions"] == 2


def test_a_repetition_that_fails_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    session = small_session({"kv_policy": "kvzip:budget=8,chunk=10"}, **PLAIN)
    engine = LLMEngine(session=session, num_pages=40)
    probe = engine.runner._probe

    def fail(sequence, index) -> None:
        if sequence.request_id == "bad" and index == 1:
            raise RuntimeError("no more")
        probe(sequence, index)

    monkeypatch.setattr(engine.runner, "_probe", fail)
    engine.add_request("bad", prompt_of(30), GREEDY)
    reasons = {}
    while engine.has_unfinished():
        reasons |= {output.request_id: output.stop_reason for output in engine.step() if output.finished}
        engine.check_invariants()
    assert reasons == {"bad": "RuntimeError: no more"}
    assert len(texts_of(engine, {"good": prompt_of(30)})["good"]) == 12


def test_a_repeated_prompt_takes_over_its_prefix() -> None:
    session = small_session({"kv_policy": "kvzip:budget=8,chunk=10"}, **PLAIN)
    engine = LLMEngine(session=session, num_pages=60)
    first = texts_of(engine, {"first": prompt_of(40)})["first"]
    assert texts_of(engine, {"again": prompt_of(40)})["again"] == first
    assert engine.stats()["num_reused_tokens"] >= 36


@pytest.mark.parametrize("shape", [PLAIN, {"head_dim": 10, "cut": 1}], ids=["plain", "swiftkv"])
def test_a_repetition_may_end_beyond_the_longest_sequence(shape) -> None:
    """Its positions and pages follow the prompt's, whatever an engine's and a model's limits are."""
    texts = []
    for options, changes in (({"max_seq_len": 54}, {"max_position": 54}), ({}, {})):
        session = small_session({"kv_policy": "kvzip:budget=8,chunk=40"} | options, **shape | changes)
        texts.append(texts_of(LLMEngine(session=session, num_pages=14), {"longest": prompt_of(42)}))
    assert texts[0] == texts[1] and len(texts[0]["longest"]) == 12
