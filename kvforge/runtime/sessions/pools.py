"""Memory of the K,V cache."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kvforge.common.dtypes import torch_specs
from kvforge.costs.cache_layout import CacheLayout
from kvforge.kv_policies import Full
from kvforge.manifest import Manifest
from kvforge.runtime.sessions.huge_pages import allocate_together, place_together
from kvforge.runtime.sessions.mapped_memory import mapped_host_memory

Pool = tuple[Tensor, ...]
"""The cache of one owner: K and V elements, or rows that are both, then, for dynamic formats, their scales, then the KV
policy's ``state_pools``. Where pages are sealed, K and V are the exact pages, and the sealed ones are the policy's.

Of a layer that keeps a state, ``CacheLayout.linear_state``. These are behind all owners."""

Pools = list[Pool]

Spec = tuple[tuple[int, ...], torch.dtype]


def allocate_pools(
    manifest: Manifest,
    num_pages: int,
    device: str | torch.device = "cpu",
    num_state_pages: int = 0,
    num_slots: int | None = None,
    num_upper_pages: int = 0,
    num_rows: int = 0,
) -> Pools:
    """Return the pools of every owner as views of one allocation: ``num_pages * manifest.page_bytes`` bytes, zeroed,
    above a blind cut those of ``num_upper_pages``, exact pages where these are sealed, those of the KV policy for
    ``num_state_pages`` and ``num_slots`` sequences (default: the engine's), and what ``allocate_together`` adds for
    alignment. Behind them are those of layers that keep a state, ``num_rows * manifest.state_bytes``.

    Pools of the policy that are on the host, all owners' in an allocation of their own, are mapped for ``device``.
    """
    num_slots = manifest.max_num_seqs if num_slots is None else num_slots
    layout, owners = manifest.cache_layout, manifest.model.owners
    more = layout.state_pools
    state = torch_specs(layout.state({"pages": num_state_pages, "sequences": num_slots, "cache": num_pages}))
    num_on_device = len(more) - num_host_pools(manifest)
    is_sealed, shared = manifest.policy.sealing is not None, list[Spec]()
    num_own = manifest.num_exact_pages(num_slots) if is_sealed else num_pages
    above = manifest.model.owners_above if manifest.model.is_blind else ()
    counts = {owner: num_upper_pages if owner in above else num_own for owner in owners}
    own = [torch_specs(layout.written(counts[owner], owner)) for owner in owners]
    if manifest.policy.insertion.owners_share:
        own, shared = [[] for _ in own], torch_specs(layout.written(num_pages * len(owners), owners[0]))
    together = partial(allocate_together, device=device)
    memory = _by_owner([[*specs, *state[:num_on_device]] for specs in own], together, shared)
    if num_on_device < len(more):
        mapped = partial(place_together, allocate=partial(mapped_host_memory, device=device))
        host = _by_owner([state[num_on_device:]] * len(owners), mapped)
        memory = [(*own, *on_host) for own, on_host in zip(memory, host, strict=True)]
    for pool in memory:
        for tensor, one in zip(pool[len(pool) - len(more) :], more, strict=True):
            if one.initial:
                tensor.fill_(one.initial)
    linear = [torch_specs(layout.linear_state(num_rows, layer)) for layer in manifest.model.linear_layers]
    return [*memory, *(_by_owner(linear, together) if linear else ())]


def upper_pools(manifest: Manifest, pools: Pools) -> Pools:
    """Return those that the upper graph is given: of owners that it reads, and what layers that keep a state read."""
    model, first = manifest.model, len(pools) - len(manifest.model.upper_linear)
    of_states = [pool[model.linear.first_read :] for pool in pools[first:]] if model.linear is not None else []
    return [*pools[manifest.upper_pools], *of_states]


def allocate_auxiliary_pools(manifest: Manifest, num_pages: int, device: str | torch.device = "cpu") -> Pools:
    """Return K and V of each layer that is run of the engine's auxiliary model, views of one allocation."""
    model = manifest.auxiliary_model
    assert model is not None
    layout = CacheLayout(model, manifest.dtype, manifest.dtype, manifest.page_size, Full())
    specs = [torch_specs(layout.written(num_pages, layer)) for layer in model.owners]
    return _by_owner(specs, partial(allocate_together, device=device))


def allocate_draft_pool(manifest: Manifest, num_pages: int, device: str | torch.device = "cpu") -> Pool:
    """Return K and V of the engine's draft head, views of one allocation."""
    assert manifest.draft_head is not None
    layout = CacheLayout(manifest.draft_head.model, manifest.dtype, manifest.dtype, manifest.page_size, Full())
    return _by_owner([torch_specs(layout.written(num_pages, 0))], partial(allocate_together, device=device))[0]


def num_host_pools(manifest: Manifest) -> int:
    """Return how many of an owner's tensors, the last ones, are in the host's memory."""
    return sum(pool.on_host for pool in manifest.cache_layout.state_pools)


def device_bytes(manifest: Manifest, pools: Pools) -> int:
    """Return the bytes of the pools' tensors where attention runs, of one that owners share once."""
    num_bytes = sum(tensor.nbytes for pool in pools for tensor in pool) - host_bytes(manifest, pools)
    if manifest.policy.insertion.owners_share:
        num_shared = len(pools[0]) - len(manifest.cache_layout.state_pools)
        num_bytes -= (len(pools) - 1) * sum(tensor.nbytes for tensor in pools[0][:num_shared])
    return num_bytes


def host_bytes(manifest: Manifest, pools: Pools) -> int:
    """Return the bytes of the pools' tensors in the host's memory."""
    count = num_host_pools(manifest)
    return sum(tensor.nbytes for pool in pools for tensor in pool[len(pool) - count :])


def _by_owner(
    own: Sequence[list[Spec]], allocate: Callable[[list[Spec]], list[Tensor]], shared: Sequence[Spec] = ()
) -> Pools:
    """Return tensors for every owner, in one allocation: those that all ``shared``, then its ``own``, as many each."""
    views, width = allocate([*shared, *itertools.chain.from_iterable(own)]), len(own[0])
    of_all, rest = views[: len(shared)], views[len(shared) :]
    starts = range(0, len(own) * width, width)
    return [(*(one.view(one.shape) for one in of_all), *rest[start : start + width]) for start in starts]
