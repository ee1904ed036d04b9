"""Models whose layers read the caches of lower ones: against transformers, and any table against the reference."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.common.errors import CheckpointError
from kvforge.rewire.source import open_source
from model_defs import ModelError, load_config
from model_defs.reference import reference_logits
from tests.cpu.model_defs.test_rotations import (
    CHUNKS,
    LENGTH,
    PROMPT,
    assert_session_equals_transformers,
    session_logits,
    session_of,
    tokens_of,
)
from tests.support.models.checkpoints import SMALL, load_weights, make_checkpoint
from tests.support.rounding import assert_near, model_error
from tests.support.schedules.step_driver import StepDriver
from tests.support.sessions.eager import EagerSession

KINDS = ("sliding_attention", "full_attention")
MODELS: dict[str, dict[str, Any]] = {
    "half of the layers": {
        "num_hidden_layers": 6,
        "layer_types": [*KINDS] * 3,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 3.0,
    },
    "owners apart, untied, one KV head": {
        "layer_types": [KINDS[1], *[KINDS[0]] * 3, KINDS[1]],
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "num_key_value_heads": 1,
    },
    "no layer, heads of one size, no tables": {
        "num_hidden_layers": 3,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "attention_bias": True,
    },
}
TABLES = {"in pairs": ((0, 0, 2, 2), 4), "the lowest first": ((0, 1, 1, 0), 2), "one for all": ((0, 0, 0, 0), 1)}
"""The owner of each layer, and the first layer that prompt tokens need not run."""


def gemma(path: Path, case: str) -> Path:
    return make_checkpoint(path / "model", "gemma4_text", sliding_window=24, **MODELS[case])


@pytest.mark.parametrize("case", MODELS)
def test_a_session_equals_transformers(case: str, tmp_path: Path) -> None:
    assert_session_equals_transformers(gemma(tmp_path, case))


def assert_skipping_changes_nothing(session: EagerSession, tokens: list[int], bound: float) -> None:
    """A prompt in three chunks, of which only the last token goes past the cut, and the same with all of them."""
    steps = (tokens[:40], tokens[40:70], tokens[70:PROMPT])
    whole, skipping = StepDriver(session), StepDriver(session)
    expected = torch.cat([whole.run(step) for step in steps])[-1:]
    for step in steps[:2]:
        assert len(skipping.run(step, num_survivors=0)) == 0
    assert_near(skipping.run(steps[2], num_survivors=1), expected, bound)


@pytest.mark.parametrize("case", [case for case in MODELS if "num_kv_shared_layers" in MODELS[case]])
def test_a_skipped_prompt_has_the_logits_of_a_whole_one(case: str, tmp_path: Path) -> None:
    session = session_of(gemma(tmp_path, case))
    assert session.config.has_cut and not session.config.is_swiftkv and not session.config.upper_owners
    assert_skipping_changes_nothing(session, tokens_of(session), model_error(session.config, PROMPT))


@pytest.mark.parametrize("case", TABLES)
def test_any_table_of_owners(case: str, tmp_path: Path) -> None:
    """Of an ordinary model: those that share with the layer below, and those that share with any other before."""
    path, (owners, cut) = make_checkpoint(tmp_path / "model", "qwen3"), TABLES[case]
    config = dataclasses.replace(read_model_config(open_model(path)), layer_owners=owners, cut=cut)
    session = session_of(path, config=config)
    tokens, rounding = tokens_of(session), model_error(config, LENGTH)
    expected = reference_logits(config, load_weights(path), torch.tensor(tokens))
    for chunk in CHUNKS[1:]:
        assert_near(session_logits(session, tokens, chunk), expected, rounding, chunk)
    assert_skipping_changes_nothing(session, tokens, rounding)


@pytest.mark.parametrize("owners", [(0, 2, 2, 2), (0, 0, 1, 2), (0, 1, 2, 3)])
def test_impossible_tables_are_refused(owners: tuple[int, ...]) -> None:
    config = load_config({**SMALL, "model_type": "qwen3"})
    with pytest.raises(ModelError, match=r"cannot read the K,V cache of layer"):
        dataclasses.replace(config, layer_owners=owners, cut=3)


def test_there_is_no_other_cut(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no SwiftKV form"):
        load_config({**SMALL, "model_type": "gemma4_text_swiftkv", "num_key_value_layers": 2})
    with pytest.raises(CheckpointError, match="of type gemma4_text, which kvforge does not rewire"):
        open_source(gemma(tmp_path, "half of the layers"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"attention_k_eq_v": True}, "attention_k_eq_v True of gemma4_text is not supported"),
        ({"enable_moe_block": True}, "enable_moe_block"),
        ({"use_bidirectional_attention": "all"}, "of gemma4_text is not supported"),
        ({"num_kv_shared_layers": 4}, "must be below the 4 of"),
        ({"num_kv_shared_layers": 1}, "leaves no layer of some layer_types"),
        ({"hidden_size_per_layer_input": 8}, "must be 0 or at least 16"),
        ({"vocab_size_per_layer_input": 319}, "vocab_size_per_layer_input is 319"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping is 0"),
        ({"per_layer_config": {"3": {"head_dim": 32, "num_key_value_heads": 1}}}, "per_layer_config is"),
        ({"per_layer_config": {"2": {"head_dim": 32}}}, "per_layer_config is"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError) as error:
        load_config({**SMALL, "model_type": "gemma4_text", **changes})
    assert sentence in str(error.value) and str(error.value).endswith(".")
