"""The names of what goes into the graphs of target ``tensorrt`` and of what comes out."""

from collections.abc import Sequence

from kvforge.compiler.options import ResolvedOptions
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
_ROWS = {"pages": "state_pages", "sequences": "slots", "cache": "pages"}


def policy_inputs(graph: str, policy: KVPolicy) -> dict[str, tuple[str, ...]]:
    """Return the inputs of a graph behind its pools, as ``INPUTS`` has those before."""
    if graph not in ("lower", "upper"):
        return {}
    kinds = policy.state_inputs
    columns = {one.name: ("columns" if one.by_pages else "state_columns",) if one.is_table else () for one in kinds}
    return {one.name: ("sequences", *columns[one.name]) for one in kinds}


def pool_roles(options: ResolvedOptions) -> tuple[str, ...]:
    """Return what the tensors of an owner's pool are, in order: the cache's, then the KV policy's."""
    cache = CACHE_ROLES if options.has_scale_pools else CACHE_ROLES[:2]
    return (*cache, *(pool.name for pool in options.policy.named_pools))


def pool_names(owners: Sequence[int], options: ResolvedOptions) -> list[str]:
    """Return the names of these owners' pools, in the order they have everywhere."""
    return [f"{role}_{owner}" for owner in owners for role in pool_roles(options)]


def operators_of(policy: KVPolicy) -> list[str]:
    """Return the names of the operators that a policy calls before an attention, in order."""
    return [name.removeprefix(f"{NAMESPACE}::") for name in policy.operators]


def written_roles(graph: str, options: ResolvedOptions) -> frozenset[str]:
    """Return which pools a graph writes, of the owners that its layers have or read: what comes in goes out again."""
    if graph not in ("lower", "upper"):
        return frozenset()
    of_policy = {written for name in operators_of(options.policy) for written in OPERATORS[name].writes}
    of_cache = pool_roles(options)[: len(pool_roles(options)) - len(options.policy.named_pools)]
    return frozenset({*of_policy, *(of_cache if graph == "lower" else ())})


def role_of(name: str) -> str:
    """Return what a pool of this name is."""
    return name.rpartition("_")[0]


def rows_of(name: str, policy: KVPolicy) -> str:
    """Return what the first dimension of the pool ``name`` counts, its only dynamic one."""
    rows = {pool.name: _ROWS[pool.rows] for pool in policy.named_pools}
    return rows.get(role_of(name), "pages")
