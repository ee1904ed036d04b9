"""A session whose tokens depend on everything it reads back from the pages, so any paging error shows."""

import dataclasses
import zlib
from typing import Any

import numpy as np
import torch

from kvforge.manifest import SCHEMA_VERSION, Manifest
from kvforge.runtime.sessions.session import Session
from model_defs import ModelConfig, RopeConfig
from plugins.speculative_verify.reference import reference

POISON = -7.0


def changed(manifest: Manifest, **changes: Any) -> Manifest:
    """A manifest with other values of its fields, or of its model's."""
    model = changes.pop("model", manifest.model)
    of_model = {field.name for field in dataclasses.fields(ModelConfig)} & changes.keys()
    sizes = {name: changes.pop(name) for name in of_model}
    if "num_layers" in sizes:
        sizes.setdefault("layer_windows", (0,) * sizes["num_layers"])
    return dataclasses.replace(manifest, model=dataclasses.replace(model, **sizes), **changes)


def fake_manifest(**changes: Any) -> Manifest:
    """A manifest of a model that does not exist."""
    model = ModelConfig(
        model_type="fake",
        vocab_size=64,
        hidden_size=2,
        intermediate_size=1,
        num_layers=2,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        rms_norm_eps=1e-6,
        max_position=512,
        rope=RopeConfig(),
        layer_windows=(0, 0),
        cut=1,
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        kvforge_version="0",
        target="cpu",
        isa=(),
        torch_version="",
        dtype="float32",
        weight_dtype="float32",
        kv_dtype="float32",
        kv_scales=(),
        model=model,
        page_size=4,
        max_num_seqs=8,
        max_num_tokens=64,
        max_seq_len=128,
        max_draft_len=0,
        num_parameters=0,
        weights_file_bytes=0,
        checkpoint_sha256="",
        operators={},
        files={},
    )
    return changed(manifest, **changes)


class FakeSession(Session):
    """``lower`` stores (token, position) of owner 0 and (position, token) of owner 1 where the step says.

    ``upper`` reads each survivor's whole context back through the page table and returns pseudo-random logits
    of it, or of its last ``memory`` tokens, so that its texts repeat themselves. Unwritten slots hold a poison that is
    no token.
    """

    def __init__(self, seed=0, memory=0, **changes):
        self.manifest = fake_manifest(**changes)
        self.seed = seed
        self.memory = memory
        self.num_lower_calls = self.num_upper_calls = 0
        self.max_tokens_seen = 0
        self.fail_on = lambda session: False

    def allocate_pools(self, num_pages, state_pages=0, num_slots=None):
        shape = (num_pages, self.manifest.page_size, 1, 2)
        self.pools = [(torch.full(shape, POISON), torch.full(shape, POISON)) for _ in range(2)]
        return self.pools

    def poison_pages(self, pages):
        for k, v, *_ in self.pools:
            k[pages] = POISON
            v[pages] = POISON

    def shifts(self, shadow, num_seqs):
        """Cache index less position of each sequence's tokens."""
        return [0] * num_seqs

    def context(self, s, end, page_table, pools, shadow):
        """K of owner 0 of a sequence's tokens before ``end``, read back through the page table."""
        pages = page_table[s, : -(-end // self.manifest.page_size)].long()
        context = pools[0][0][pages].reshape(-1, 2)[:end]
        assert torch.equal(context[:, 1], torch.arange(float(end))), "positions read back are wrong"
        assert torch.equal(pools[1][0][pages].reshape(-1, 2)[:end], context.flip(-1))
        assert torch.equal(pools[1][1][pages].reshape(-1, 2)[:end], -context)
        return context

    def lower(self, step, pools):
        self.num_lower_calls += 1
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in step.inputs)
        input_ids, positions, slot_mapping, query_start, kv_length, page_table, shadow = step[:7]
        num_tokens, num_seqs = len(input_ids), len(kv_length)
        self.max_tokens_seen = max(self.max_tokens_seen, num_tokens)
        assert 1 <= num_tokens <= self.manifest.max_num_tokens and 1 <= num_seqs <= self.manifest.max_num_seqs
        assert len(positions) == len(slot_mapping) == num_tokens
        assert query_start[0] == 0 and query_start[-1] == num_tokens and len(query_start) == num_seqs + 1
        assert page_table.shape[0] == num_seqs
        start, shifts = query_start.tolist(), self.shifts(shadow, num_seqs)
        for s in range(num_seqs):
            length = int(kv_length[s]) - shifts[s]
            expected = torch.arange(length - (start[s + 1] - start[s]), length)
            assert torch.equal(positions[start[s] : start[s + 1]].long(), expected)
        assert len(set(slot_mapping.tolist())) == num_tokens, "two tokens in one slot"
        stored = torch.stack([input_ids.float(), positions.float()], dim=-1)[:, None]
        for owner, (k, v, *_) in enumerate(pools):
            k.view(-1, 1, 2)[slot_mapping.long()] = stored if owner == 0 else stored.flip(-1)
            v.view(-1, 1, 2)[slot_mapping.long()] = -stored
        if self.fail_on(self):
            raise RuntimeError("the fake device is on fire")
        return stored[:, 0].clone()

    def upper(self, step, pools):
        self.num_upper_calls += 1
        hidden, survivor_index, survivor_start, positions, kv_length, page_table, shadow = step[:7]
        assert len(survivor_index) > 0 and survivor_index.dtype == survivor_start.dtype == torch.int32
        assert survivor_start[0] == 0 and survivor_start[-1] == len(survivor_index)
        starts, logits, shifts = survivor_start.tolist(), [], self.shifts(shadow, len(kv_length))
        for s in range(len(kv_length)):
            length = int(kv_length[s]) - shifts[s]
            for r in range(starts[s], starts[s + 1]):
                row = int(survivor_index[r])
                end = int(positions[row]) + 1
                assert end == length - (starts[s + 1] - 1 - r), "survivors that are not their sequence's last tokens"
                context = self.context(s, end, page_table, pools, shadow)
                assert torch.equal(hidden[row], context[-1])
                logits.append(context_logits(context[-self.memory :, 0], self.seed, self.manifest.vocab_size))
        return torch.from_numpy(np.stack(logits))

    def verify(self, step):
        logits, draft_ids, draft_start, draft_probs, temperature, uniform = step
        assert self.manifest.max_draft_len > 0
        assert len(logits) == len(draft_ids) + len(temperature) == len(uniform)
        assert len(draft_probs) in (0, len(draft_ids)) and draft_start[-1] == len(draft_ids)
        assert all(values.dtype == torch.float32 for values in (logits, draft_probs, temperature, uniform))
        return reference(logits, draft_ids, draft_start, draft_probs, temperature, uniform)


def context_logits(tokens, seed, vocab_size):
    """Pseudo-random float32 logits of a context."""
    digest = zlib.crc32(np.asarray(tokens, dtype=np.int32).tobytes(), seed)
    return (3 * np.random.default_rng(digest).standard_normal(vocab_size)).astype(np.float32)
