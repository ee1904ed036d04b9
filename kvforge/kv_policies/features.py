"""What acts on the K,V cache besides attention: what each feature needs, and what it does not give the others."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from kvforge.common.number_formats import KV_FORMATS
from kvforge.kv_policies.full import Full
from kvforge.kv_policies.policy import KVPolicy, Need
from kvforge.kv_policies.registry import policies


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
    OTHER = "other"


@dataclass(frozen=True)
class Feature:
    """``limits`` has an entry for each need that it does not meet as it stands. ``remedy`` says, in the imperative, how
    to build without it; it is empty for what a model is, where the other feature is to be left out."""

    name: str
    needs: frozenset[Need] = frozenset()
    limits: Mapping[Need, Limitation] = field(default_factory=dict)
    remedy: str = "choose another --kv-policy"
    kind: Kind = Kind.OTHER
    option: str = ""
    """The field of BuildOptions that gives it, where it is for engines of kvforge's own alone."""


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
)
ACROSS_KV = Feature(
    "AcrossKV",
    limits={
        Need.CACHE_PER_LAYER: _if("once per owner, for all layers that share it"),
        Need.OWN_LAYERS: _no("layers share caches"),
    },
    remedy="take a checkpoint without AcrossKV",
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
    "2-bit cache in groups",
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
)
KV_PREDICTION = Feature(
    "KV prediction",
    needs=frozenset({Need.WHOLE_PREFILL, Need.ONE_QUERY, Need.OWN_LAYERS, Need.CPU_TARGET, Need.OWN_ENGINE}),
    limits={
        Need.OWN_CACHE: _no("an auxiliary model fills it"),
        Need.STATIC_SCALES: _no("what is predicted was not calibrated"),
        Need.TOKEN_GROUPS: _no("exact tokens are written over predicted ones"),
    },
    remedy="leave --kv-prediction out",
    option="kv_prediction",
)
QUANTIZED_WEIGHTS = Feature(
    "weights in 8 or 4 bits",
    needs=frozenset({Need.BFLOAT16, Need.CPU_TARGET, Need.OWN_ENGINE}),
    remedy="leave --weight-dtype out",
    option="weight_dtype",
)
FLOAT32 = Feature(
    "float32",
    limits={Need.BFLOAT16: _no("activations are in float32")},
    remedy="build with --dtype bfloat16",
)
SLIDING_WINDOW = Feature(
    "sliding windows",
    limits={Need.GLOBAL_ATTENTION: _no("some layers see only the last tokens")},
    remedy="leave --kv-policy out for this model",
    kind=Kind.MODEL,
)
EXPERTS = Feature("a mixture of experts", needs=frozenset({Need.CPU_TARGET}), remedy="", kind=Kind.MODEL)
ACTIVATION = replace(EXPERTS, name="an activation other than SiLU")
LOCAL_ROPE = replace(EXPERTS, name="another RoPE in layers with a window")
GROWTH = replace(EXPERTS, name="growing queries")
UNROTATED = replace(
    EXPERTS,
    name="layers without RoPE",
    limits={Need.ONE_ROTATION: _no("some layers do not rotate")},
)
SINKS = Feature(
    "attention sinks",
    needs=frozenset({Need.CPU_TARGET}),
    limits={
        Need.INSERTION: _no("attention over whole caches alone knows them"),
        Need.TOKEN_GROUPS: _no("attention over whole caches alone knows them"),
    },
    remedy="",
    kind=Kind.MODEL,
)
LATENT = Feature(
    "latent attention",
    needs=frozenset({Need.CPU_TARGET}),
    limits={
        need: _no("one row of a token is K and V of all heads")
        for need in (
            Need.STATIC_SCALES,
            Need.HALF_BYTES,
            Need.TWO_FORMATS,
            Need.TOKEN_GROUPS,
            Need.OWN_CACHE,
            Need.OWN_LAYERS,
        )
    },
    remedy="",
    kind=Kind.MODEL,
)
UNEVEN_HEADS = Feature(
    "heads of two sizes",
    limits={Need.TOKEN_GROUPS: _no("caches differ in size"), Need.OWN_LAYERS: _no("caches differ in size")},
    remedy="",
    kind=Kind.MODEL,
)
LAYER_INPUTS = Feature(
    "inputs of each layer",
    limits={Need.OWN_LAYERS: _no("layers have inputs besides the one below")},
    remedy="",
    kind=Kind.MODEL,
)
_CPU_ALONE = _no("only target cpu has the kernels or graphs for it", "build with --target cpu")
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
)


VLLM = Feature(
    "target vllm",
    limits={
        Need.OWN_ENGINE: _no("vLLM's own arguments are given by --engine-args"),
        Need.OWN_PREFILL: _if("of the families that docs/distributed.md names"),
    },
    remedy="leave it out",
    kind=Kind.TARGET,
)


def needs_of(policy: KVPolicy) -> frozenset[Need]:
    """Return what a policy declares that it needs, and what every policy besides ``full`` does."""
    implied = {Need.OWN_CACHE, Need.OWN_ENGINE} if policy.name != Full.name else set()
    if type(policy).layer_insertion is not KVPolicy.layer_insertion:
        implied.add(Need.INSERTION)
        if policy.layer_insertion().needs_positions:
            implied.add(Need.ONE_ROTATION)
    return policy.needs | implied


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
    every = (
        SINGLE_INPUT_KV,
        ACROSS_KV,
        *(replace(feature_of(policy()), name=policy.title) for policy in policies().values()),
        QUANTIZED_CACHE,
        STATIC_CACHE,
        INT4_CACHE,
        MIXED_CACHE,
        GROUPED_CACHE,
        PAGING,
        SPECULATION,
        KV_PREDICTION,
        QUANTIZED_WEIGHTS,
        FLOAT32,
        SLIDING_WINDOW,
        EXPERTS,
        ACTIVATION,
        LOCAL_ROPE,
        GROWTH,
        UNROTATED,
        SINKS,
        LATENT,
        UNEVEN_HEADS,
        LAYER_INPUTS,
        CUDA,
        TENSORRT,
        VLLM,
    )
    kin: list[list[Feature]] = []
    for feature in every:
        same = (of for of in kin if _acts(of[0]) == _acts(feature))
        if (found := next(same, None)) is None:
            kin.append([feature])
        else:
            found.append(feature)
    grouped = (replace(of[0], name=", ".join(feature.name for feature in of)) for of in kin)
    return tuple(feature for feature in grouped if feature.needs or feature.limits)


def _acts(feature: Feature) -> tuple[object, ...]:
    return feature.kind, feature.needs, dict(feature.limits)
