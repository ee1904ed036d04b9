"""What acts on the K,V cache besides attention: what each feature needs, and what it does not give the others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from kvforge.common.number_formats import KV_FORMATS, QUANTIZED_WEIGHT_BYTES, written_formats
from kvforge.kv_policies.capabilities import NOTHING_INSERTED
from kvforge.kv_policies.policy import KVPolicy, Need
from kvforge.kv_policies.registry import defaults

if TYPE_CHECKING:
    from model_defs import ModelConfig


class Support(Enum):
    """Whether two features go together, from best to worst."""

    YES = "yes"
    CONDITION = "with a condition"
    NO = "no"


@dataclass(frozen=True)
class Limitation:
    """Why a feature does not give what another needs, or on what condition it does; ``reason`` is a clause. ``remedy``
    stands for the feature's where that does not help."""

    support: Support
    reason: str
    remedy: str = ""


def _no(reason: str, remedy: str = "") -> Limitation:
    return Limitation(Support.NO, reason, remedy)


def _if(reason: str) -> Limitation:
    return Limitation(Support.CONDITION, reason)


class Kind(Enum):
    """Of these an engine has one, and a table says nothing of two of them."""

    POLICY = "--kv-policy"
    CACHE = "--kv-dtype"
    TARGET = "--target"
    MODEL = "the model"
    CUT = "the cut"
    OTHER = "other"


@dataclass(frozen=True)
class Asked:
    """What an engine is to be, by which features are there."""

    model: "ModelConfig"
    policy: KVPolicy
    kv_dtype: str
    dtype: str
    target: str = "cpu"
    weight_dtype: str = "auto"
    max_draft_len: int = 0
    is_predicted: bool = False
    has_draft_head: bool = False


@dataclass(frozen=True)
class Feature:
    """``limits`` has an entry for each need that it does not meet as it stands. ``remedy`` says, in the imperative, how
    to build without it; it is empty for what a model is, where the other feature is to be left out. ``is_there`` says
    of which engines it is a feature; policies and formats of the cache are told by their own options. ``called`` is its
    name where it is refused, of fields of Asked."""

    name: str
    needs: frozenset[Need] = frozenset()
    limits: Mapping[Need, Limitation] = field(default_factory=dict)
    remedy: str = "choose another --kv-policy"
    kind: Kind = Kind.OTHER
    option: str = ""
    """The field of BuildOptions that gives it, where it is for engines of kvforge's own alone."""
    is_there: Callable[[Asked], bool] = lambda asked: False
    called: str = ""


def _of_model(name: str, is_there: Callable[[Asked], bool], **fields: Any) -> Feature:
    """What a model is, where nothing but another model helps."""
    return Feature(
        name,
        kind=Kind.MODEL,
        is_there=is_there,
        **{"remedy": "", "called": "{asked.model.model_type} ({name})", **fields},
    )


_ON_CPU = frozenset({Need.CPU_TARGET})
SINGLE_INPUT_KV = Feature(
    "SingleInputKV",
    needs=frozenset({Need.OWN_PREFILL}),
    limits={
        Need.ALL_QUERIES: _no("prompt tokens attend to nothing above the cut"),
        Need.ATTENTION_SCORES: _if("observed tokens of a prompt go past the cut too"),
        Need.WHOLE_PREFILL: _no("there is a substitute for the upper layers' prefill already"),
        Need.OWN_LAYERS: _no("upper layers make theirs of one input"),
    },
    remedy="take a checkpoint without a cut",
    kind=Kind.CUT,
    is_there=lambda asked: asked.model.has_cut and not asked.model.is_blind,
)
BLIND_CUT = Feature(
    "blind cut",
    needs=frozenset({Need.OWN_PREFILL, Need.UPPER_PAGES, Need.CPU_TARGET, Need.OWN_ENGINE}),
    limits={
        need: _no("layers above it see no prompt but for its anchors")
        for need in (Need.OWN_CACHE, Need.WHOLE_PREFILL, Need.TOKEN_GROUPS, Need.OWN_LAYERS)
    },
    remedy="take a checkpoint with another cut",
    kind=Kind.CUT,
    is_there=lambda asked: asked.model.is_blind,
)
ACROSS_KV = Feature(
    "AcrossKV",
    limits={
        Need.CACHE_PER_LAYER: _if("once per owner, for all layers that share it"),
        Need.OWN_LAYERS: _no("layers share caches"),
    },
    remedy="take a checkpoint without AcrossKV",
    is_there=lambda asked: len(asked.model.owners) + len(asked.model.linear_layers) < asked.model.num_layers,
)
QUANTIZED_CACHE = Feature(
    "8-bit cache",
    needs=frozenset({Need.OWN_ENGINE}),
    limits={Need.PLAIN_ELEMENTS: _no("the numbers in it have another")},
    remedy="give a --kv-dtype that is the --dtype",
    kind=Kind.CACHE,
    option="kv_dtype",
)
STATIC_CACHE = replace(
    QUANTIZED_CACHE,
    name="8-bit cache with static scales",
    needs=QUANTIZED_CACHE.needs | {Need.STATIC_SCALES},
)
INT4_CACHE = Feature(
    "4-bit cache",
    needs=frozenset({Need.HALF_BYTES, Need.OWN_ENGINE}),
    limits={
        Need.PLAIN_ELEMENTS: _no("the numbers in it have another"),
        Need.HISTORY_MUTATION: _no("what is written stays as it was rounded, two numbers in a byte"),
    },
    remedy="give --kv-dtype int8 where that goes with the rest, or that of the --dtype",
    kind=Kind.CACHE,
    option="kv_dtype",
)
MIXED_CACHE = replace(INT4_CACHE, name="8-bit keys, 4-bit values", needs=frozenset({Need.TWO_FORMATS, Need.OWN_ENGINE}))
GROUPED_CACHE = Feature(
    "cache in groups",
    needs=frozenset({Need.TOKEN_GROUPS, Need.PLAIN_ELEMENTS, Need.OWN_ENGINE}),
    limits={
        Need.PLAIN_ELEMENTS: _no("the numbers in it have another"),
        Need.HISTORY_MUTATION: _no("what is sealed stays as it was rounded, with its group"),
        Need.OWN_CACHE: _no("its pages are sealed"),
    },
    remedy="give --kv-dtype int8, or that of the --dtype",
    kind=Kind.CACHE,
    option="kv_dtype",
)
PAGING = Feature(
    "pages, shared prefixes",
    limits={
        Need.WHOLE_PROMPT: _if("the exact prefix is shared, what is made of it is each sequence's own"),
        Need.ALL_QUERIES: _if("no prefix is taken over, as none of its queries would be observed"),
        Need.HISTORY_MUTATION: _if("copy a shared page before the change, unpublish it where it is changed"),
        Need.PER_HEAD_LENGTHS: _if("a head's tokens fill whole pages, of which it takes other heads' parts too"),
        Need.TOKEN_GROUPS: _if("a page holds whole groups"),
        Need.CACHE_POSITIONS: _no("shared keys are rotated at their true positions"),
    },
    is_there=lambda asked: True,
)
SPECULATION = Feature(
    "speculation",
    needs=frozenset({Need.OWN_ENGINE}),
    limits={
        Need.ONE_QUERY: _no("drafts are queries as well"),
        Need.TOKEN_GROUPS: _if("a page whose drafts are not accepted is sealed again"),
    },
    remedy="build with --max-draft-len 0",
    option="max_draft_len",
    is_there=lambda asked: asked.max_draft_len > 0,
)
KV_PREDICTION = Feature(
    "KV prediction",
    needs=frozenset({Need.WHOLE_PREFILL, Need.ONE_QUERY, Need.OWN_LAYERS, Need.CPU_TARGET, Need.OWN_ENGINE}),
    limits={
        Need.OWN_CACHE: _no("an auxiliary model fills it"),
        Need.TOKEN_SCORES: _no("what is predicted has no score"),
        Need.STATIC_SCALES: _no("what is predicted was not calibrated"),
        Need.TOKEN_GROUPS: _no("exact tokens are written over predicted ones"),
    },
    remedy="leave --kv-prediction out",
    option="kv_prediction",
    is_there=lambda asked: asked.is_predicted,
)
DRAFT_HEAD = Feature(
    "draft head",
    needs=_ON_CPU | {Need.OWN_ENGINE},
    limits={
        Need.OWN_CACHE: _no("the head's K,V are in the same pages"),
        Need.TOKEN_GROUPS: _no("the head's K,V are in the same pages"),
        Need.WHOLE_PREFILL: _no("predicted prompts have no hidden states"),
        Need.UPPER_PAGES: _no("the head's K,V are in pages of all tokens"),
    },
    remedy="leave --draft-head out",
    option="draft_head",
    is_there=lambda asked: asked.has_draft_head,
)
QUANTIZED_WEIGHTS = Feature(
    "weights in 8 or 4 bits",
    needs=frozenset({Need.BFLOAT16, Need.CPU_TARGET, Need.OWN_ENGINE}),
    remedy="leave --weight-dtype out",
    option="weight_dtype",
    is_there=lambda asked: asked.weight_dtype in QUANTIZED_WEIGHT_BYTES,
    called="--weight-dtype {asked.weight_dtype}",
)
FLOAT32 = Feature(
    "float32",
    limits={Need.BFLOAT16: _no("activations are in float32")},
    remedy="build with --dtype bfloat16",
    is_there=lambda asked: asked.dtype == "float32",
)
SLIDING_WINDOW = _of_model(
    "sliding windows",
    lambda asked: any(asked.model.layer_windows),
    limits={
        Need.GLOBAL_ATTENTION: _no("some layers see only the last tokens"),
        Need.UPPER_PAGES: _if("in layers below the cut"),
    },
    remedy="leave --kv-policy out for this model",
)
EXPERTS = _of_model("a mixture of experts", lambda asked: asked.model.experts is not None, needs=_ON_CPU)
ACTIVATION = _of_model("an activation other than SiLU", lambda asked: asked.model.activation != "silu", needs=_ON_CPU)
LOCAL_ROPE = _of_model(
    "another RoPE in layers with a window", lambda asked: asked.model.local_rope is not None, needs=_ON_CPU
)
GROWTH = _of_model("growing queries", lambda asked: asked.model.query_growth is not None, needs=_ON_CPU)
UNROTATED = _of_model(
    "layers without RoPE",
    lambda asked: bool(asked.model.unrotated_layers),
    needs=_ON_CPU,
    limits={Need.ONE_ROTATION: _no("some layers do not rotate")},
)
SINKS = _of_model(
    "attention sinks",
    lambda asked: asked.model.attention_sinks,
    needs=_ON_CPU,
    limits={
        Need.INSERTION: _no("attention over whole caches alone knows them"),
        Need.TOKEN_GROUPS: _no("attention over whole caches alone knows them"),
    },
)
LATENT = _of_model(
    "latent attention",
    lambda asked: asked.model.latent is not None,
    needs=_ON_CPU,
    limits={
        need: _no("one row of a token is K and V of all heads")
        for need in (
            Need.STATIC_SCALES,
            Need.HALF_BYTES,
            Need.TWO_FORMATS,
            Need.TOKEN_GROUPS,
            Need.OWN_CACHE,
            Need.OWN_LAYERS,
            Need.UPPER_PAGES,
        )
    },
)
LINEAR = _of_model(
    "linear attention",
    lambda asked: asked.model.linear is not None,
    called="{asked.model.model_type} ({asked.model.linear.title})",
    needs=_ON_CPU,
    limits={
        need: _no("some layers keep a state in place of K and V")
        for need in (Need.OWN_CACHE, Need.OWN_LAYERS, Need.TOKEN_GROUPS, Need.UPPER_PAGES)
    },
)
UNEVEN_HEADS = _of_model(
    "heads of two sizes",
    lambda asked: bool(asked.model.layer_head_dims),
    limits={Need.TOKEN_GROUPS: _no("caches differ in size"), Need.OWN_LAYERS: _no("caches differ in size")},
)
LAYER_INPUTS = _of_model(
    "inputs of each layer",
    lambda asked: bool(asked.model.per_layer_input),
    limits={need: _no("layers have inputs besides the one below") for need in (Need.OWN_LAYERS, Need.UPPER_PAGES)},
)
_CPU_ALONE = _no("there are no kernels or graphs for it", "build with --target cpu")
_ONE_FORMAT = _no("the kernels read both in one", "build with --target cpu")
CUDA = Feature(
    "target cuda",
    limits={
        Need.PER_HEAD_LENGTHS: _no("attention takes whole pages of all heads"),
        Need.TWO_FORMATS: _ONE_FORMAT,
        Need.TOKEN_GROUPS: _no("no kernel seals them"),
        Need.CPU_TARGET: _CPU_ALONE,
    },
    remedy="build with --target cpu",
    kind=Kind.TARGET,
    is_there=lambda asked: asked.target == "cuda",
)
TENSORRT = Feature(
    "target tensorrt",
    limits={
        Need.PER_HEAD_LENGTHS: _no("attention takes whole pages of all heads"),
        Need.PLAIN_WRITES: _no("plugins alone write in place"),
        Need.HALF_BYTES: _no("the plugins read whole bytes"),
        Need.TWO_FORMATS: _ONE_FORMAT,
        Need.TOKEN_GROUPS: _no("no kernel seals them"),
        Need.CPU_TARGET: _CPU_ALONE,
    },
    remedy="build with --target cpu, or with cuda where that goes with the rest",
    kind=Kind.TARGET,
    is_there=lambda asked: asked.target == "tensorrt",
)
FLOAT8_IN_PLANS = Feature(
    "FP8 in plans",
    limits={
        Need.ATTENTION_SCORES: _no(
            "the builder takes no plugin above a cut that reads the cache and writes what it observes",
            "give --kv-dtype int8",
        )
    },
    is_there=lambda asked: (
        asked.target == "tensorrt"
        and any(part.torch_dtype == "float8_e4m3fn" for part in written_formats(asked.kv_dtype, asked.dtype))
    ),
    called="--kv-dtype {asked.kv_dtype} and target tensorrt",
)
"""Of TensorRT for RTX 1.7. It is of two options, so it has no place in a table of pairs."""
VLLM = Feature(
    "target vllm",
    limits={
        Need.OWN_ENGINE: _no("vLLM's own arguments are given by --engine-args"),
        Need.OWN_PREFILL: _if("of the families that docs/distributed.md names"),
    },
    remedy="leave it out",
    kind=Kind.TARGET,
)


_OF_LAYERS = (SINGLE_INPUT_KV, BLIND_CUT, ACROSS_KV)
_OF_CACHES = (QUANTIZED_CACHE, STATIC_CACHE, INT4_CACHE, MIXED_CACHE, GROUPED_CACHE)
_OF_OPTIONS = (PAGING, SPECULATION, KV_PREDICTION, DRAFT_HEAD, QUANTIZED_WEIGHTS, FLOAT32)
_OF_MODELS = (
    SLIDING_WINDOW,
    EXPERTS,
    ACTIVATION,
    LOCAL_ROPE,
    GROWTH,
    UNROTATED,
    SINKS,
    LATENT,
    LINEAR,
    UNEVEN_HEADS,
    LAYER_INPUTS,
)
_OF_TARGETS = (CUDA, TENSORRT)


def needs_of(policy: KVPolicy) -> frozenset[Need]:
    """Return what a policy needs, and an insertion where it has one."""
    if policy.insertion is NOTHING_INSERTED:
        return policy.needs
    has_positions = policy.insertion.layer_insertion().needs_positions
    return policy.needs | {Need.INSERTION} | ({Need.ONE_ROTATION} if has_positions else set())


def feature_of(policy: KVPolicy) -> Feature:
    """Return a policy as a feature."""
    remedy = "leave --kv-policy out"
    return Feature(f"--kv-policy {policy.name}", needs_of(policy), {}, remedy, Kind.POLICY, "kv_policy")


def feature_of_cache(kv_dtype: str, dtype: str | None = None) -> Feature:
    """Return a quantized format of the cache, a key of ``KV_FORMATS``, as a feature; with an engine's ``dtype`` as its
    option, and a remedy that names it."""
    stored = KV_FORMATS[kv_dtype]
    narrow = INT4_CACHE if stored.element_bits < 8 else QUANTIZED_CACHE
    dynamic = narrow if stored.keys == stored.values else MIXED_CACHE
    kind = {"grouped": GROUPED_CACHE, "static": STATIC_CACHE}.get(stored.scales, dynamic)
    if dtype is None:
        return kind
    wider = "int8 where that goes with the rest, or " if kind in (INT4_CACHE, MIXED_CACHE) else ""
    return replace(kind, name=f"--kv-dtype {kv_dtype}", remedy=f"give --kv-dtype {wider}{dtype}")


def all_features() -> tuple[Feature, ...]:
    """Return all of them, in the order of the table; what needs and limits the same is one."""
    kin: list[list[Feature]] = []
    of_policies = [replace(feature_of(policy), name=policy.title) for policy in defaults()]
    for feature in (*_OF_LAYERS, *of_policies, *_OF_CACHES, *_OF_OPTIONS, *_OF_MODELS, *_OF_TARGETS, VLLM):
        same = (of for of in kin if _acts(of[0]) == _acts(feature))
        if (found := next(same, None)) is None:
            kin.append([feature])
        else:
            found.append(feature)
    grouped = (replace(of[0], name=", ".join(feature.name for feature in of)) for of in kin)
    return tuple(feature for feature in grouped if feature.needs or feature.limits)


def features_of(asked: Asked) -> list[Feature]:
    """Return what of an engine limits other parts of it, or is limited by them: the policy, then what the options
    choose, then what the model is."""
    cache = () if asked.kv_dtype == asked.dtype else (feature_of_cache(asked.kv_dtype, asked.dtype),)
    there = (
        named(feature, asked)
        for feature in (*_OF_LAYERS, *cache, *_OF_OPTIONS, *_OF_TARGETS, *_OF_MODELS, FLOAT8_IN_PLANS)
        if feature in cache or feature.is_there(asked)
    )
    return [feature_of(asked.policy), *there]


def named(feature: Feature, asked: Asked) -> Feature:
    """Return a feature of ``asked`` by the name that it has where it is refused."""
    return replace(feature, name=feature.called.format(asked=asked, name=feature.name) or feature.name)


def _acts(feature: Feature) -> tuple[object, ...]:
    return feature.kind, feature.needs, dict(feature.limits)
