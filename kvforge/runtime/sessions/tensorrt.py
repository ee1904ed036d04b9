"""An engine of target ``tensorrt``: its plans on one GPU and the allocation of its cache there."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvforge.common.dtypes import COMPUTE_DTYPES
from kvforge.common.errors import EngineError
from kvforge.manifest import RANK_DIR, Manifest
from kvforge.runtime.sessions.compatibility import check_operators
from kvforge.runtime.sessions.inputs import LowerStep, UpperStep, VerifyStep
from kvforge.runtime.sessions.missing import NO_DRAFTS, NO_EARLY_EXIT
from kvforge.runtime.sessions.pools import Pools, allocate_pools
from kvforge.runtime.sessions.session import Session
from kvforge.runtime.sessions.tensorrt_plan import Plan, plan_logger
from kvforge.tensorrt.api import trt
from kvforge.tensorrt.compatibility import check_plans
from kvforge.tensorrt.installed import flavour

STEP_INPUTS = {
    "lower": LowerStep._fields[:-1],
    "upper": UpperStep._fields[:-1],
    "early_exit": ("hidden", "survivor_index"),
    "verify": ("logits", "draft_ids", "draft_start", "draft_probs", "temperature", "uniform"),
}
"""Names of each graph's inputs before the pools."""

RESULTS = {
    "lower": ("hidden",),
    "upper": ("logits",),
    "early_exit": ("logits",),
    "verify": ("accepted", "next_token"),
}
"""Names of each graph's outputs that are no pools."""

_POOL_ROLES = ("k_pool", "v_pool", "k_scales", "v_scales")
_POOL_NAME = re.compile(rf"({'|'.join(_POOL_ROLES)})_(\d+)(?:_out)?")

CACHE_FRACTION = 0.9
"""The share of the memory left beside plans and results that the K,V cache gets unless told otherwise."""

_DEVICE = torch.device("cuda")


class TensorRTSession(Session):
    """The graphs of an engine on the current GPU; see ``kvforge.runtime.sessions.session.Session``.

    Step tensors come from the CPU; ``hidden`` and the pools stay on the GPU. All runs are on one stream.
    """

    def __init__(self, manifest: Manifest, plans: dict[str, Plan], stream: torch.cuda.Stream) -> None:
        self.manifest = manifest
        self._upper_pools = manifest.upper_pools
        self._plans = plans
        self._stream = stream
        size = max(plan.workspace_bytes for plan in plans.values())
        self._workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=_DEVICE)
        # TensorRT wants an address for a tensor without elements, too.
        self._nothing = torch.zeros(256, dtype=torch.uint8, device=_DEVICE)
        for plan in plans.values():
            plan.make_contexts(self._workspace, stream.cuda_stream)

    def lower(self, step: LowerStep, pools: Pools) -> Tensor:
        """Run all T tokens to the cut, writing every owner's K,V; returns hidden ``[T, hidden_size]`` on the GPU."""
        shape = (step.input_ids.shape[0], self.manifest.hidden_size)
        hidden = self._empty(shape, COMPUTE_DTYPES[self.manifest.dtype])
        self._run("lower", step.inputs, pools, [hidden], writes_pools=True)
        return hidden

    def upper(self, step: UpperStep, pools: Pools) -> Tensor:
        """Run the R survivors past the cut; returns fp32 logits ``[R, vocab_size]`` on the CPU."""
        logits = self._empty((step.survivor_index.shape[0], self.manifest.vocab_size), torch.float32)
        self._run("upper", step.inputs, pools[self._upper_pools], [logits])
        return self._to_cpu(logits)

    def early_exit(self, hidden: Tensor, survivor_index: Tensor) -> Tensor:
        """Run the head at the cut on the R survivors; returns fp32 logits ``[R, vocab_size]`` on the CPU."""
        if "early_exit" not in self._plans:
            raise EngineError(NO_EARLY_EXIT)
        logits = self._empty((survivor_index.shape[0], self.manifest.vocab_size), torch.float32)
        self._run("early_exit", (hidden, survivor_index), [], [logits])
        return self._to_cpu(logits)

    def verify(self, step: VerifyStep) -> tuple[Tensor, Tensor]:
        """Verify drafts; returns (accepted, next_token), each int32 ``[S]`` on the CPU."""
        if "verify" not in self._plans:
            raise EngineError(NO_DRAFTS)
        accepted, next_token = (self._empty(step.temperature.shape, torch.int32) for _ in range(2))
        self._run("verify", step, [], [accepted, next_token])
        return self._to_cpu(accepted), self._to_cpu(next_token)

    def allocate_pools(self, num_pages: int, state_pages: int = 0, num_slots: int | None = None) -> Pools:
        """Return zeroed pools of all owners in one allocation of the GPU; see ``kvforge.runtime.sessions.pools``.

        Raises:
            EngineError: more pages than the engine was built for.
        """
        maximum = self._max_pages()
        if num_pages > maximum:
            raise EngineError(
                f"the engine was built for at most {maximum} pages, not {num_pages}; lower --kv-cache-gib."
            )
        with torch.cuda.stream(self._stream):
            return allocate_pools(self.manifest, num_pages, _DEVICE)

    def default_kv_cache_gib(self) -> float:
        """Return the K,V cache size to use unless told otherwise: most of the GPU memory that is free now, beside a
        step's results, and no more than the engine was built for."""
        manifest, (free, _) = self.manifest, torch.cuda.mem_get_info()
        logits = manifest.max_num_survivors * manifest.vocab_size * (2 if manifest.early_exit else 1)
        results = 4 * (manifest.max_num_tokens * manifest.hidden_size + logits)
        maximum = self._max_pages() * manifest.page_bytes
        return max(0.0, min((free - results) * CACHE_FRACTION, maximum)) / 2**30

    def _max_pages(self) -> int:
        plan = self._plans["lower"]
        return min(plan.largest(name, 0) for name in plan.inputs if name not in STEP_INPUTS["lower"])

    def _run(
        self, graph: str, step: tuple[Tensor, ...], pools: Pools, outputs: list[Tensor], writes_pools: bool = False
    ) -> None:
        plan, flat = self._plans[graph], list(itertools.chain.from_iterable(pools))
        # The caller may gather rows of hidden states on its own stream, between runs.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            tensors = dict(zip(STEP_INPUTS[graph], (x.to(_DEVICE, non_blocking=True) for x in step), strict=True))
            inputs, results = bind(plan, graph, tensors, flat, outputs, writes_pools)
            plan.run(inputs, results, self._stream.cuda_stream, self._nothing.data_ptr())
        torch.cuda.current_stream().wait_stream(self._stream)

    def _empty(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
        with torch.cuda.stream(self._stream):
            return torch.empty(shape, dtype=dtype, device=_DEVICE)

    def _to_cpu(self, tensor: Tensor) -> Tensor:
        with torch.cuda.stream(self._stream):
            return tensor.cpu()  # waits for the stream


def bind(
    plan: Plan,
    graph: str,
    step: Mapping[str, Tensor],
    pools: Sequence[Tensor],
    results: Sequence[Tensor],
    writes_pools: bool,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a plan's inputs and outputs by name.

    Pools are given in owner order and found by their names, in whatever order the plan has them; what goes in and what
    comes out is the same tensor. Inputs that a graph does not use may be missing from its plan.
    Raises EngineError when the plan has other tensors.
    """
    names = _owner_order(name for name in plan.inputs if name not in step)
    written = _owner_order(name for name in plan.outputs if name not in RESULTS[graph])
    outputs = [*results, *(pools if writes_pools else ())]
    if len(names) != len(pools) or len(outputs) != len(plan.outputs):
        raise EngineError(
            f"the plan of {graph} has {len(names)} pools and {len(plan.outputs)} outputs, not {len(pools)} and "
            f"{len(outputs)}; rebuild the engine."
        )
    inputs = {name: step[name] for name in plan.inputs if name in step} | dict(zip(names, pools, strict=True))
    bound = dict(zip((*RESULTS[graph], *written), outputs, strict=True))
    for name, tensor in (*inputs.items(), *bound.items()):
        if tensor.dtype != plan.dtypes[name]:
            raise EngineError(
                f"{name} of {graph} is {plan.dtypes[name]} in the plan, not {tensor.dtype}; rebuild the engine."
            )
    return inputs, bound


def _owner_order(names: Iterable[str]) -> list[str]:
    """Names of pools in the order in which they are given: by owner, then by role."""

    def place(name: str) -> tuple[int, int]:
        match = _POOL_NAME.fullmatch(name)
        if match is None:
            raise EngineError(f"the plan has a tensor {name} that this runtime does not know; rebuild the engine.")
        return int(match[2]), _POOL_ROLES.index(match[1])

    return sorted(names, key=place)


def load_session(engine_dir: Path, manifest: Manifest) -> TensorRTSession:
    """Load the plans of an engine on the current GPU.

    Raises:
        EngineError: no GPU, or the plans are for another GPU or another TensorRT, or their operators are other ones.
    """
    if not torch.cuda.is_available():
        raise EngineError(
            f"{engine_dir} runs on an NVIDIA GPU and there is none; run it where one is, or rebuild it with "
            "--target cpu."
        )
    check_operators(manifest, engine_dir)
    files = {graph: engine_dir / RANK_DIR / f"{graph}.plan" for graph in manifest.graphs}
    for file in files.values():
        if not file.is_file():
            raise EngineError(
                f"{engine_dir} has no {file.name}: it was exported where TensorRT is not installed; build the engine "
                "with build/build_tensorrt.py where it is."
            )
    check_plans(manifest, engine_dir, trt.__version__, torch.cuda.get_device_capability())
    flavour().register_plugins()
    logger = plan_logger()
    runtime: trt.Runtime = trt.Runtime(logger)
    plans = {graph: Plan(file, runtime, logger) for graph, file in files.items()}
    return TensorRTSession(manifest, plans, torch.cuda.Stream())
