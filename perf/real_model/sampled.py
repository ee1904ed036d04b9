"""A model's own answers in large batches, drawn by transformers: for a GPU on which no engine of the model is built."""

from collections.abc import Sequence
from typing import Any

import torch

from kvforge.checkpoint import Checkpoint
from kvforge.common.errors import KvforgeError


def as_transformers(checkpoint: Checkpoint, device: str, dtype: torch.dtype) -> Any:
    """Return the checkpoint as transformers' own model of its family.

    Raises:
        KvforgeError: transformers gives the family's tensors other names.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**checkpoint.hf_config), dtype=dtype)
    weights = {name: checkpoint.read_raw(name).to(dtype) for name in checkpoint.file_of_tensor}
    found = model.load_state_dict(weights, strict=False)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    if odd := sorted({*found.missing_keys} - tied | {*found.unexpected_keys}):
        raise KvforgeError(f"transformers' model and {checkpoint.path} do not both have {odd[0]}.")
    model.tie_weights()
    return model.to(device).eval()


@torch.inference_mode()
def draw_answers(
    model: Any,
    prompts: Sequence[Sequence[int]],
    ends: Sequence[int],
    max_tokens: int,
    seed: int,
    temperature: float = 0.8,
    top_p: float = 0.95,
) -> list[list[int]]:
    """Return at most ``max_tokens`` tokens after each prompt, up to one of ``ends``, which is left out; all prompts are
    one batch, padded at their beginnings."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[ends[0]] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    torch.manual_seed(seed)
    found = model.generate(
        ids.to(model.device), attention_mask=mask.to(model.device), do_sample=True, temperature=temperature,
        top_p=top_p, top_k=0, max_new_tokens=max_tokens, pad_token_id=ends[0], eos_token_id=list(ends),
    )  # fmt: skip
    return [_until(row, ends) for row in found[:, longest:].tolist()]


def _until(tokens: list[int], ends: Sequence[int]) -> list[int]:
    return tokens[: next((place for place, token in enumerate(tokens) if token in ends), len(tokens))]
