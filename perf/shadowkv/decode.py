"""Decode steps of many sequences at one context, from synthetic caches: what ``perf.shadowkv.speed`` and
``perf.gpu.shadowkv`` time.

Prompts are not computed: K, V, the factors of K, landmarks and values are random numbers, so a step does the work of a
real one but the choice of chunks means nothing. A step is repeated at one position, where it chooses the same chunks
every time; before each step a share of the places in the compact caches is emptied, which sets the hit rate.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvforge.common.dtypes import torch_specs
from kvforge.kv_policies.shadowkv import ShadowKV
from kvforge.kv_policies.shadowkv.state import CACHED
from kvforge.manifest import Manifest
from kvforge.runtime.sessions.huge_pages import allocate_together, place_together
from kvforge.runtime.sessions.inputs import LowerStep
from kvforge.runtime.sessions.mapped_memory import mapped_host_memory
from kvforge.runtime.sessions.pools import Pools
from kvforge.runtime.sessions.session import Session
from kvforge.runtime.step.batch import StepBatch


@dataclass(frozen=True)
class Load:
    """``batch`` sequences with a prompt of ``context`` tokens, each about to compute the token after it."""

    context: int
    batch: int


@dataclass(frozen=True)
class Traffic:
    """Bytes that a decode step must at least read of K,V caches, where attention runs and in the host's memory."""

    device: float
    host: float


def policy_of(manifest: Manifest, load: Load) -> ShadowKV | None:
    """Return the policy if prompts of this length are factored."""
    policy = manifest.policy
    return policy if isinstance(policy, ShadowKV) and policy.is_factored(load.context) else None


def traffic(manifest: Manifest, load: Load, hit_rate: float) -> Traffic:
    """Return what all layers read in a step in which this share of the selected chunks is in place."""
    cache, policy = manifest.owner_cache, manifest.policy
    device, host = (
        read(cache, load.context, 1) for read in (policy.device_bytes_read, policy.host_tier.host_bytes_read)
    )
    if isinstance(policy, ShadowKV):
        tokens = policy.num_selected(load.context) * policy.chunk_size if policy.is_factored(load.context) else 0
        device -= hit_rate * tokens * cache.num_kv_heads * policy.rank * cache.element_bytes
    number = manifest.model.num_layers * load.batch
    return Traffic(number * device, number * (1 - hit_rate) * host)


def kept(manifest: Manifest, load: Load) -> tuple[int, int]:
    """Return the bytes (device, host) of the caches of a load, by the policy's formula."""
    cache, policy, number = manifest.owner_cache, manifest.policy, manifest.model.num_owners * load.batch
    return (
        number * policy.device_bytes(cache, load.context, 1),
        number * policy.host_tier.host_bytes(cache, load.context, 1),
    )


class SyntheticDecode:
    """The caches and the step tensors of a load.

    With ``share_values`` all owners have one piece of host memory for their values, where a machine has too little
    for each one's own; every layer still fetches what it would.
    """

    def __init__(self, session: Session, load: Load, share_values: bool = False) -> None:
        self._session, self._manifest, self.load = session, session.manifest, load
        self.policy = policy_of(self._manifest, load)
        page_size, batch = self._manifest.page_size, load.batch
        length = self.policy.compact_length(load.context) if self.policy else load.context
        pages = -(-(length + 1) // page_size)
        shadow_pages = self.policy.keeping.num_state_pages(load.context, page_size) if self.policy else 0
        if share_values and self.policy:
            self.pools = shared_value_pools(self._manifest, batch * pages, batch * shadow_pages, batch)
        elif self.policy:
            self.pools = session.allocate_pools(batch * pages, batch * shadow_pages, batch)
        else:
            self.pools = session.allocate_pools(batch * pages)
        fill(self.pools)
        each = torch.arange(batch, dtype=torch.int32)
        starts, shadow = _int32(range(batch + 1)), ()
        if self.policy:
            table = _int32(range(batch * shadow_pages)).view(batch, shadow_pages)
            num_chunks, selected = self.policy.num_chunks(load.context), self.policy.num_selected(load.context)
            shadow = (each, table, each * 0 + num_chunks, each * 0 + selected)
            for pool in self.pools:
                marks = pool[4].unflatten(0, (batch, shadow_pages)).flatten(1, 2)
                marks[:] = 0
                marks[:, : self.policy.num_outlier_chunks] = 1
                pool[CACHED].fill_(-1)
        slots = (each * pages + length // page_size) * page_size + length % page_size
        pages_of = _int32(range(batch * pages)).view(batch, pages)
        step = LowerStep(each + 3, each * 0 + load.context, slots, starts, each * 0 + length + 1, pages_of, shadow)
        self._batch = StepBatch(step, starts[:-1], starts)

    @torch.inference_mode()
    def step(self) -> Tensor:
        """Run both graphs; returns the likeliest tokens ``[batch]``, on the session's device where it has one."""
        hidden = self._session.lower(self._batch.lower, self.pools)
        upper = getattr(self._session, "device_logits", self._session.upper)
        return upper(self._batch.upper(hidden), self.pools).argmax(-1)

    def empty(self, share: float) -> None:
        """Empty this share of the places, drawn anew."""
        for pool in self.pools:
            gone = torch.rand(pool[CACHED].shape, device=pool[CACHED].device) < share
            pool[CACHED].masked_fill_(gone, -1)

    def places(self) -> Tensor:
        """The chunk in each place of every owner, a copy."""
        return torch.stack([pool[CACHED] for pool in self.pools])

    def seconds(self, steps: int, hit_rate: float, synchronize: Callable[[], None]) -> tuple[list[float], float]:
        """Time ``steps`` steps after two others; returns their seconds and the hit rate that was measured."""
        times, hits, places = [], 0, 0
        for index in range(-2, steps):
            if self.policy:
                self.empty(1 - hit_rate)
                before = self.places()
            synchronize()
            start = time.perf_counter()
            self.step()
            synchronize()
            if index >= 0:
                times.append(time.perf_counter() - start)
                if self.policy:
                    hits += int(((before == self.places()) & (before >= 0)).sum())
                    places += before.numel()
        return times, hits / places if places else 1.0


def shared_value_pools(manifest: Manifest, pages: int, shadow_pages: int, slots: int) -> Pools:
    """Return pools as ``allocate_pools`` does, but with one host_v for all owners."""
    device = "cuda" if manifest.target == "cuda" else "cpu"
    layout, owner = manifest.cache_layout, manifest.model.owners[0]
    *more, values = torch_specs(layout.state({"pages": shadow_pages, "sequences": slots, "cache": pages}))
    specs = torch_specs(layout.written(pages, owner)) + more
    views = allocate_together(specs * manifest.model.num_owners, device)
    host = place_together([values], partial(mapped_host_memory, device=device))[0]
    return [(*views[i : i + len(specs)], host) for i in range(0, len(views), len(specs))]


def fill(pools: Pools) -> None:
    """Write normal numbers into all floating-point tensors, a million over and over."""
    block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    for pool in pools:
        for index, tensor in enumerate(pool):
            if tensor.is_floating_point():
                small = 1 / math.sqrt(tensor.shape[-1]) if index == 2 else 1.0
                _tile(tensor.view(-1), (small * block).to(tensor.device, tensor.dtype))


def _tile(flat: Tensor, block: Tensor) -> None:
    whole = flat.numel() // block.numel() * block.numel()
    flat[:whole].view(-1, block.numel())[:] = block
    flat[whole:] = block[: flat.numel() - whole]


def _int32(values: range) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
