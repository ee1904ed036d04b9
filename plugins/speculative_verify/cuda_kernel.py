"""SpeculativeVerify in Triton: one program per sequence walks its rows of logits until a draft is rejected."""

import triton
import triton.language as tl


@triton.jit
def _largest(logits, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit of a row and its lowest index."""
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = lane
    for start in tl.range(0, VOCAB, BLOCK):
        index = start + lane
        value = tl.load(logits + index, index < VOCAB, other=float("-inf"))
        better = value > best
        best = tl.where(better, value, best)
        place = tl.where(better, index, place)
    top = tl.max(best, axis=0)
    return top, tl.min(tl.where(best == top, place, VOCAB - 1), axis=0)


@triton.jit
def _softmax_state(logits, temperature, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit / temperature of a row, and the sum of exp(logit / temperature - largest)."""
    top, _ = _largest(logits, VOCAB, BLOCK)
    top = tl.div_rn(top, temperature)
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, VOCAB, BLOCK):
        index = start + lane
        value = tl.load(logits + index, index < VOCAB, other=float("-inf"))
        sums += tl.exp(tl.div_rn(value, temperature) - top)
    return top, tl.sum(sums, axis=0)


@triton.jit
def _weights(logits, proposal, num_probs, index, draft, rejected, temperature, top, total, VOCAB: tl.constexpr):
    """p, and max(p - q, 0) if the draft was rejected (else p), of the tokens `index`; 0 past the vocabulary."""
    value = tl.load(logits + index, index < VOCAB, other=float("-inf"))
    p = tl.div_rn(tl.exp(tl.div_rn(value, temperature) - top), total)
    if num_probs > 0:
        q = tl.load(proposal + index, (index < VOCAB) & rejected, other=0.0)
    else:
        q = tl.where((index == draft) & rejected, 1.0, 0.0)
    return p, tl.maximum(p - q, 0.0)


@triton.jit
def _draw(
    logits,
    proposal,
    num_probs,
    draft,
    rejected,
    uniform,
    temperature,
    top,
    total,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The lowest token of positive weight whose cumulative weight is above `uniform` times the sum of weights."""
    lane = tl.arange(0, BLOCK)
    p_sum = tl.full([], 0.0, tl.float32)
    residual_sum = tl.full([], 0.0, tl.float32)
    for start in tl.range(0, VOCAB, BLOCK):
        p, residual = _weights(
            logits, proposal, num_probs, start + lane, draft, rejected, temperature, top, total, VOCAB
        )  # fmt: skip
        p_sum += tl.sum(p, axis=0)
        residual_sum += tl.sum(residual, axis=0)
    has_residual = residual_sum > 0
    target = uniform * tl.where(has_residual, residual_sum, p_sum)
    found = tl.full([], VOCAB, tl.int32)
    last = tl.full([], 0, tl.int32)  # for a target that rounding put at the sum itself
    before = tl.full([], 0.0, tl.float32)
    start = tl.full([], 0, tl.int32)
    while (start < VOCAB) & (found == VOCAB):
        index = start + lane
        p, residual = _weights(logits, proposal, num_probs, index, draft, rejected, temperature, top, total, VOCAB)
        weight = tl.where(has_residual, residual, p)
        block_sum = tl.sum(weight, axis=0)
        if before + block_sum > target:
            above = (before + tl.cumsum(weight, axis=0) > target) & (weight > 0)
            found = tl.min(tl.where(above, index, VOCAB), axis=0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0, index, 0), axis=0))
        before += block_sum
        start += BLOCK
    return tl.where(found == VOCAB, last, found)


@triton.jit
def _greedy(logits, draft_ids, drafts, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """How many leading drafts are the argmax of their row, and the argmax after them."""
    count = drafts * 0
    _, token = _largest(logits, VOCAB, BLOCK)
    going = tl.load(draft_ids, count < drafts, other=-1) == token
    while going:
        count += 1
        _, token = _largest(logits + count.to(tl.int64) * VOCAB, VOCAB, BLOCK)
        going = tl.load(draft_ids + count, count < drafts, other=-1) == token
    return count, token


@triton.jit
def _accepts(logits, draft_ids, probs, num_probs, uniform, count, drafts, temperature, top, total, VOCAB: tl.constexpr):
    """Whether there is a draft `count` and it is accepted: uniform * q < p."""
    exists = count < drafts
    draft = tl.load(draft_ids + count, exists, other=0)
    row = count.to(tl.int64) * VOCAB
    p = tl.div_rn(tl.exp(tl.div_rn(tl.load(logits + row + draft), temperature) - top), total)
    q = tl.load(probs + row + draft, exists & (num_probs > 0), other=1.0)
    return exists & (tl.load(uniform + count * 2) * q < p)


@triton.jit
def _sample(
    logits, draft_ids, probs, num_probs, uniform, drafts, temperature, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """Leviathan et al. 2023, Algorithm 1: the number of accepted drafts and the token after them."""
    count = drafts * 0
    top, total = _softmax_state(logits, temperature, VOCAB, BLOCK)
    going = _accepts(logits, draft_ids, probs, num_probs, uniform, count, drafts, temperature, top, total, VOCAB)
    while going:
        count += 1
        top, total = _softmax_state(logits + count.to(tl.int64) * VOCAB, temperature, VOCAB, BLOCK)
        going = _accepts(logits, draft_ids, probs, num_probs, uniform, count, drafts, temperature, top, total, VOCAB)
    row = count.to(tl.int64) * VOCAB
    rejected = count < drafts
    draft = tl.load(draft_ids + count, rejected, other=0)
    number = tl.load(uniform + count * 2 + 1)
    token = _draw(
        logits + row, probs + row, num_probs, draft, rejected, number, temperature, top, total, VOCAB, BLOCK
    )  # fmt: skip
    return count, token


@triton.jit
def speculative_verify_kernel(
    logits,
    draft_ids,
    draft_start,
    draft_probs,
    temperature,
    uniform,
    num_sequences,
    num_probs,
    accepted,
    next_token,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    s = tl.program_id(0)
    begin = tl.load(draft_start + s)
    drafts = tl.load(draft_start + s + 1) - begin
    row = (begin + s).to(tl.int64)
    row_logits = logits + row * VOCAB
    heat = tl.load(temperature + s)
    if heat == 0:
        count, token = _greedy(row_logits, draft_ids + begin, drafts, VOCAB, BLOCK)
    else:
        probs = draft_probs + begin.to(tl.int64) * VOCAB
        count, token = _sample(
            row_logits, draft_ids + begin, probs, num_probs, uniform + row * 2, drafts, heat, VOCAB, BLOCK
        )  # fmt: skip
    tl.store(accepted + s, count)
    tl.store(next_token + s, token)
