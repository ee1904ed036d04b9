"""lm-evaluation-harness in tests: its requests, and transformers' numbers beside an engine's."""

from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance

from kvforge.evaluation.lm_harness import EngineLM
from tests.support.rounding import config_of, logprob_error, model_error

TEXTS = ["the cat sat", " on the mat,", "naïve 😀", "zzzz 0123"]
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}</s>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"  # noqa: E501


def instance(kind: str, *arguments: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def loglikelihoods(model: EngineLM, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    return model.loglikelihood([instance("loglikelihood", *pair) for pair in pairs], disable_tqdm=True)


class Reference:
    """The same numbers from transformers, one text at a time."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.config, self.largest = config_of(checkpoint), 0.0

    def rounding(self, tokens: int) -> float:
        """How far a sum of this many log-probabilities of what was scored so far may be from an engine's."""
        off = model_error(self.config, 2 * tokens)
        return tokens * logprob_error(self.config.vocab_size, self.largest, off)

    @torch.no_grad()
    def score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        ids = torch.tensor([context + continuation])
        logits = self.model(ids).logits[0, :-1].double()
        self.largest = max(self.largest, float(logits.abs().max()))
        logprobs = logits.log_softmax(-1)[len(context) - 1 :]
        targets = ids[0, len(context) :]
        return float(logprobs.gather(1, targets[:, None]).sum()), bool((logprobs.argmax(-1) == targets).all())

    @torch.no_grad()
    def greedy(self, context: list[int], count: int) -> list[int]:
        ids = list(context)
        for _ in range(count):
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(context) :]


def byte_ids(text: str) -> list[int]:
    """PLAIN's tokenizer: a token for each byte."""
    return [byte + 3 for byte in text.encode()]
