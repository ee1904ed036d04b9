"""Carries out a step's factorings in the pools of all owners."""

import torch

from kvforge.errors import EngineError
from kvforge.kv_policies import ShadowKV
from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.pools import COUNTS, Pools
from kvforge.runtime.session import Session
from kvforge.runtime.shadowkv.factor import factor_prompt
from kvforge.runtime.shadowkv.factoring import Factoring


class ShadowState:
    """What factored prompts are besides numbers: tensors in ``pools``, which the graphs read and write.

    Raises:
        EngineError: the engine's table of positions is shorter than its sequences may be.
    """

    def __init__(self, session: Session, policy: ShadowKV, config: RuntimeConfig, pools: Pools) -> None:
        self._policy, self._pools = policy, pools
        self._rope = session.rope_tables
        if len(self._rope[0]) < config.max_seq_len:
            raise EngineError(
                f"the engine's table has {len(self._rope[0])} positions, but sequences may have {config.max_seq_len} "
                "tokens; rebuild it with kvforge build."
            )

    @torch.inference_mode()
    def chunk_counts(self) -> tuple[int, int]:
        """Return how many chunks all heads of all layers have selected so far, and how many of them were in place.
        Waits for the device: not for every step."""
        selected, reused = torch.stack([pool[COUNTS].sum((0, 1)) for pool in self._pools]).sum(0).tolist()
        return selected, reused

    @torch.inference_mode()
    def factor(self, factorings: list[Factoring]) -> None:
        """Factor prompts, in this order: see ``Factoring`` for why it matters."""
        device = self._pools[0][0].device
        for factoring in factorings:
            sequence = factoring.sequence
            pages = (
                torch.tensor(numbers, device=device)
                for numbers in (factoring.prompt_pages, sequence.pages, sequence.shadow_pages)
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
