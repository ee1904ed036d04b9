"""The definition of LandmarkSelect in plain torch."""

import torch
from torch import Tensor


def reference(
    q: Tensor,
    landmarks: Tensor,
    is_outlier: Tensor,
    query_start: Tensor,
    table: Tensor,
    num_chunks: Tensor,
    num_selected: Tensor,
    scale: float,
    max_selected: int,
) -> Tensor:
    """The chunks that each of S sequences attends to (ShadowKV, arXiv 2410.21465, section 4.1 and algorithm 2).

    q: [T, heads, head_dim] float32 or bfloat16, rotated; a sequence's query is its last row. landmarks:
    [pages, chunks_per_page, kv_heads, head_dim] in q's dtype. is_outlier: [pages, chunks_per_page, kv_heads]
    uint8, not 0 = never selected. query_start: [S+1] int32 from 0 to T. table: [S, Ms] int32, the pages of each
    sequence's chunks; chunk m is chunk m % chunks_per_page of page table[s, m // chunks_per_page]. num_chunks,
    num_selected: [S] int32. Result: [S, kv_heads, max_selected] int32: chunks in ascending order, then -1.

    A chunk's score is the largest over the query heads of its KV head of softmax(scale * q . landmark), taken
    over the chunks that are not outliers, in float32 (compared as logarithms, which do not underflow; one that is
    not a number counts as the lowest). The num_selected chunks of the highest scores are selected, the lower of
    equals first; all where there are fewer; none for a sequence that has no chunks or no query.
    Raises RuntimeError on a wrong shape or dtype, and on a count or a page outside its range.
    """
    sequences, kv_heads = len(num_chunks), landmarks.shape[2]
    selected = torch.full((sequences, kv_heads, max_selected), -1, dtype=torch.int32)
    for s in range(sequences):
        for head in range(kv_heads) if query_start[s] < query_start[s + 1] else ():
            chunks, scores = candidates(q, landmarks, is_outlier, query_start, table, num_chunks, scale, s, head)
            best = chunks[scores.argsort(descending=True, stable=True)[: int(num_selected[s])]]
            selected[s, head, : len(best)] = best.sort().values.int()
    return selected


def candidates(
    q: Tensor,
    landmarks: Tensor,
    is_outlier: Tensor,
    query_start: Tensor,
    table: Tensor,
    num_chunks: Tensor,
    scale: float,
    s: int,
    head: int,
) -> tuple[Tensor, Tensor]:
    """The chunks of sequence s that are no outliers of a KV head, ascending, and the logarithms of their scores."""
    kv_heads, chunks_per_page = landmarks.shape[2], landmarks.shape[1]
    index = torch.arange(int(num_chunks[s]))
    page, place = table[s, index // chunks_per_page].long(), index % chunks_per_page
    chunks = index[is_outlier[page, place, head] == 0]
    page, place = table[s, chunks // chunks_per_page].long(), chunks % chunks_per_page
    query = q[int(query_start[s + 1]) - 1].view(kv_heads, -1, q.shape[2])[head].float()
    logits = (query @ landmarks[page, place, head].float().T) * scale
    scores = logits.log_softmax(dim=-1)
    return chunks, torch.where(scores.isnan(), float("-inf"), scores).amax(0)
