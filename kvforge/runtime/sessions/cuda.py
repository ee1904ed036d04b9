"""An engine of target ``cuda``: its graphs, its weights and its cache on one GPU."""

import itertools
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kvforge.common.errors import EngineError
from kvforge.manifest import Manifest
from kvforge.runtime.sessions.aot_package import Graph, load_graph, load_weights, unpacking_into
from kvforge.runtime.sessions.compatibility import (
    check_operators,
    check_torch,
    register_transitions,
    rope_tables,
)
from kvforge.runtime.sessions.cuda_decode import Capture, DecodeGraphs, GraphRecorder, batch_bucket, is_one_each
from kvforge.runtime.sessions.cuda_staging import CopiedTokens, StepBuffer, num_elements
from kvforge.runtime.sessions.inputs import LowerStep, UpperStep, VerifyStep, known_ids, policy_inputs
from kvforge.runtime.sessions.missing import NO_DRAFTS, NO_EARLY_EXIT
from kvforge.runtime.sessions.policy_inputs import input_shapes, neutral_inputs
from kvforge.runtime.sessions.pools import Pools
from kvforge.runtime.sessions.session import Session

CACHE_FRACTION = 0.9
"""The share of the memory left beside weights and activations that the K,V cache gets unless told otherwise."""


class CudaSession(Session):
    """The graphs of an engine on one GPU. All lasting state is in the pools; not thread-safe.

    Step tensors come on the CPU and logits go back there; hidden states and pools stay on the GPU. Steps in which
    each sequence has one token run as captured CUDA graphs (``cuda_decode``), the others directly. See
    ``kvforge.runtime.sessions.session.Session``.

    Args:
        weights: every engine tensor on ``device``; the graphs use this memory without owning it.
        graphs: ``lower``, ``upper`` and those of ``early_exit`` and ``verify`` that the engine has: flat device inputs
            to flat outputs.
        capture: how a decode graph is recorded; None runs all steps directly.
    """

    def __init__(
        self,
        manifest: Manifest,
        weights: dict[str, Tensor],
        graphs: dict[str, Graph],
        device: torch.device,
        capture: Capture | None = None,
    ) -> None:
        self.manifest = manifest
        self.device = device
        self._upper_pools = manifest.upper_pools
        self._policy = manifest.policy
        self._weights = weights
        self._lower, self._upper = graphs["lower"], graphs["upper"]
        self._early_exit, self._verify = graphs.get("early_exit"), graphs.get("verify")
        tokens, seqs = manifest.max_num_tokens, manifest.max_num_seqs
        tables = (seqs, -(-manifest.max_seq_len // manifest.page_size))
        state = input_shapes(self._policy, *tables)
        lower = num_elements([(tokens,)] * 3 + [(seqs,)] + [(seqs + 1,), (seqs,), tables, *state])
        upper = num_elements([(tokens,)] * 2 + [(seqs + 1,), (seqs,), tables, *state])
        self._lower_buffer, self._upper_buffer = StepBuffer(lower, device), StepBuffer(upper, device)
        self._decode: DecodeGraphs | None = None
        if capture is not None:
            buffers = (self._lower_buffer, self._upper_buffer)
            self._decode = DecodeGraphs(manifest, self._lower, self._upper, buffers, capture)
        self._pool_addresses: tuple[int, ...] = ()

    def lower(self, step: LowerStep, pools: Pools) -> Tensor:
        """Run all T tokens to the cut, writing every owner's K,V; returns hidden ``[T, hidden_size]`` on the GPU,
        valid until the next ``lower``, or ``upper`` of others."""
        memory = list(itertools.chain.from_iterable(pools))
        step = step._replace(state=policy_inputs(step, self._policy))
        bucket = self._bucket(step.query_start, step.input_ids.shape[0], step, pools)
        if bucket is not None and self._decode is not None:
            return self._decode.lower(bucket, step, memory)
        rows = () if step.chosen is None else step.chosen[1:]
        staged, count = self._lower_buffer.copy((*step.inputs, *step.state, *rows)), len(step.inputs)
        if rows:
            known_ids(step, staged[0], staged.pop())
        return self._lower([*staged[:count], *memory, *staged[count:]])[0]

    def upper(self, step: UpperStep, pools: Pools) -> Tensor:
        return self._to_host(self.device_logits(step, pools))

    def device_logits(self, step: UpperStep, pools: Pools) -> Tensor:
        """As ``upper``, but returns the logits on the GPU without waiting, valid until the next ``upper``."""
        num_survivors = step.survivor_index.shape[0]
        if num_survivors == 0:
            return torch.empty(0, self.manifest.vocab_size, device=self.device)
        memory = list(itertools.chain.from_iterable(pools[self._upper_pools]))
        step = step._replace(state=policy_inputs(step, self._policy))
        bucket = None
        if num_survivors == step.hidden.shape[0]:
            bucket = self._bucket(step.survivor_start, num_survivors, step, pools)
        if bucket is not None and self._decode is not None:
            return self._decode.upper(bucket, step, memory)
        hidden, *host = step.inputs
        staged = self._upper_buffer.copy((*host, *step.state))
        return self._upper([hidden, *staged[: len(host)], *memory, *staged[len(host) :]])[0]

    @property
    def runs_ahead(self) -> bool:
        return True

    def host_logits(self, logits: Tensor) -> Tensor:
        return self._to_host(logits)

    def upload(self, tensor: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def launch(self, choose: Callable[[], Tensor], num_rows: int) -> CopiedTokens:
        return CopiedTokens(choose())

    @property
    def captures_steps(self) -> bool:
        return self._decode is not None

    def warm_up(self, pools: Pools, seq_len: int, max_num_seqs: int | None = None) -> None:
        """Capture the decode graphs of every batch size up to ``max_num_seqs`` (default: the engine's) for sequences of
        up to ``seq_len`` tokens; otherwise the first step of each size does that. Writes nothing to the pools."""
        columns = -(-seq_len // self.manifest.page_size)
        maximum = min(max_num_seqs or self.manifest.max_num_seqs, self.manifest.max_num_seqs)
        for num_seqs in sorted({batch_bucket(n + 1, self.manifest.max_num_seqs) or 1 for n in range(maximum)}):
            zeros, starts = torch.zeros(num_seqs, dtype=torch.int32), torch.arange(num_seqs + 1, dtype=torch.int32)
            table = torch.zeros(num_seqs, columns, dtype=torch.int32)
            shared = (zeros + 1, table, neutral_inputs(self._policy, num_seqs, columns))
            hidden = self.lower(LowerStep(zeros, zeros, zeros - 1, starts, *shared), pools)
            self.device_logits(UpperStep(hidden, starts[:-1], starts, zeros, *shared), pools)

    def early_exit(self, hidden: Tensor, survivor_index: Tensor) -> Tensor:
        if self._early_exit is None:
            raise EngineError(NO_EARLY_EXIT)
        if survivor_index.shape[0] == 0:
            return torch.empty(0, self.manifest.vocab_size)
        return self._to_host(self._early_exit([hidden, *self._upper_buffer.copy((survivor_index,))])[0])

    def verify(self, step: VerifyStep) -> tuple[Tensor, Tensor]:
        if self._verify is None:
            raise EngineError(NO_DRAFTS)
        accepted, next_token = self._verify([tensor.to(self.device) for tensor in step])
        return accepted.cpu(), next_token.cpu()

    @property
    def rope_tables(self) -> tuple[Tensor, Tensor]:
        return rope_tables(self._weights)

    def default_kv_cache_gib(self) -> float:
        """Return the K,V cache size to use unless told otherwise: most of the GPU memory that is free now, beside
        what a step's activations need."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return max(0.0, (free - activation_bytes(self.manifest)) * CACHE_FRACTION) / 2**30

    def _to_host(self, logits: Tensor) -> Tensor:
        """Wait for the logits and return a copy of them on the CPU."""
        if self.device.type != "cuda":
            return logits.clone()
        result = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True)
        result.copy_(logits, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return result

    def _bucket(
        self, starts: Tensor, num_tokens: int, step: LowerStep | UpperStep, pools: Pools
    ) -> tuple[int, ...] | None:
        if self._decode is None or not is_one_each(starts, num_tokens):
            return None
        # Captured graphs hold every pool's address. The first alone does not tell: other pools may begin there, too.
        addresses = tuple(tensor.data_ptr() for pool in pools for tensor in pool)
        if addresses != self._pool_addresses:
            self._decode.clear()
            self._pool_addresses = addresses
        return self._decode.bucket(num_tokens, step.page_table, step.state)


def activation_bytes(manifest: Manifest) -> int:
    """Return a generous estimate of what one step allocates: per token the residual stream, q, k, v and the MLP's
    inner state, each twice over in fp32; per survivor and head the logits in the compute dtype and in fp32; per
    sequence what the KV policy puts into one layer."""
    model = manifest.model
    per_token = 8 * (4 * model.hidden_size + 2 * model.num_heads * model.head_dim + 4 * model.kv_dim * model.num_owners)
    per_token += 8 * 3 * model.intermediate_size
    per_survivor = 2 * model.vocab_size * 8 * (2 if model.early_exit else 1)
    step = manifest.max_num_tokens * per_token + manifest.max_num_survivors * per_survivor
    inserted = manifest.policy.insertion.activation_bytes(model.num_heads, model.num_kv_heads, manifest.max_seq_len)
    return step + manifest.max_num_seqs * inserted


def load_session(engine_dir: Path, manifest: Manifest) -> CudaSession:
    """Load an engine's graphs and weights onto the current GPU.

    Raises:
        EngineError: no GPU, one of another compute capability, another torch or operator version, too little GPU
            memory, or a damaged file.
    """
    check_torch(manifest, engine_dir)
    check_operators(manifest, engine_dir)
    check_gpu(manifest, engine_dir)
    register_transitions(manifest)
    try:
        weights = load_weights(engine_dir, "cuda")
    except torch.OutOfMemoryError as error:
        raise EngineError(f"the weights of {engine_dir} do not fit into the free GPU memory; free some.") from error
    return make_session(engine_dir, manifest, weights)


def make_session(engine_dir: Path, manifest: Manifest, weights: dict[str, Tensor]) -> CudaSession:
    """Return a session on the graphs below ``engine_dir`` with weights that are on the GPU already.

    The packages' kernels are unpacked into a temporary folder, which goes with the session.
    """
    folder = tempfile.mkdtemp(prefix="kvforge-")
    try:
        with unpacking_into(folder):
            graphs = {name: load_graph(engine_dir, name, weights, single_threaded=True) for name in manifest.graphs}
        device = torch.device("cuda", torch.cuda.current_device())
        session = CudaSession(manifest, weights, graphs, device, GraphRecorder())
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(session, shutil.rmtree, folder, ignore_errors=True)
    return session


def check_gpu(manifest: Manifest, engine_dir: Path) -> None:
    """Raise EngineError unless this process has a GPU of the compute capability that the engine is compiled for."""
    if not torch.cuda.is_available():
        raise EngineError(
            f"{engine_dir} was built for an NVIDIA GPU and torch sees none here; run it on a machine with one, or "
            "rebuild it with --target cpu."
        )
    major, minor = torch.cuda.get_device_capability()
    if manifest.isa != (f"sm_{major}{minor}",):
        raise EngineError(
            f"{engine_dir} was built for {', '.join(manifest.isa)} and this GPU is sm_{major}{minor}; rebuild the "
            "engine on this machine with kvforge build."
        )
