"""Checks on what an exported graph does to a cache whose pages are sealed."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch.fx import Node

from kvforge.common.graph_nodes import argument

WRITE, SEAL, ATTEND = (f"kvforge::{name}" for name in ("rope_paged_kv_write", "seal_pages", "grouped_attention"))
_EXACT = {"exact_k": "k_pool", "exact_v": "v_pool"}
"""Arguments of operators that have another name than the pool which they take."""


class PoolInput(Protocol):
    """A pool placeholder: the owner it belongs to and what it is of that owner's."""

    @property
    def owner(self) -> int: ...
    @property
    def role(self) -> str: ...


def broken_rule(
    calls: Sequence[tuple[Node, str]],
    pools: Mapping[str, PoolInput],
    owners: Sequence[int],
    expected_reads: Sequence[int],
) -> tuple[Node | None, str] | None:
    """Return the node that breaks a rule (None: the graph as a whole) and the rule, None where all is well.

    ``calls`` are the kvforge operators on the cache with their names, in order, ``pools`` placeholders by name,
    ``owners`` whose caches the graph writes, ``expected_reads`` the owners that layers read. Each owner is written
    once, then sealed once, then read; every call takes all pools of one owner.
    """
    done: dict[int, list[str]] = {owner: [] for owner in owners}
    reads: list[int] = []
    for node, name in calls:
        roles = {"k_pool": "k_pool", "v_pool": "v_pool"}
        if name in (SEAL, ATTEND):
            roles = _EXACT | {pool.role: pool.role for pool in pools.values() if pool.role not in _EXACT.values()}
        elif name != WRITE:
            return node, f"calls {name}, which has no part in a cache whose pages are sealed"
        values = {role: argument(node, name) for name, role in roles.items()}
        found = {role: pools.get(value.name) for role, value in values.items() if isinstance(value, Node)}
        owner = next((pool.owner for pool in found.values() if pool is not None), -1)
        if {role: (pool.owner, pool.role) for role, pool in found.items() if pool is not None} != {
            role: (owner, role) for role in roles.values()
        }:
            return node, "does not take all pools of one owner, each in its place"
        if name == ATTEND:
            reads.append(owner)
            if owner in done and done[owner] != [WRITE, SEAL]:
                return node, f"reads the cache of layer {owner} before this step's pages are written and sealed"
        elif owner not in done or done[owner] != [WRITE, SEAL][: [WRITE, SEAL].index(name)] or owner in reads:
            return node, f"does not write the cache of layer {owner} once, then seal it once, before any layer reads it"
        else:
            done[owner].append(name)
    if reads != list(expected_reads) or any(steps != [WRITE, SEAL] for steps in done.values()):
        sealed = [owner for owner, steps in done.items() if steps == [WRITE, SEAL]]
        return None, (
            f"reads the caches of layers {reads} and seals {sealed}; the model asks for {list(expected_reads)} and "
            f"{list(owners)}"
        )
    return None
