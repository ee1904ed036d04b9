"""The names of what goes into the graphs of target ``tensorrt`` and of what comes out."""

from collections.abc import Sequence

from kvforge.common.number_formats import KV_FORMATS
from kvforge.kv_policies import KVPolicy
from plugins import OPERATORS
from plugins.operator import NAMESPACE

INPUTS: dict[str, dict[str, tuple[str, ...]]] = {
    "lower": {
        "input_ids": ("tokens",),
        "positions": ("tokens",),
        "slot_mapping": ("tokens",),
        "query_start": ("starts",),
        "kv_length": ("sequences",),
        "page_table": ("sequences", "columns"),
    },
    "upper": {
        "hidden": ("tokens",),
        "survivor_index": ("survivors",),
        "survivor_start": ("starts",),
        "positions": ("tokens",),
        "kv_length": ("sequences",),
        "page_table": ("sequences", "columns"),
    },
    "early_exit": {"hidden": ("tokens",), "survivor_index": ("survivors",)},
    "verify": {
        "logits": ("rows",),
        "draft_ids": ("drafts",),
        "draft_start": ("starts",),
        "draft_probs": ("proposals",),
        "temperature": ("sequences",),
        "uniform": ("rows",),
    },
}
"""The inputs of each graph before its pools, in order, and the names of their dynamic dimensions, which come first."""

RESULTS = {
    "lower": ("hidden",),
    "upper": ("logits",),
    "early_exit": ("logits",),
    "verify": ("accepted", "next_token"),
}
"""The outputs of each graph that are no pools."""

CACHE_ROLES = ("k_pool", "v_pool", "k_scales", "v_scales")
"""What the tensors of an owner's pool are that hold the cache; the last two where its format has scales of its own."""

WRITTEN = "_out"
"""What the name of a pool ends in where it comes out again."""

_ROWS = {"pages": "state_pages", "sequences": "slots", "cache": "pages"}


def policy_inputs(graph: str, policy: KVPolicy) -> dict[str, tuple[str, ...]]:
    """Return the inputs of a graph behind its pools, as ``INPUTS`` has those before."""
    if graph not in ("lower", "upper"):
        return {}
    kinds = policy.keeping.state_inputs
    columns = {one.name: ("columns" if one.by_pages else "state_columns",) if one.is_table else () for one in kinds}
    return {one.name: ("sequences", *columns[one.name]) for one in kinds}


def cache_roles(kv_dtype: str) -> tuple[str, ...]:
    """Return what the tensors of an owner's cache of this format are, in order."""
    return CACHE_ROLES if KV_FORMATS[kv_dtype].scales == "dynamic" else CACHE_ROLES[:2]


def pool_roles(kv_dtype: str, policy: KVPolicy) -> tuple[str, ...]:
    """Return what the tensors of an owner's pool are, in order: the cache's, then the KV policy's."""
    return (*cache_roles(kv_dtype), *(pool.name for pool in policy.keeping.named_pools))


def pool_names(owners: Sequence[int], kv_dtype: str, policy: KVPolicy) -> list[str]:
    """Return the names of these owners' pools, in the order they have everywhere."""
    return [f"{role}_{owner}" for owner in owners for role in pool_roles(kv_dtype, policy)]


def operators_of(policy: KVPolicy) -> list[str]:
    """Return the names of the operators that a policy calls before an attention, in order."""
    return [name.removeprefix(f"{NAMESPACE}::") for name in policy.insertion.operators]


def written_roles(graph: str, kv_dtype: str, policy: KVPolicy) -> frozenset[str]:
    """Return which pools a graph writes, of the owners that its layers have or read: what comes in goes out again."""
    if graph not in ("lower", "upper"):
        return frozenset()
    of_policy = {written for name in operators_of(policy) for written in OPERATORS[name].writes}
    return frozenset({*of_policy, *(cache_roles(kv_dtype) if graph == "lower" else ())})


def role_of(name: str) -> str:
    """Return what a pool of this name is."""
    return name.rpartition("_")[0]


def rows_of(name: str, policy: KVPolicy) -> str:
    """Return what the first dimension of the pool ``name`` counts, its only dynamic one."""
    rows = {pool.name: _ROWS[pool.rows] for pool in policy.keeping.named_pools}
    return rows.get(role_of(name), "pages")
