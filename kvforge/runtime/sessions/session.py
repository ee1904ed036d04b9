"""What a loaded engine offers, and the one place that chooses the code for its target."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kvforge.common.errors import EngineError
from kvforge.manifest import Manifest
from kvforge.runtime.sessions.inputs import DraftStep, LowerStep, PredictStep, UpperStep, VerifyStep
from kvforge.runtime.sessions.missing import NO_DRAFT_HEAD, NO_DRAFTS, NO_EARLY_EXIT, NO_PREDICTION, NO_ROPE_TABLES
from kvforge.runtime.sessions.pools import Pool, Pools, allocate_pools

_MODULES = {
    "cpu": "kvforge.runtime.sessions.cpu",
    "cuda": "kvforge.runtime.sessions.cuda",
    "tensorrt": "kvforge.runtime.sessions.tensorrt",
}


class PendingTokens(Protocol):
    """Tokens that the device will have chosen once it has done what was queued before."""

    @property
    def ids(self) -> Tensor:
        """int32 [R] on the device, for what is queued after."""

    def collect(self) -> Tensor:
        """Wait for them, and return them on the CPU. Raises what went wrong on the device until then."""


class Session(ABC):
    """The graphs of one engine, and memory for its cache.

    Pools are those of all owners in ascending order, on the session's device, each
    (k_pool, v_pool) ``[num_pages, page_size, num_kv_heads, head_dim]`` in the manifest's ``kv_dtype`` or, where it
    has dynamic scales, (k_pool, v_pool, k_scales, v_scales), then the KV policy's ``state_pools``.
    Behind them are those of layers that keep a state.
    """

    manifest: Manifest
    device: torch.device = torch.device("cpu")

    def allocate_pools(
        self,
        num_pages: int,
        state_pages: int = 0,
        num_slots: int | None = None,
        upper_pages: int = 0,
        state_rows: int = 0,
    ) -> Pools:
        """Return zeroed pools of all owners in one allocation, but for those of the KV policy that lie in main memory,
        mapped for the device; see ``kvforge.runtime.sessions.pools``. ``state_pages`` and ``num_slots`` (default:
        ``max_num_seqs``) are pages and sequences of the KV policy's, ``upper_pages`` those of owners above a blind
        cut, ``state_rows`` states of layers."""
        return allocate_pools(self.manifest, num_pages, self.device, state_pages, num_slots, upper_pages, state_rows)

    @abstractmethod
    def lower(self, step: LowerStep, pools: Pools) -> Tensor:
        """Layers below the cut and all K,V writes for T tokens; returns hidden ``[T, hidden_size]`` on its device,
        with what a draft head reads at the end of its rows."""

    @abstractmethod
    def upper(self, step: UpperStep, pools: Pools) -> Tensor:
        """Layers above the cut for R survivors; returns logits ``[R, vocab_size]`` float32 on the CPU."""

    @property
    def runs_ahead(self) -> bool:
        """What follows can be queued while the device computes a step. Such a session has the next four methods, and
        takes ``LowerStep.chosen``."""
        return False

    def device_logits(self, step: UpperStep, pools: Pools) -> Tensor:
        """As ``upper``, but on the device and without waiting; valid until the next ``upper``."""
        return self.upper(step, pools)

    def host_logits(self, logits: Tensor) -> Tensor:
        """Wait for the logits of ``device_logits`` and return them on the CPU."""
        return logits

    def upload(self, tensor: Tensor) -> Tensor:
        """Queue a copy of a CPU tensor to the device."""
        return tensor

    def launch(self, choose: Callable[[], Tensor], num_rows: int) -> PendingTokens:
        """Queue ``choose``, which returns ``num_rows`` token ids, int32 on the device."""
        raise NotImplementedError

    def early_exit(self, hidden: Tensor, survivor_index: Tensor) -> Tensor:
        """The head on the hidden state entering the cut layer, for R survivors; returns logits ``[R, vocab_size]``
        float32 on the CPU. Arguments as ``UpperStep``'s.

        Raises:
            EngineError: the engine was built without that head.
        """
        raise EngineError(NO_EARLY_EXIT)

    def allocate_auxiliary_pools(self, num_pages: int) -> Pools:
        """Return K and V pools of the auxiliary model's layers, for the same pages as the engine's own.

        Raises:
            EngineError: the engine was built without a predictor.
        """
        raise EngineError(NO_PREDICTION)

    def predict(self, step: PredictStep, pools: Pools, auxiliary_pools: Pools) -> Tensor:
        """Fill the cache of T prompt tokens from the auxiliary model; returns its rotated queries
        ``[Q, layers, heads, head_dim]`` on the session's device.

        Raises:
            EngineError: the engine was built without a predictor.
        """
        raise EngineError(NO_PREDICTION)

    def upper_and_states(self, step: UpperStep, pools: Pools) -> tuple[Tensor, Tensor]:
        """As ``upper``, and what a draft head that reads above the cut works on: ``[R, H]`` on the session's device.

        Raises:
            EngineError: the engine was built without such a head.
        """
        raise EngineError(NO_DRAFT_HEAD)

    def allocate_draft_pool(self, num_pages: int) -> Pool:
        """Return the K and V pool of the draft head, for the same pages as the engine's own.

        Raises:
            EngineError: the engine was built without one.
        """
        raise EngineError(NO_DRAFT_HEAD)

    def draft(self, step: DraftStep, pool: Pool) -> tuple[Tensor, Tensor]:
        """One pass of the draft head: the next tokens int32 ``[R]`` on the CPU, and ``[R, H]`` for the next pass on the
        session's device.

        Raises:
            EngineError: the engine was built without one.
        """
        raise EngineError(NO_DRAFT_HEAD)

    def verify(self, step: VerifyStep) -> tuple[Tensor, Tensor]:
        """Which of D drafts of S sequences are accepted and the token after them: (accepted, next_token), int32
        ``[S]`` on the CPU.

        Raises:
            EngineError: the engine was built with ``max_draft_len`` 0.
        """
        raise EngineError(NO_DRAFTS)

    @property
    def rope_tables(self) -> tuple[Tensor, Tensor]:
        """cos and sin of every position, each ``[max_seq_len, head_dim / 2]`` float32 on the session's device.

        Raises:
            EngineError: the engine's KV policy has no use for them, so that it was built without.
        """
        raise EngineError(NO_ROPE_TABLES)

    def default_kv_cache_gib(self) -> float | None:
        """Return the cache size to use unless told otherwise, None where the cache is in main memory."""
        return None

    @property
    def captures_steps(self) -> bool:
        """The first decode step of each size takes longer, because it is captured."""
        return False

    def warm_up(self, pools: Pools, seq_len: int, max_num_seqs: int | None = None) -> None:  # noqa: B027
        """Do now what would otherwise be done in the first steps of up to ``max_num_seqs`` sequences (default: the
        engine's) of up to ``seq_len`` tokens. Writes nothing to the pools."""


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
    session: Session = importlib.import_module(_MODULES[manifest.target]).load_session(Path(engine_dir), manifest)
    return session
