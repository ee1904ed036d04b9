"""Every pair of what engines can have: the build takes it where the table says so, and refuses it elsewhere."""

from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import pytest

from kvforge.common.errors import BuildError
from kvforge.compiler.options import BuildOptions, resolve
from kvforge.compiler.targets.vllm import check_cut_kind, check_own_options
from kvforge.kv_policies import features, parse, policies
from kvforge.kv_policies.compatibility import compare
from kvforge.kv_policies.features import Asked, Feature, Support, feature_of, features_of
from model_defs import ModelError, load_config
from model_defs.rope_config import QueryGrowth
from tests.support.compatibility_docs import are_apart
from tests.support.models.checkpoints import SMALL

LLAMA = load_config({**SMALL, "model_type": "llama", "num_hidden_layers": 8, "head_dim": 128})
MIXTRAL = load_config({**SMALL, "model_type": "mixtral", "num_hidden_layers": 8})
HYBRID = load_config({**SMALL, "model_type": "qwen3_next", "num_hidden_layers": 8})
DEEPSEEK = load_config({**SMALL, "model_type": "deepseek_v2", "num_hidden_layers": 8})


@dataclass(frozen=True)
class Part:
    """A feature, and the options and fields of the model that give an engine it; ``also`` comes with it."""

    feature: Feature
    options: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    algorithm: str | None = None
    also: tuple[Feature, ...] = ()


PARTS = (
    Part(features.SINGLE_INPUT_KV, model={"cut": 4}),
    Part(features.BLIND_CUT, model={"cut": 4, "num_anchors": 32}),
    Part(features.ACROSS_KV, model={"cut": 4, "group_size": 2}, also=(features.SINGLE_INPUT_KV,)),
    *(
        Part(feature_of(parse(name)), {"kv_policy": {"shadowkv": "shadowkv:rank=64"}.get(name, name)})
        for name in policies()
    ),
    Part(features.QUANTIZED_CACHE, {"kv_dtype": "fp8"}),
    Part(features.QUANTIZED_CACHE, {"kv_dtype": "int8"}),
    Part(features.STATIC_CACHE, {"kv_dtype": "fp8_static"}, algorithm="FP8"),
    Part(features.INT4_CACHE, {"kv_dtype": "int4"}),
    Part(features.MIXED_CACHE, {"kv_dtype": "k8v4"}),
    Part(features.GROUPED_CACHE, {"kv_dtype": "kivi2"}),
    Part(features.PAGING),
    Part(features.SPECULATION, {"max_draft_len": 3}),
    Part(features.KV_PREDICTION, {"kv_prediction": "predictor"}),
    Part(features.DRAFT_HEAD, {"draft_head": "head", "max_draft_len": 3}, also=(features.SPECULATION,)),
    Part(features.QUANTIZED_WEIGHTS, {"weight_dtype": "int8"}),
    Part(features.QUANTIZED_WEIGHTS, {"weight_dtype": "int4"}),
    Part(features.FLOAT32, {"dtype": "float32"}),
    Part(features.SLIDING_WINDOW, model={"layer_windows": (64,) * 4 + (0,) * 4}),
    Part(features.EXPERTS, model={"experts": MIXTRAL.experts}),
    Part(features.ACTIVATION, model={"activation": "gelu_tanh"}),
    Part(features.LOCAL_ROPE, model={"local_rope": LLAMA.rope}),
    Part(features.GROWTH, model={"query_growth": QueryGrowth(0.1, 64)}),
    Part(features.UNROTATED, model={"unrotated_layers": (3,)}),
    Part(features.SINKS, model={"attention_sinks": True}),
    Part(features.LATENT, model={"latent": DEEPSEEK.latent, "num_kv_heads": 1, "head_dim": DEEPSEEK.head_dim}),
    Part(features.LINEAR, model={"linear": HYBRID.linear and replace(HYBRID.linear, layers=(0, 4))}),
    Part(features.UNEVEN_HEADS, model={"global_head_dim": 256}),
    Part(features.LAYER_INPUTS, model={"per_layer_input": 16, "per_layer_vocab": 320}),
    Part(features.CUDA, {"target": "cuda"}),
    Part(features.TENSORRT, {"target": "tensorrt"}),
    Part(features.VLLM, {"target": "vllm"}),
)
PAIRS = [
    (one, other)
    for one, other in combinations(PARTS, 2)
    if one.feature is not other.feature and are_apart(one.feature, other.feature)
]


def test_every_feature_has_a_part() -> None:
    """Of the table too: none of its rows is without options that give it."""
    tried = {id_of(part.feature) for part in PARTS}
    assert all(id_of(feature) in tried for feature in features.all_features())
    assert len(PAIRS) == 360 + 30 * len(policies()), "with a part come its pairs with others: count them in"


def id_of(feature: Feature) -> tuple[object, ...]:
    """What a feature is, whatever it is called."""
    return feature.kind, feature.needs, tuple(feature.limits.items())


@pytest.mark.parametrize("first", PARTS, ids=lambda part: part.feature.name)
def test_the_build_says_of_every_pair_what_the_table_says(first: Part) -> None:
    for one, other in (pair for pair in PAIRS if pair[0] is first):
        options = BuildOptions(**{**one.options, **other.options})
        there = [one.feature, other.feature, *one.also, *other.also, features.PAGING]
        refused = any(compare(*pair).support is Support.NO for pair in combinations(there, 2))
        try:
            config = replace(LLAMA, **one.model | other.model)
            if options.target == "vllm":
                check_own_options(options)
                check_cut_kind(config)
                assert not refused, f"{one.feature.name} and target vllm"
                continue
            resolved = resolve(options, config, "BF16", one.algorithm or other.algorithm)
        except (BuildError, ModelError) as error:
            assert refused, f"{one.feature.name} and {other.feature.name}: {error}"
            continue
        assert not refused, f"{one.feature.name} and {other.feature.name} are built"
        drafts, *more = options.max_draft_len, options.kv_prediction is not None, options.draft_head is not None
        asked = Asked(config, parse(options.kv_policy), resolved.kv_dtype, resolved.dtype, options.target,
                      options.weight_dtype, drafts, *more)  # fmt: skip
        found = features_of(asked)
        assert {id_of(one.feature), id_of(other.feature)} <= {id_of(feature) for feature in found}
