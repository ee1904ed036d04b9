"""The steps that compute a probe: tokens behind a sequence's cache whose K and V nobody keeps."""

from collections.abc import Iterator

import torch

from kvforge.manifest import Manifest
from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.requests.sequence import Sequence
from kvforge.runtime.sessions.inputs import LowerStep

MAX_PIECE = 128
"""Tokens that are computed together: all of them go past a cut, and have logits that nobody wants."""


def probe_steps(sequence: Sequence, index: int, manifest: Manifest, config: RuntimeConfig) -> Iterator[LowerStep]:
    """Yield what ``lower`` takes for the pieces of a probe. Its K and V go behind those of the ``num_computed`` tokens,
    into the rest of their last page, which no other sequence has as it is not full, and into the pages that follow all
    others in the pools. So do the policy's statistics of them."""
    probing, page_size = config.kv_policy.probing, config.page_size
    assert probing is not None
    computed = sequence.num_computed
    ids = probing.tokens(sequence.tokens[:computed].tolist(), manifest.policy_texts, index)
    scratch = range(probing.num_scratch_pages(page_size))
    num_pages = -(-computed // page_size)
    pages = [*sequence.pages[:num_pages], *(config.num_pages + page for page in scratch)]
    state_pages = [*sequence.state_pages[:num_pages], *(config.num_state_pages + page for page in scratch)]
    page_table, state_table = (torch.tensor([table], dtype=torch.int32) for table in (pages, state_pages))
    piece = min(MAX_PIECE, manifest.max_num_tokens)
    for start in range(0, len(ids), piece):
        part = torch.tensor(ids[start : start + piece], dtype=torch.int32)
        place = computed + start + torch.arange(len(part), dtype=torch.int32)
        length, columns = computed + start + len(part), -(-(computed + start + len(part)) // page_size)
        yield LowerStep(
            part,
            place,
            page_table[0, (place // page_size).long()] * page_size + place % page_size,
            torch.tensor([0, len(part)], dtype=torch.int32),
            torch.tensor([length], dtype=torch.int32),
            page_table[:, :columns].contiguous(),
            probing.inputs(state_table[:, :columns].contiguous(), len(part), computed if index + start > 0 else 0),
        )
