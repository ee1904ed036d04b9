"""Generation over a predicted cache in plain torch: the definition of what engines do."""

from collections.abc import Sequence

import torch

from kvforge.common.exact_intervals import ExactTokens, Intervals
from kvforge.prediction.filled_cache import PredictedCache, compute
from kvforge.prediction.importance import importance
from kvforge.prediction.predictor import KVPredictor
from kvforge.swiftkv import SwiftKVForCausalLM, make_layout


@torch.inference_mode()
def predicted_prompt(
    base: SwiftKVForCausalLM, predictor: KVPredictor, prompt: Sequence[int], exact: ExactTokens, capacity: int
) -> tuple[PredictedCache, Intervals]:
    """Return the predicted cache of a prompt, with room for ``capacity`` tokens, and what of it is to be computed."""
    ids = torch.tensor([list(prompt)])
    auxiliary = make_layout(predictor.prediction.auxiliary, len(prompt))
    inputs = predictor.inputs(ids, auxiliary)
    predicted = predictor.predict(inputs, base, make_layout(base.sizes, len(prompt)))
    scores = importance(predictor, inputs, auxiliary).tolist() if exact.share else ()
    return PredictedCache(predicted, capacity), exact.intervals(len(prompt), scores)


@torch.inference_mode()
def generate(
    base: SwiftKVForCausalLM,
    predictor: KVPredictor,
    prompt: Sequence[int],
    max_tokens: int,
    exact: ExactTokens | None = None,
    stop_ids: frozenset[int] = frozenset(),
) -> list[int]:
    """Return up to ``max_tokens`` greedy tokens, the last one of ``stop_ids`` where there is one.

    The auxiliary model runs over the whole prompt and its maps fill the base's cache; the base then computes the
    intervals of ``exact`` from left to right, each over the cache as it is by then, of which the last one's last token
    gives the first token. Generated tokens are computed by the base (arXiv 2410.08391, section 3).
    """
    exact = exact or ExactTokens()
    cache, intervals = predicted_prompt(base, predictor, prompt, exact, len(prompt) + max_tokens)
    tokens = list(prompt)
    logits = torch.empty(0)
    for start, end in intervals:
        logits = compute(base, cache, torch.tensor([tokens[start:end]]), start)
    for _ in range(max_tokens):
        tokens.append(int(logits.argmax()))
        if tokens[-1] in stop_ids or len(tokens) == len(prompt) + max_tokens:
            break
        logits = compute(base, cache, torch.tensor([tokens[-1:]]), len(tokens) - 1)
    return tokens[len(prompt) :]
