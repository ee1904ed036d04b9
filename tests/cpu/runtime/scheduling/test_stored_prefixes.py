"""Prefixes in files below a tiny pool: tokens are those without them, and no page is lost, whatever the disk does."""

import random
import tempfile
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from kvforge.common.errors import EngineError
from kvforge.prefix_store.folder import EngineFolder
from kvforge.prefix_store.identity import engine_key
from kvforge.prefix_store.page_file import HEADER
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.prefixes import tier as tier_module
from kvforge.runtime.prefixes.device_page_memory import DevicePageMemory
from kvforge.runtime.prefixes.page_memory import PageMemory, _runs, page_rows
from kvforge.runtime.prefixes.rates import TRY_AGAIN, Rates
from kvforge.runtime.sessions.pools import allocate_pools
from tests.support.random_cases import Seeds
from tests.support.schedules.engine_schedules import check_tokens, random_plan, run_on_fake_session, run_plan
from tests.support.sessions.fake import FakeSession, fake_manifest

PROMPT = list(range(3, 43))
MEETS_ALL = 12
"""A schedule that stores and reads pages and is preempted."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


def damage(folder: Path, rng: random.Random) -> None:
    """Do to some files what disks and people do."""
    for path in sorted(folder.glob("*/*.page")):
        kind = rng.choice((*["keep"] * 27, "cut", "flip", "remove"))
        data = bytearray(path.read_bytes())
        if kind == "cut":
            path.write_bytes(data[: rng.randrange(len(data))])
        elif kind == "flip":
            data[rng.randrange(len(data))] ^= 16
            path.write_bytes(data)
        elif kind == "remove":
            path.unlink()


@pytest.mark.parametrize("block", range(4))
def test_random_schedules_with_a_small_disk_that_fails(
    block: int, tmp_path: Path, seeds: Seeds, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """Two engines, one after another, on one folder; requests are preempted, aborted, and read while others run."""
    write, read = EngineFolder.write, EngineFolder.read
    counts = dict.fromkeys(("num_stored_reused_tokens", "prefix_written_bytes", "num_preemptions"), 0)
    num_aborted = 0
    monkeypatch.setattr(Rates, "reading_is_cheaper", lambda _: True)
    for seed in (MEETS_ALL, *seeds(32, 1000)[block::4]):
        plan, rng = random_plan(seed), random.Random(seed)
        plan.enable_prefix_cache = True
        failing = rng.choice((0.0, 0.0, 0.1))

        def some(function, rng=rng, failing=failing):
            return lambda *args: rng.random() >= failing and function(*args)

        monkeypatch.setattr(EngineFolder, "write", some(write))
        monkeypatch.setattr(EngineFolder, "read", some(read))
        where = Path(tempfile.mkdtemp(dir=tmp_path))
        limit = (HEADER.size + plan.page_size * 32) * rng.choice((2, 12, 300, 300)) / 2**30
        _, _, tokens, reasons, _ = run_on_fake_session(plan)
        expected = {key: (tokens[key], reason) for key, reason in reasons.items()}
        for _ in range(2):
            _, engine, *found = run_on_fake_session(plan, prefix_dir=where, prefix_gib=limit)
            check_tokens(*found, expected, seed)
            stats = engine.stats()
            assert stats["num_used_pages"] == 0 == stats["num_failed_steps"], seed
            assert stats["num_free_pages"] == plan.num_pages and not engine.scheduler.fetches.by_sequence, seed
            counts = {name: count + stats[name] for name, count in counts.items()}
            num_aborted += len(found[2])
            engine.close()
            damage(where, rng)
    assert counts["num_stored_reused_tokens"] > 0 and counts["prefix_written_bytes"] > 2_000
    assert counts["num_preemptions"] + num_aborted > 3


@pytest.mark.parametrize("block", range(2))
def test_random_schedules_with_a_small_tier_in_main_memory(
    block: int, tmp_path: Path, seeds: Seeds, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """Of an engine whose pools would lie on a GPU, with and without a disk below."""
    counts = dict.fromkeys(("num_stored_reused_tokens", "prefix_written_bytes"), 0)
    monkeypatch.setattr(Rates, "reading_is_cheaper", lambda _: True)
    for seed in seeds(16, 400)[block::2]:
        plan, rng = random_plan(seed), random.Random(seed)
        plan.enable_prefix_cache = True
        gib = plan.page_size * 32 * rng.choice((2, 12, 300)) / 2**30
        below = {"prefix_dir": tmp_path / str(seed), "prefix_gib": 1.0} if seed % 3 == 0 else {}
        _, _, tokens, reasons, _ = run_on_fake_session(plan)
        expected = {key: (tokens[key], reason) for key, reason in reasons.items()}
        session, engine, *found = run_on_fake_session(
            plan, partial(FakeSession, target="cuda"), prefix_host_gib=gib, **below
        )
        check_tokens(*found, expected, seed)
        pool = engine.scheduler.pool
        for page in [pool.allocate() for _ in range(pool.num_available)]:  # forget all prefixes
            pool.release(page, keep=False)
        again = run_plan(engine, plan, after_step=lambda s=session, p=pool: s.poison_pages(p.free_pages))
        check_tokens(*again, expected, seed)
        stats = engine.stats()
        assert stats["num_used_pages"] == 0 == stats["num_failed_steps"], seed
        assert stats["num_free_pages"] == plan.num_pages and not engine.scheduler.fetches.by_sequence, seed
        counts = {name: count + stats[name] for name, count in counts.items()}
        engine.close()
    assert counts["num_stored_reused_tokens"] > 0 and counts["prefix_written_bytes"] > 2_000


def engine_in(folder: Path, **options) -> LLMEngine:
    return LLMEngine(session=FakeSession(), num_pages=32, prefix_dir=folder, **options)


def generate(engine: LLMEngine, prompt: list[int] = PROMPT) -> list[int]:
    engine.add_request("a", prompt, GREEDY)
    tokens: list[int] = []
    while engine.has_unfinished():
        tokens += [token for output in engine.step() for token in output.new_token_ids]
        engine.check_invariants()
    return tokens


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Each page is read once it is allowed to."""
    allowed, read = threading.Semaphore(0), EngineFolder.read
    monkeypatch.setattr(EngineFolder, "read", lambda *args: allowed.acquire() and read(*args))
    return allowed


def kept(folder: Path) -> list[int]:
    """Keep ``PROMPT``; returns what follows it."""
    engine = engine_in(folder)
    tokens = generate(engine)
    engine.close()
    return tokens


def test_others_run_while_pages_are_read_and_what_is_read_is_computed_nowhere(
    tmp_path: Path, slow_disk: threading.Semaphore
) -> None:
    expected, engine = kept(tmp_path), engine_in(tmp_path)
    for name in "ab":  # the second one waits for the pages of the first
        engine.add_request(name, PROMPT, GREEDY)
    engine.step()
    assert engine.scheduler.fetches.is_waiting and not engine.scheduler.running
    engine.add_request("c", [9, 8, 7], GREEDY)
    found: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.new_token_ids)
        engine.check_invariants()
        if len(found.get("c", ())) == 3:
            slow_disk.release(20)
    assert list(found) == ["c", "a", "b"] and found["a"] == found["b"] == expected
    assert engine.stats()["num_stored_reused_tokens"] == 36 and engine.stats()["num_reused_tokens"] == 72


def test_two_servers_share_a_folder_that_is_too_small_for_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rates, "reading_is_cheaper", lambda _: True)
    rng, plain, limit = random.Random(0), LLMEngine(session=FakeSession(), num_pages=32), 30 * (HEADER.size + 128)
    prompts = [[rng.randrange(3, 64) for _ in range(rng.randint(20, 60))] for _ in range(3)]
    expected = [generate(plain, prompt) for prompt in prompts]
    engines = [
        LLMEngine(session=FakeSession(), num_pages=18, prefix_dir=tmp_path, prefix_gib=limit / 2**30) for _ in "ab"
    ]
    for _ in range(40):
        engine, which = rng.choice(engines), rng.randrange(3)
        assert engine.prefixes is not None
        engine.prefixes._store._no_scan_before = 0.0
        assert generate(engine, prompts[which]) == expected[which]
        assert engine.prefixes.flush(10)
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*.page")) <= limit + limit // 16
    assert min(engine.stats()["num_stored_reused_tokens"] for engine in engines) > 50


def test_pages_are_read_while_another_prompt_takes_all_tokens_of_a_step(tmp_path: Path) -> None:
    expected, engine = kept(tmp_path), engine_in(tmp_path, max_num_tokens=4)
    engine.add_request("long", [9] * 60, GREEDY)
    engine.add_request("kept", PROMPT, GREEDY)
    engine.step()
    engine.step()
    assert [fetch.num_known for fetch in engine.scheduler.fetches.by_sequence.values()] == [0]
    found = []
    while engine.has_unfinished():
        found += [token for output in engine.step() for token in output.new_token_ids if output.request_id == "kept"]
        engine.check_invariants()
    assert found == expected and engine.stats()["num_stored_reused_tokens"] == 36


def test_a_request_that_is_aborted_while_it_is_read_leaves_nothing(
    tmp_path: Path, slow_disk: threading.Semaphore
) -> None:
    kept(tmp_path)
    engine = engine_in(tmp_path)
    engine.add_request("a", PROMPT, GREEDY)
    engine.step()
    slow_disk.release(2)
    assert engine.scheduler.pool.num_used == 9 and engine.abort("a")
    engine.check_invariants()
    assert engine.scheduler.pool.num_used == 0 and not engine.has_unfinished()


def test_a_disk_that_hangs_is_waited_for_once(tmp_path: Path, slow_disk, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, engine = kept(tmp_path), engine_in(tmp_path)
    monkeypatch.setattr(tier_module, "STALL_S", 0.05)
    assert [generate(engine), generate(engine, PROMPT[:20] + PROMPT)[:0]] == [expected, []]
    assert engine.stats()["num_stored_reused_tokens"] == 0
    slow_disk.release(20)


def test_an_engine_that_was_closed_computes_by_itself_and_close_writes_what_is_left(tmp_path: Path) -> None:
    expected, engine = kept(tmp_path), engine_in(tmp_path)
    engine.close()
    engine.close()
    assert generate(engine) == expected and engine.stats()["prefix_read_bytes"] == 0
    assert len(list(tmp_path.glob("*/*.page"))) == (len(PROMPT) + 2) // 4


def test_retention_is_kept_with_the_page_and_forgotten_pages_are_not_written(tmp_path: Path) -> None:
    engine = engine_in(tmp_path)
    engine.add_request("a", PROMPT[:9], SamplingParams(max_tokens=1, retention=((0, 4, 90), (4, -1, 10))))
    engine.step()
    assert engine.prefixes is not None and engine.prefixes.flush(10)
    assert sorted(path.name[-8:-5] for path in tmp_path.glob("*/*.page")) == ["010", "090"]
    cache, pages = engine.scheduler.prefix_cache, engine.scheduler.pool.cached_pages
    cache.on_publish(b"x" * 16, next(iter(pages)))  # type: ignore[misc]  # no page has this digest
    assert engine.prefixes.flush(10) and len(list(tmp_path.glob("*/*.page"))) == 2


def test_a_page_that_is_given_up_while_it_is_copied_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, copy = engine_in(tmp_path), PageMemory.copy

    def overtaken(memory: PageMemory, page: int, content: memoryview) -> None:
        copy(memory, page, content)
        if page == engine.scheduler.prefix_cache.page_named(digests[1]):
            engine.scheduler.prefix_cache._epochs[page] += 1

    monkeypatch.setattr(PageMemory, "copy", overtaken)
    engine.add_request("a", PROMPT[:13], SamplingParams(max_tokens=2, ignore_eos=True))
    digests = engine.requests["a"].sequences[0].digests
    engine.step()
    assert engine.prefixes is not None and engine.prefixes.flush(10)
    assert {path.name[:32] for path in tmp_path.glob("*/*.page")} == {digests[0].hex(), digests[2].hex()}


def test_reading_is_declined_where_computing_is_cheaper_and_tried_again() -> None:
    rates = Rates()
    assert rates.reading_is_cheaper()
    rates.read(10, 1.0)
    rates.computed(10, 2.0)
    assert rates.reading_is_cheaper()
    for _ in range(20):
        rates.computed(10, 0.5)
    assert [rates.reading_is_cheaper() for _ in range(TRY_AGAIN)].count(True) == 1


@pytest.mark.parametrize(
    ("options", "changes", "words"),
    [
        ({"prefix_gib": 1.0, "prefix_dir": None}, {}, "give --prefix-dir too"),
        ({"prefix_gib": 0.0}, {}, "above 0"),
        ({"prefix_gib": 1e-9}, {}, "less than one page"),
        ({"enable_prefix_cache": False}, {}, "--no-prefix-cache"),
        ({}, {"target": "vllm"}, "target vllm"),
        ({"prefix_host_gib": 1.0, "prefix_dir": None}, {}, "give --kv-cache-gib more"),
        ({"prefix_host_gib": -1.0, "prefix_dir": None}, {"target": "cuda"}, "above 0"),
        ({"prefix_host_gib": 1e-9, "prefix_dir": None}, {"target": "cuda"}, "less than one page"),
        ({"prefix_host_gib": 1.0, "prefix_dir": None, "enable_prefix_cache": False}, {"target": "cuda"}, "reuses none"),
    ],
)
def test_what_cannot_be_kept_is_refused(tmp_path: Path, options, changes, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        LLMEngine(session=FakeSession(**changes), num_pages=40, **{"prefix_dir": tmp_path / "new", **options})


POLICIES = (
    {"kv_dtype": "float32"}, {"kv_dtype": "int8"}, {"kv_dtype": "int4"}, {"kv_dtype": "kivi2", "page_size": 32},
    {"kv_policy": "adakv"}, {"kv_policy": "snapkv"},
)  # fmt: skip


@pytest.mark.parametrize("kind", [PageMemory, DevicePageMemory])
@pytest.mark.parametrize("changes", POLICIES, ids=str)
def test_a_page_is_all_that_a_prefix_consists_of(changes, kind: type[PageMemory | DevicePageMemory]) -> None:
    """Filling pages with others' content changes these pages, whole, and nothing else."""
    manifest = fake_manifest(**{"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "page_size": 16, **changes})
    pools = allocate_pools(manifest, 6)
    memory = kind(manifest, pools)
    assert memory.page_bytes == manifest.page_bytes
    generator = torch.Generator().manual_seed(0)
    for pool in pools:
        for tensor in pool:
            data = tensor.view(torch.uint8)
            data.copy_(torch.randint(256, data.shape, dtype=torch.uint8, generator=generator))

    def contents() -> list[bytes]:
        found = [memoryview(bytearray(memory.page_bytes)) for _ in range(6)]
        for page, content in enumerate(found):
            memory.copy(page, content)
        return list(map(bytes, found))

    before = contents()
    assert before == [b"".join(row[page].numpy().tobytes() for row in page_rows(manifest, pools)) for page in range(6)]
    memory.fill(2, memoryview(before[4]))
    assert contents() == [*before[:2], before[4], *before[3:]] and len(set(before)) == 6


def test_pieces_make_a_run_where_both_memory_and_content_have_one_distance() -> None:
    """Small pools of other widths are as far apart in memory, whose places are rounded up."""
    shapes = [(1, width) for width in (8, 100, 8, 200, 8)]
    runs = _runs(shapes, [(256 * index, start) for index, start in enumerate((0, 8, 108, 116, 316))])
    assert [list(run) for run in runs] == [[0, 2], [4], [1], [3]]
    even = [(16, 8)] * 6
    assert _runs(even, [(128 * index, 8 * index) for index in range(6)]) == [range(6)]


def test_the_key_covers_what_k_and_v_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"rank0/weights.safetensors": "1"}
    key = engine_key(fake_manifest(files={**weights, "rank0/lower.pt2": "2"}))
    assert key == engine_key(fake_manifest(files=weights, max_num_seqs=3, max_num_tokens=9, eos_token_ids=()))
    others = ({"files": {}}, {"cut": 2}, {"group_size": 2}, {"kv_dtype": "int8"}, {"page_size": 8},
              {"kv_policy": "snapkv"}, {"kvforge_version": "1"}, {"torch_version": "1"}, {"isa": ("x",)})  # fmt: skip
    assert len({key, *(engine_key(fake_manifest(**{"files": weights, **other})) for other in others)}) == 10
    monkeypatch.setenv("KVFORGE_CPU_ISA", "portable")
    assert engine_key(fake_manifest(files=weights)) != key
