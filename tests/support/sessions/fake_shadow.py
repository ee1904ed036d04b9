"""The fake session with ShadowKV: factored sequences' tokens depend on all that is kept of them."""

import random

import torch

from kvforge.common.dtypes import torch_specs
from kvforge.kv_policies.shadowkv import ShadowKV
from kvforge.kv_policies.shadowkv.state import COUNTS
from tests.support.sessions.fake import POISON, FakeSession

POLICY = ShadowKV(rank=2, chunk_size=2, sparse_budget=4, num_outlier_chunks=1, num_local_tokens=2)
"""Prompts of 10 tokens and more are factored; the rank is that of the keys, so that they come back as they were."""


class FakeShadowSession(FakeSession):
    """RoPE does nothing here. In each step each owner of a factored sequence has other chunks brought into its places,
    as the graphs do, and finds those in the others that it brought there before; ``upper`` then puts the whole context
    together from factors, host values, outliers, tail and generated tokens.
    """

    def __init__(self, seed=0, **changes):
        super().__init__(seed, kv_policy=POLICY.name, kv_policy_parameters=POLICY.parameters, **changes)
        self.num_factored_rows = 0
        self._random = random.Random(seed)
        self._poisoned = None

    @property
    def rope_tables(self):
        return torch.ones(self.manifest.max_seq_len, 1), torch.zeros(self.manifest.max_seq_len, 1)

    def allocate_pools(self, num_pages, state_pages=0, num_slots=None):
        specs = torch_specs(
            self.manifest.cache_layout.state({"pages": state_pages, "sequences": num_slots, "cache": num_pages})
        )
        super().allocate_pools(num_pages)
        self.pools = [(*kv, *(torch.full(shape, 99, dtype=dtype) for shape, dtype in specs)) for kv in self.pools]
        for pool in self.pools:
            pool[COUNTS].zero_()
        return self.pools

    def poison_shadow_pages(self, pages, slots):
        if self._poisoned == (pages, slots):
            return
        self._poisoned = list(pages), list(slots)
        for _, _, u, landmarks, is_outlier, sv, cached, _, host_v in self.pools:
            for tensor in (u, landmarks, host_v):
                tensor[pages] = POISON
            is_outlier[pages], sv[slots], cached[slots] = 7, POISON, 99

    def shifts(self, shadow, num_seqs):
        if not shadow:
            return [0] * num_seqs
        slot, table, num_chunks, num_selected = shadow
        assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in shadow)
        assert len(slot) == len(table) == len(num_chunks) == len(num_selected) == num_seqs and num_chunks.any()
        assert torch.equal(slot >= 0, num_chunks > 0) and not num_selected[slot < 0].any()
        assert (num_selected[slot >= 0] == POLICY.max_selected).all()
        return [
            min(POLICY.max_selected + POLICY.num_outlier_chunks - m, 0) * 2 if m else 0 for m in num_chunks.tolist()
        ]

    def lower(self, step, pools):
        hidden = super().lower(step, pools)
        shadow, query_start = step.state, step.query_start
        for s in range(len(step.kv_length)) if shadow else ():
            if shadow[0][s] >= 0 and query_start[s] < query_start[s + 1]:
                assert query_start[s + 1] - query_start[s] == 1, "several tokens of a factored sequence in a step"
                for pool in pools:
                    self._bring_in_chunks(s, step.page_table, pool, shadow)
        return hidden

    def _shadow_of(self, s, pool, shadow):
        """The prompt's chunks of one owner as factors, landmarks and host have them: K, V [m, 2, 2] and marks [m]."""
        slot, table, num_chunks, _ = shadow
        pages, count = table[s].long(), int(num_chunks[s])
        _, _, u, landmarks, is_outlier, sv, _, _, host_v = pool
        keys = (u[pages].reshape(-1, 2)[: 2 * count] @ sv[slot[s], 0]).round().view(count, 2, 2)
        means = landmarks[pages].reshape(-1, 2)[:count]
        assert torch.equal(means, keys.mean(1)), "landmarks of another sequence"
        return keys, host_v[pages].reshape(-1, 2)[: 2 * count].view(count, 2, 2), is_outlier[pages].flatten()[:count]

    def _bring_in_chunks(self, s, page_table, pool, shadow):
        keys, values, marks = self._shadow_of(s, pool, shadow)
        slot, places = int(shadow[0][s]), POLICY.max_selected
        cached = pool[6][slot, 0]
        k, v = (x[page_table[s].long()].reshape(-1, 2) for x in pool[:2])
        for place, chunk in enumerate(cached.tolist()):
            if chunk >= 0:
                assert torch.equal(k[2 * place : 2 * place + 2], keys[chunk]), "a place has lost its chunk"
                assert torch.equal(v[2 * place : 2 * place + 2], values[chunk])
        choice = sorted(self._random.sample(marks.eq(0).nonzero().flatten().tolist(), places))
        free = [place for place in range(places) if int(cached[place]) not in choice]
        page_size = self.manifest.page_size
        pool[COUNTS][slot, 0] += torch.tensor([places, places - len(free)])
        for place, chunk in zip(free, sorted(set(choice) - set(cached.tolist())), strict=True):
            cached[place] = chunk
            for i in range(2):
                page, offset = page_table[s, (2 * place + i) // page_size], (2 * place + i) % page_size
                pool[0][page, offset, 0], pool[1][page, offset, 0] = keys[chunk, i], values[chunk, i]

    def context(self, s, end, page_table, pools, shadow):
        if not shadow or shadow[0][s] < 0:
            return super().context(s, end, page_table, pools, shadow)
        self.num_factored_rows += 1
        contexts, shift = [], self.shifts(shadow, len(page_table))[s]
        for owner, pool in enumerate(pools):
            keys, values, marks = self._shadow_of(s, pool, shadow)
            k, v = (x[page_table[s].long()].reshape(-1, 2)[: end + shift] for x in pool[:2])
            tokens_of = (lambda x: x) if owner == 0 else (lambda x: x.flip(-1))
            assert torch.equal(v, -tokens_of(k)), "V is not K's"
            assert torch.equal(values, -tokens_of(keys)), "values on the host are not the keys'"
            selected, exact = k[: 2 * POLICY.max_selected], k[2 * POLICY.max_selected :]
            places = pool[6][int(shadow[0][s]), 0].long()
            assert torch.equal(selected.view(-1, 2, 2), keys[places]), "places hold other chunks than they should"
            outliers = marks.nonzero().flatten()
            assert len(outliers) == POLICY.num_outlier_chunks and not marks[places].any()
            assert torch.equal(exact[: 2 * len(outliers)], keys[outliers].reshape(-1, 2)), "outliers are wrong"
            context = torch.cat((keys.reshape(-1, 2), exact[2 * len(outliers) :]))
            contexts.append(tokens_of(context))
        assert torch.equal(contexts[0], contexts[1])
        assert torch.equal(contexts[0][:, 1], torch.arange(float(end))), "positions read back are wrong"
        return contexts[0]
