"""What a loaded engine offers, and the one place that chooses the code for its target."""

import importlib
from pathlib import Path
from typing import Protocol

from torch import Tensor

from kvforge.engine import Manifest
from kvforge.errors import EngineError
from kvforge.runtime.pools import Pools
from kvforge.runtime.step_inputs import LowerStep, UpperStep

_MODULES = {
    "cpu": "kvforge.runtime.cpu_session",
    "cuda": "kvforge.runtime.cuda_session",
    "tensorrt": "kvforge.runtime.tensorrt_session",
}


class StepFunctions(Protocol):
    """The two graphs of one engine, and memory for their K,V pools.

    Pools are those of all owners in ascending order, on the session's device, each
    (k_pool, v_pool) ``[num_pages, page_size, num_kv_heads, head_dim]`` in the manifest's ``kv_dtype`` or, where it
    has dynamic scales, (k_pool, v_pool, k_scales, v_scales). With ShadowKV they also hold what ``pools.shadow_specs``
    says, and a step says by ``shadow`` which of its sequences are factored; other engines ignore that.
    """

    manifest: Manifest

    def allocate_pools(self, num_pages: int, shadow_pages: int = 0, num_slots: int | None = None) -> Pools:
        """Return pools; their content is arbitrary. ``shadow_pages`` and ``num_slots`` (default: ``max_num_seqs``) are
        of ShadowKV's pages and sequences."""

    def lower(self, step: LowerStep, pools: Pools) -> Tensor:
        """Layers below the cut and all K,V writes for T tokens; returns hidden ``[T, hidden_size]`` on its device."""

    def upper(self, step: UpperStep, pools: Pools) -> Tensor:
        """Layers above the cut for R survivors; returns logits ``[R, vocab_size]`` float32 on the CPU."""


class Session(StepFunctions, Protocol):
    """All graphs of one engine."""

    @property
    def rope_tables(self) -> tuple[Tensor, Tensor]:
        """cos and sin of every position, each ``[max_seq_len, head_dim / 2]`` float32 on the session's device.

        Raises:
            EngineError: the engine's KV policy has no use for them, so that it was built without.
        """

    def early_exit(self, hidden: Tensor, survivor_index: Tensor) -> Tensor:
        """The head on the hidden state entering the cut layer, for R survivors; returns logits ``[R, vocab_size]``
        float32 on the CPU. Arguments as ``UpperStep``'s.

        Raises:
            EngineError: the engine was built without that head.
        """

    def verify(
        self,
        logits: Tensor,
        draft_ids: Tensor,
        draft_start: Tensor,
        draft_probs: Tensor,
        temperature: Tensor,
        uniform: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Which of D drafts of S sequences are accepted and the token after them: (accepted, next_token), int32
        ``[S]`` on the CPU. Arguments as ``plugins.speculative_verify``'s; ``logits`` are ``upper``'s, of each
        sequence's last token and its drafts.

        Raises:
            EngineError: the engine was built with ``max_draft_len`` 0.
        """


def load_session(engine_dir: str | Path, manifest: Manifest) -> Session:
    """Load an engine for the target it was built for.

    Raises:
        EngineError: this machine, torch or kvforge is not what it was built for, or one of its files is damaged.
    """
    if manifest.target not in _MODULES:
        raise EngineError(
            f"{engine_dir} was built for target {manifest.target}, which this runtime does not run; rebuild it for "
            f"{', '.join(_MODULES)}."
        )
    return importlib.import_module(_MODULES[manifest.target]).load_session(Path(engine_dir), manifest)
