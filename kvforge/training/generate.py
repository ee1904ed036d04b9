"""Greedy generation with the plain model: no cache, several prompts at a time."""

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from kvforge.evaluation.score import MAX_ANSWER_TOKENS
from kvforge.training.model import LanguageModel
from kvforge.training.tokenizer import EOS_ID


@torch.inference_mode()
def greedy(
    model: LanguageModel, prompts: Sequence[list[int]], stop_ids: frozenset[int], max_tokens: int
) -> list[list[int]]:
    """Continuations of the prompts up to a stop token (kept) or `max_tokens`, without a cache."""
    sequences = [list(prompt) for prompt in prompts]
    active = list(range(len(prompts)))
    for _ in range(max_tokens):
        if not active:
            break
        width = max(len(sequences[i]) for i in active)
        ids = torch.tensor([sequences[i] + [EOS_ID] * (width - len(sequences[i])) for i in active])
        last = torch.tensor([len(sequences[i]) - 1 for i in active])
        hidden = model.model(ids)[torch.arange(len(active)), last]
        for i, token in zip(active, model.head(hidden).float().argmax(-1).tolist(), strict=True):
            sequences[i].append(token)
        active = [i for i in active if sequences[i][-1] not in stop_ids]
    return [sequence[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]


class PlainGenerator:
    """Prompts to texts with the plain model, for scoring without an engine."""

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, batch: int = 20) -> None:
        self._model, self._tokenizer, self._batch = model, tokenizer, batch
        self._stop = frozenset({EOS_ID, *(tokenizer.encode(s, add_special_tokens=False).ids[-1] for s in (".", "\n"))})

    def count_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def __call__(self, prompts: Sequence[str]) -> list[str]:
        texts: list[str] = []
        for start in tqdm(range(0, len(prompts), self._batch), desc="prompts", leave=False):
            ids = [self._tokenizer.encode(prompt).ids for prompt in prompts[start : start + self._batch]]
            found = greedy(self._model, ids, self._stop, MAX_ANSWER_TOKENS)
            texts += [self._tokenizer.decode(tokens) for tokens in found]
        return texts
