"""A hybrid with a cut beside itself without one: what a prompt costs, and the table."""

from kvforge.costs.flops import prompt_flops
from model_defs import load_config
from perf.engine.hybrid_cut import CUT, EXPERIMENT
from perf.harness.published_shapes import first_layers
from perf.harness.random_checkpoint import with_cut


def test_a_cut_at_half_leaves_more_than_half_of_a_prompt() -> None:
    hf = first_layers("Qwen3-Next-80B-A3B", 8)
    whole, cut = (prompt_flops(load_config(with_cut(hf, at)), 1024) for at in (None, 4))
    assert 0.5 < cut / whole < 0.62  # states above the cut are brought up to date


def test_the_table() -> None:
    report = {"command": "c", "machine": "m", "layers": 8, "num_experts": 16, "vocab_size": 9, "input_tokens": 7}
    ratios = {"ratio": 0.4, "ratio_of_cpu": 0.45, "ratio_of_flops": 0.5}
    cut = {"engine": CUT, "threads": 1, "ttft_s": [1.0, 1.5, 1.25], "cpu_s": [2.0, 3.0, 2.5], "flops": 1e12, **ratios}
    shown = EXPERIMENT.show(report | {"rows": [{"model": "LFM2", **cut}]})
    assert "prompts of 7 tokens" in shown
    assert "| LFM2 | cut at half | 1 | 1.25 (1.00 to 1.50) | 0.40 | 2.50 (2.00 to 3.00) | 0.45 | 1.00 | 0.50 |" in shown
