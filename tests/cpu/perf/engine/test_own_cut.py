"""A model with a cut of its own beside itself without: the same weights and caches, more work, one table."""

from kvforge.checkpoint.model import load_config as load_of_checkpoints
from kvforge.checkpoint.model import read_model_config
from kvforge.costs.flops import prompt_flops
from model_defs import load_config
from model_defs.weights import weight_specs
from perf.engine.own_cut import ALL_LAYERS, EXPERIMENT, SKIPPING, read_without_cut, without_cut
from perf.harness.random_checkpoint import GEMMA4_E2B

CONFIG = load_config(GEMMA4_E2B)


def test_without_its_cut_the_model_has_the_same_tensors_and_caches() -> None:
    whole = without_cut(CONFIG)
    assert CONFIG.has_cut and not whole.has_cut
    assert CONFIG.owners == whole.owners and CONFIG.owner_of_layer == whole.owner_of_layer

    def names(config: object) -> set[str]:
        return {source.name for spec in weight_specs(config) for source in spec.sources}

    assert names(CONFIG) == names(whole)


def test_upper_layers_are_more_than_half_of_a_prompt() -> None:
    share = prompt_flops(CONFIG, 2048) / prompt_flops(without_cut(CONFIG), 2048)
    assert 0.25 < share < 0.5  # 20 of 35 layers, whose MLPs are twice as wide


def test_only_what_is_read_meanwhile_has_no_cut() -> None:
    assert load_of_checkpoints is load_config
    with read_without_cut():
        from kvforge.checkpoint import model

        assert not model.load_config(GEMMA4_E2B).has_cut
    assert model.load_config is load_config and read_model_config.__globals__["load_config"] is load_config


def test_the_table() -> None:
    rows = [
        {"engine": SKIPPING, "ttft_s": [1.0, 3.0, 2.0], "flops": 2e12},
        {"engine": ALL_LAYERS, "ttft_s": [4.0, 4.0, 4.0], "flops": 6e12},
    ]
    text = EXPERIMENT.show(
        {
            "command": "c", "machine": "m", "weight_dtype": "int8", "vocab_size": 8, "input_tokens": 5,
            "ratio": 0.5, "equal_texts": 3, "flops_per_s": 2e12, "rows": rows,
        }
    )  # fmt: skip
    assert "| its own cut | 2.00 (1.00 to 3.00) | 2.00 | 1.00 |" in text
    assert "**0.50**; 3 of 3 texts are equal" in text
