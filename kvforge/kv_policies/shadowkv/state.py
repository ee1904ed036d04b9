"""Factors prompts in the pools of all owners."""

from collections.abc import Sequence

import torch

from kvforge.common.errors import EngineError
from kvforge.kv_policies.shadowkv.chunks import PromptChunks
from kvforge.kv_policies.shadowkv.factor import factor_prompt
from kvforge.kv_policies.state import EngineMemory
from kvforge.kv_policies.transition import Transition

CACHED, COUNTS = 6, 7
"""The places in an owner's pool of the chunks that are there and of the counts of selected ones."""


class ShadowState:
    """What factored prompts are besides numbers: tensors in the pools, which the graphs read and write.

    Raises:
        EngineError: the engine's table of positions is shorter than its sequences may be.
    """

    def __init__(self, policy: PromptChunks, memory: EngineMemory) -> None:
        self._policy, self._pools = policy, memory.pools
        self._rope = memory.rope_tables()
        if len(self._rope[0]) < memory.max_seq_len:
            raise EngineError(
                f"the engine's table has {len(self._rope[0])} positions, but sequences may have {memory.max_seq_len} "
                "tokens; rebuild it with kvforge build."
            )

    @torch.inference_mode()
    def counters(self) -> dict[str, int]:
        """Return how many chunks all heads of all layers have selected so far, and how many of them were in place."""
        selected, reused = torch.stack([pool[COUNTS].sum((0, 1)) for pool in self._pools]).sum(0).tolist()
        return {"selected_chunks": selected, "reused_chunks": reused}

    @torch.inference_mode()
    def apply(self, transitions: Sequence[Transition]) -> None:
        """Factor prompts, in this order."""
        device = self._pools[0][0].device
        for transition in transitions:
            sequence = transition.sequence
            pages = (
                torch.tensor(numbers, device=device)
                for numbers in (transition.old_pages, sequence.pages, sequence.state_pages)
            )
            prompt_pages, compact_pages, shadow_pages = pages
            for pool in self._pools:
                factor_prompt(
                    self._policy,
                    pool,
                    sequence.num_prompt_tokens,
                    prompt_pages,
                    compact_pages,
                    shadow_pages,
                    sequence.slot,
                    self._rope,
                )
