"""Floors against numbers computed by hand for a tiny shape."""

import dataclasses
import os

import numpy as np
import pytest

from kvforge.common.errors import KvforgeError
from kvforge.runtime.engine import LLMEngine
from model_defs import load_config
from model_defs.experts import Experts
from perf.engine.floors import Rates, Work, best_rates, decode_work, measure_rates, prefill_work
from perf.engine.phases import run_phases
from perf.harness.machine import third_level_bytes
from perf.harness.published_shapes import PUBLISHED
from perf.peers.phases import PhaseTimes
from tests.support.sessions.fake import FakeSession, fake_manifest

RATES = Rates(bf16_gemm=100.0, int8_gemm=400.0, read=10.0, copy=20.0)
SIZES = {
    "num_layers": 4,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
    "vocab_size": 10,
    "layer_windows": (0,) * 4,
}
LAYER = 2 * 2 * 8 * 8 + 3 * 2 * 8 * 16
"""FLOPs of a token in one layer without K and V: query, output, three MLP products."""
KV = 2 * 2 * 8 * 4
"""FLOPs of K and V of one owner."""
PER_KEY = 2 * 2 * 8
"""FLOPs of one token's attention to one key in one layer: scores and values of both heads."""


def engine_of(cut: int, group_size: int = 1, **changes):
    return fake_manifest(**{**SIZES, **changes}, cut=cut, group_size=group_size)


def test_prefill_counts_what_is_computed_above_and_below_the_cut():
    made = engine_of(2, 2, weight_dtype="bfloat16")
    times = PhaseTimes(mixed_rows=3, mixed_context=40)
    work = prefill_work(made, requests=5, input_tokens=6, times=times)
    prompt = 6 * (2 * LAYER + 3 * KV) + 2 * LAYER + 2 * 8 * 10
    token = 4 * LAYER + 3 * KV + 2 * 8 * 10
    assert work.linear_flops == 5 * prompt + 3 * token
    assert work.attention_flops == 5 * (2 * PER_KEY * (1 + 2 + 3 + 4 + 5 + 6) + 2 * PER_KEY * 6) + 40 * 4 * PER_KEY
    assert work.floor_s(RATES) == pytest.approx((work.linear_flops + work.attention_flops) / 100)


def test_without_a_cut_every_layer_is_computed():
    work = prefill_work(engine_of(4), 1, 6, PhaseTimes())
    assert work.linear_flops == 6 * 4 * (LAYER + KV) + 2 * 8 * 10
    assert work.attention_flops == 4 * PER_KEY * 21


@pytest.mark.parametrize("kv_dtype, bytes_per_token", [("bfloat16", 3 * 2 * 4 * 2), ("int8", 3 * 2 * (4 + 4))])
def test_decode_reads_weights_once_a_step_and_each_owners_cache(kv_dtype, bytes_per_token):
    made = engine_of(2, 2, kv_dtype=kv_dtype, weight_dtype="int8")
    times = PhaseTimes(decode_steps=7, decode_rows=20, decode_context=300)
    work = decode_work(made, times)
    token = 4 * LAYER + 3 * KV + 2 * 8 * 10
    assert work.linear_flops == 20 * token and work.attention_flops == 300 * 4 * PER_KEY
    assert made.weight_bytes > token / 2  # a weight is one multiply-add of a token, a byte, and there is padding
    assert work.num_bytes == 7 * made.weight_bytes + 300 * bytes_per_token


def test_a_step_reads_the_experts_of_its_tokens():
    made = engine_of(2, 2, weight_dtype="bfloat16", experts=Experts(8, 2, 16, False, (0, 1, 2, 3)))
    one = decode_work(made, PhaseTimes(decode_steps=5, decode_rows=5))
    many = decode_work(made, PhaseTimes(decode_steps=5, decode_rows=5000))
    gated = 3 * 8 * 16  # weights of an expert
    assert many.num_bytes == pytest.approx(5 * made.weight_bytes)
    assert many.num_bytes - one.num_bytes == pytest.approx(5 * 2 * 4 * (8 - 2) * gated)  # bf16, four layers


@pytest.mark.parametrize("name", ["LFM2-1.2B", "Qwen3-Next-80B-A3B"])
def test_a_step_reads_states_whatever_came_before(name: str):
    made = dataclasses.replace(engine_of(4), model=load_config(PUBLISHED[name]))
    work = [decode_work(made, PhaseTimes(decode_steps=1, decode_rows=rows, decode_context=rows)) for rows in (1, 2)]
    longer = decode_work(made, PhaseTimes(decode_steps=1, decode_rows=1, decode_context=2))
    assert longer.linear_flops == work[0].linear_flops
    attending = made.model.num_layers - len(made.model.linear_layers)
    assert work[0].attention_flops == 4 * made.model.num_heads * made.model.head_dim * attending
    assert longer.attention_flops == 2 * work[0].attention_flops == work[1].attention_flops
    assert longer.num_bytes - work[0].num_bytes == made.kv_bytes_per_token
    assert made.state_bytes > 0 and work[0].num_bytes > made.state_bytes + made.kv_bytes_per_token


def test_the_slower_of_flops_and_bytes_is_the_floor():
    assert Work(800.0, 100.0, 70.0, "bfloat16").floor_s(RATES) == 9.0
    assert Work(800.0, 100.0, 70.0, "int8").floor_s(RATES) == Work(800.0, 100.0, 70.0, "int4").floor_s(RATES) == 7.0
    assert Work(800.0, 500.0, 60.0, "int8").floor_s(RATES) == 7.0


def test_windows_are_refused():
    with pytest.raises(KvforgeError, match="sliding windows"):
        decode_work(engine_of(4, layer_windows=(0, 0, 0, 9)), PhaseTimes(decode_steps=1))


def test_the_best_of_several_measurements_counts():
    assert best_rates(RATES) == RATES
    assert best_rates(RATES, Rates(90.0, 500.0, 12.0, 1.0)) == Rates(100.0, 500.0, 12.0, 20.0)


def test_rates_are_measured():
    rates = measure_rates(size=64, num_bytes=1 << 16, runs=1)
    assert all(value > 0 for value in dataclasses.asdict(rates).values())


def test_third_level_caches_are_as_large_as_linux_says(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5, 9})
    assert third_level_bytes(tmp_path) == 0
    shared = {0: "0-3", 1: "0-3", 5: "4-7", 6: "4-7", 8: "8-9"}  # CPU 9 does not say, and 8 is not ours
    for cpu, cpus in shared.items():
        cache = tmp_path / f"cpu{cpu}/cache/index3"
        cache.mkdir(parents=True)
        (cache / "size").write_text("32768K\n")
        (cache / "shared_cpu_list").write_text(f"{cpus}\n")
    assert third_level_bytes(tmp_path) == 64 << 20


HALF = 0.5
"""Of the whole: what the loop takes between steps of a session that computes nothing, on a busy machine."""


def test_steps_with_prompt_tokens_are_prefill():
    """5 prompts of 12 in steps of 8: every token is counted once, at its own context."""
    engine = LLMEngine(session=FakeSession(), num_pages=64, max_num_tokens=8, enable_prefix_cache=False)
    prompts = np.random.default_rng(0).integers(3, engine.config.vocab_size, (5, 12))
    times, outputs = run_phases(engine, prompts, 4)
    assert [len(tokens) for tokens in outputs] == [4] * 5 and times.first_tokens == [tokens[0] for tokens in outputs]
    assert times.mixed_rows + times.decode_rows == 5 * 3
    assert times.mixed_context + times.decode_context == 5 * (13 + 14 + 15)
    assert times.prefill_steps >= 8 and times.mixed_rows > 0 and times.decode_steps > 0
    assert 0 < times.ttft_s <= times.total_s
    assert times.prefill_s + times.decode_s == pytest.approx(times.total_s, rel=HALF)
