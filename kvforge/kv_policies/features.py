"""What acts on the K,V cache besides attention: what each feature needs, and what it does not give the others."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from kvforge.common.number_formats import KV_FORMATS
from kvforge.kv_policies.policy import KVPolicy, Need
from kvforge.kv_policies.registry import policies


class Support(Enum):
    """Whether two features go together, from best to worst."""

    YES = "yes"
    CONDITION = "with a condition"
    NO = "no"


@dataclass(frozen=True)
class Limitation:
    """Why a feature does not give what another needs, or on what condition it does; ``reason`` is a clause."""

    support: Support
    reason: str


def _no(reason: str) -> Limitation:
    return Limitation(Support.NO, reason)


def _if(reason: str) -> Limitation:
    return Limitation(Support.CONDITION, reason)


@dataclass(frozen=True)
class Feature:
    """``limits`` has an entry for each need that it does not meet as it stands. ``remedy`` says, in the imperative, how
    to build without it. Those not ``is_built`` are what a policy to come will meet."""

    name: str
    needs: frozenset[Need] = frozenset()
    limits: Mapping[Need, Limitation] = field(default_factory=dict)
    remedy: str = "choose another --kv-policy"
    is_built: bool = True
    is_policy: bool = False
    """An engine has one of these."""


SINGLE_INPUT_KV = Feature(
    "SingleInputKV",
    limits={
        Need.ALL_QUERIES: _no("prompt tokens attend to nothing above the cut"),
        Need.ATTENTION_SCORES: _if("observed tokens of a prompt go past the cut too"),
        Need.WHOLE_PREFILL: _no("there is a substitute for the upper layers' prefill already"),
    },
    remedy="take a checkpoint without a cut",
)
ACROSS_KV = Feature(
    "AcrossKV",
    limits={Need.CACHE_PER_LAYER: _if("once per owner, for all layers that share it")},
)
QUANTIZED_CACHE = Feature(
    "8-bit cache",
    limits={Need.PLAIN_ELEMENTS: _no("the numbers in it have another")},
    remedy="give a --kv-dtype that is the --dtype",
)
INT4_CACHE = Feature(
    "4-bit cache",
    needs=frozenset({Need.HALF_BYTES}),
    limits={
        Need.PLAIN_ELEMENTS: _no("the numbers in it have another"),
        Need.HISTORY_MUTATION: _no("what is written stays as it was rounded, two numbers in a byte"),
    },
    remedy="give --kv-dtype int8 where that goes with the rest, or that of the --dtype",
)
GROUPED_CACHE = Feature(
    "2-bit cache in groups",
    needs=frozenset({Need.TOKEN_GROUPS, Need.PLAIN_ELEMENTS}),
    limits={
        Need.PLAIN_ELEMENTS: _no("the numbers in it have another"),
        Need.HISTORY_MUTATION: _no("what is sealed stays as it was rounded, with its group"),
    },
    remedy="give --kv-dtype int8, or that of the --dtype",
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
    limits={
        Need.ONE_QUERY: _no("drafts are queries as well"),
        Need.TOKEN_GROUPS: _if("a page whose drafts are not accepted is sealed again"),
    },
    remedy="build with --max-draft-len 0",
)
KV_PREDICTION = Feature(
    "KV prediction",
    needs=frozenset({Need.WHOLE_PREFILL, Need.CACHE_PER_LAYER}),
    limits={
        Need.ATTENTION_SCORES: _if("the auxiliary model's scores stand for them"),
        Need.EXACT_PROMPT: _if("predicted keys are factored as if they were exact: an experiment"),
    },
    is_built=False,
)
SLIDING_WINDOW = Feature(
    "sliding windows",
    limits={Need.GLOBAL_ATTENTION: _no("some layers see only the last tokens")},
    remedy="leave --kv-policy out for this model",
)
CUDA = Feature(
    "target cuda",
    limits={
        Need.PER_HEAD_LENGTHS: _no("attention takes whole pages of all heads"),
        Need.TOKEN_GROUPS: _no("no kernel seals them"),
    },
    remedy="build with --target cpu",
)
TENSORRT = Feature(
    "target tensorrt",
    limits={
        Need.SEQUENCE_STATE: _no("the graphs take pages alone"),
        Need.HALF_BYTES: _no("the plugins read whole bytes"),
        Need.TOKEN_GROUPS: _no("no kernel seals them"),
    },
    remedy="build with --target cpu, or with cuda where that goes with the rest",
)


def feature_of(policy: KVPolicy) -> Feature:
    """Return a policy as a feature."""
    return Feature(f"--kv-policy {policy.name}", needs=policy.needs, is_policy=True)


def feature_of_cache(kv_dtype: str, dtype: str | None = None) -> Feature:
    """Return a quantized format of the cache, a key of ``KV_FORMATS``, as a feature; with an engine's ``dtype`` as its
    option, and a remedy that names it."""
    stored = KV_FORMATS[kv_dtype]
    kind = GROUPED_CACHE if stored.is_grouped else INT4_CACHE if stored.element_bits < 8 else QUANTIZED_CACHE
    if dtype is None:
        return kind
    wider = "int8 where that goes with the rest, or " if kind is INT4_CACHE else ""
    return replace(kind, name=f"--kv-dtype {kv_dtype}", remedy=f"give --kv-dtype {wider}{dtype}")


def all_features() -> tuple[Feature, ...]:
    """Return all of them, in the order of the table; policies with the same needs are one."""
    titles: dict[frozenset[Need], list[str]] = {}
    for policy in policies().values():
        titles.setdefault(policy.needs, []).append(policy.title)
    return (
        SINGLE_INPUT_KV,
        ACROSS_KV,
        *(Feature(", ".join(names), needs=needs, is_policy=True) for needs, names in titles.items() if needs),
        QUANTIZED_CACHE,
        INT4_CACHE,
        GROUPED_CACHE,
        PAGING,
        SPECULATION,
        KV_PREDICTION,
        SLIDING_WINDOW,
        CUDA,
        TENSORRT,
    )
