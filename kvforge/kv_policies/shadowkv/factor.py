"""Factors one owner's K,V of a computed prompt: low-rank keys, landmarks, outliers and the tail (ShadowKV)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvforge.kv_policies.shadowkv.chunks import PromptChunks

BLOCK_TOKENS = 2048
"""Tokens whose keys are unrotated at a time: what bounds the memory that factoring takes."""


def factor_prompt(
    policy: PromptChunks,
    pool: tuple[Tensor, ...],
    num_tokens: int,
    prompt_pages: Tensor,
    compact_pages: Tensor,
    shadow_pages: Tensor,
    slot: int,
    rope: tuple[Tensor, Tensor],
) -> None:
    """Write what ShadowKV keeps of a prompt (arXiv 2410.21465, section 4.1), from its K,V in ``prompt_pages``.

    ``pool`` is (k_pool, v_pool, u, landmarks, is_outlier, sv, cached, counts, host_v) of one owner; pages are int64
    on its device, ``rope`` is (cos, sin), each ``[positions, head_dim / 2]`` float32. With K the keys before RoPE
    of all heads side by side, and V_r the ``rank`` leading eigenvectors of KᵀK: u = K V_r and sv = V_rᵀ, which is
    the truncated SVD of K. A landmark is the mean of a chunk's rotated keys; of each head, the chunks with the
    smallest cosine between it and any of their keys are outliers, ties to the lower chunk. Outliers and the tail go
    behind the places of selected chunks in ``compact_pages``, which may be pages of the prompt: they are written
    last.

    Also resets the slot's places to empty. The result depends on nothing but K, V and the policy.
    """
    k_pool, v_pool, u, landmarks, is_outlier, sv, cached, _, host_v = pool
    page_size, chunk = k_pool.shape[1], policy.chunk_size
    num_chunks = policy.num_chunks(num_tokens)

    basis = _leading_eigenvectors(_gram(k_pool, num_tokens, prompt_pages, rope), policy.rank)
    heads = basis.view(*k_pool.shape[2:], policy.rank)
    sv[slot] = heads.transpose(1, 2).to(sv.dtype)
    cached[slot] = -1

    similarity = torch.empty(num_chunks, k_pool.shape[2], device=k_pool.device)
    for start, rotated, keys in _blocks(k_pool, num_tokens, prompt_pages, rope):
        tokens = torch.arange(start, start + len(keys), device=k_pool.device)
        u.flatten(0, 1)[_rows(shadow_pages, tokens, page_size)] = (keys @ basis).to(u.dtype)
        values = v_pool.flatten(0, 1)[_rows(prompt_pages, tokens, page_size)]
        host_v.flatten(0, 1)[_rows(shadow_pages, tokens, page_size).to(host_v.device)] = values.to(host_v.device)
        count = min(len(keys) // chunk, num_chunks - start // chunk)
        if count > 0:
            chunks = torch.arange(start // chunk, start // chunk + count, device=k_pool.device)
            members = rotated[: count * chunk].unflatten(0, (count, chunk))
            means = members.mean(dim=1)
            landmarks.flatten(0, 1)[_rows(shadow_pages, chunks, page_size // chunk)] = means.to(landmarks.dtype)
            cosines = torch.nn.functional.cosine_similarity(members, means[:, None], dim=-1)
            similarity[chunks] = cosines.amin(dim=1)

    outliers = similarity.argsort(dim=0, stable=True)[: policy.num_outlier_chunks].sort(dim=0).values
    marks = torch.zeros_like(similarity, dtype=torch.uint8).scatter_(0, outliers, 1)
    rows = _rows(shadow_pages, torch.arange(num_chunks, device=k_pool.device), page_size // chunk)
    is_outlier.flatten(0, 1)[rows] = marks

    exact = _exact_tokens(outliers, num_chunks, chunk, num_tokens)
    source = _rows(prompt_pages, exact, page_size)
    places = torch.arange(len(exact), device=k_pool.device) + policy.num_selected(num_tokens) * chunk
    target = _rows(compact_pages, places, page_size)
    head = torch.arange(k_pool.shape[2], device=k_pool.device)
    for elements in (k_pool.flatten(0, 1), v_pool.flatten(0, 1)):
        elements[target] = elements[source, head]


def _rows(pages: Tensor, indices: Tensor, page_size: int) -> Tensor:
    """Where the entries ``indices`` of a sequence lie in a pool of pages that is flattened to rows."""
    return pages[indices // page_size] * page_size + indices % page_size


def _blocks(
    k_pool: Tensor, num_tokens: int, pages: Tensor, rope: tuple[Tensor, Tensor]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (first token, rotated keys [T, Hkv, d], keys before RoPE [T, Hkv * d]) in fp32, of whole pages."""
    page_size = k_pool.shape[1]
    cos, sin = rope
    step = max(BLOCK_TOKENS // page_size, 1) * page_size
    for start in range(0, num_tokens, step):
        end = min(start + step, num_tokens)
        rotated = k_pool[pages[start // page_size : -(-end // page_size)]].flatten(0, 1)[: end - start].float()
        first, second = rotated.chunk(2, dim=-1)
        c, s = cos[start:end, None], sin[start:end, None]
        yield start, rotated, torch.cat((first * c + second * s, second * c - first * s), dim=-1).flatten(1)


def _gram(k_pool: Tensor, num_tokens: int, pages: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """KᵀK [Hkv * d, Hkv * d] of the keys before RoPE: products of blocks in fp32, their sum in fp64."""
    width = k_pool.shape[2] * k_pool.shape[3]
    gram = torch.zeros(width, width, dtype=torch.float64, device=k_pool.device)
    for _, _, keys in _blocks(k_pool, num_tokens, pages, rope):
        gram += keys.T @ keys
    return gram


def _leading_eigenvectors(gram: Tensor, rank: int) -> Tensor:
    """[n, rank] fp32: eigenvectors of the largest eigenvalues, descending; zeros beyond n. NaN, and with them the
    sequence's logits, where the keys are not finite or overflow: that ends one sequence, not the step."""
    if not gram.isfinite().all():
        return torch.full((len(gram), rank), torch.nan, device=gram.device)
    vectors = torch.linalg.eigh(gram).eigenvectors.flip(1)[:, :rank].float()
    return torch.nn.functional.pad(vectors, (0, rank - vectors.shape[1]))


def _exact_tokens(outliers: Tensor, num_chunks: int, chunk: int, num_tokens: int) -> Tensor:
    """[o * chunk + tail, Hkv]: the positions of the tokens that keep K,V, from ``outliers`` [o, Hkv] ascending."""
    inside = torch.arange(chunk, device=outliers.device)[:, None]
    members = (outliers[:, None] * chunk + inside).flatten(0, 1)
    tail = torch.arange(num_chunks * chunk, num_tokens, device=outliers.device)
    return torch.cat((members, tail[:, None].expand(-1, outliers.shape[1])))
