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
    """Same arguments and result as `plugins.landmark_select`."""
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
