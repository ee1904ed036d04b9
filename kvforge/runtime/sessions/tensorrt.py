"""An engine of target ``tensorrt``: its plans on one GPU in the place of target ``cuda``'s packages."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from kvforge.common.dtypes import COMPUTE_DTYPES
from kvforge.common.errors import EngineError
from kvforge.manifest import RANK_DIR, Manifest
from kvforge.runtime.sessions.aot_package import load_tensors
from kvforge.runtime.sessions.compatibility import ROPE_TABLES, check_operators, register_transitions
from kvforge.runtime.sessions.cuda import CudaSession
from kvforge.runtime.sessions.cuda_decode import Capture, Captured, GraphRecorder
from kvforge.runtime.sessions.pools import Pools
from kvforge.runtime.sessions.tensorrt_plan import Plan, plan_logger
from kvforge.tensorrt.api import trt
from kvforge.tensorrt.compatibility import check_builder, check_gpu
from kvforge.tensorrt.graph_tensors import CACHE_ROLES, INPUTS, RESULTS, WRITTEN, pool_names, role_of
from kvforge.tensorrt.installed import flavour

CACHE_FRACTION = 0.9
"""The share of the memory left beside plans and results that the K,V cache gets unless told otherwise."""


class TensorRTSession(CudaSession):
    """The plans of an engine on the current GPU: a ``CudaSession`` whose graphs they are.

    Args:
        stream: on which plans run, because TensorRT waits for the device on the default one.
        tables: cos and sin of every position on the GPU, where the KV policy needs them.
        capture: how decode steps are recorded; None runs all steps directly.
    """

    def __init__(
        self,
        manifest: Manifest,
        plans: dict[str, Plan],
        stream: torch.cuda.Stream,
        device: torch.device,
        tables: Mapping[str, Tensor] = MappingProxyType({}),
        capture: Capture | None = None,
    ) -> None:
        self._plans = plans
        size = max(plan.workspace_bytes for plan in plans.values())
        self._workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
        for plan in plans.values():
            plan.make_contexts(self._workspace, stream.cuda_stream)
            plan.keep_kernels()
        graphs = {name: PlanGraph(name, plan, manifest, stream, device) for name, plan in plans.items()}
        super().__init__(manifest, dict(tables), dict(graphs), device, capture)

    def warm_up(self, pools: Pools, seq_len: int, max_num_seqs: int | None = None) -> None:
        """As ``CudaSession.warm_up``; kernels that were compiled on the way are kept for the next start."""
        super().warm_up(pools, seq_len, max_num_seqs)
        for plan in self._plans.values():
            plan.keep_kernels()

    def allocate_pools(
        self,
        num_pages: int,
        state_pages: int = 0,
        num_slots: int | None = None,
        upper_pages: int = 0,
        state_rows: int = 0,
    ) -> Pools:
        """Return zeroed pools of all owners in one allocation of the GPU; see ``kvforge.runtime.sessions.pools``.

        Raises:
            EngineError: more pages than the engine was built for.
        """
        wanted = {"cache": num_pages, "pages": state_pages}
        kinds = dict.fromkeys(CACHE_ROLES, "cache") | {
            pool.name: pool.rows for pool in self._policy.keeping.named_pools
        }
        for graph in ("lower", "upper"):
            for name in self._pools_of(graph):
                count, maximum = wanted.get(kinds[role_of(name)], 0), self._plans[graph].largest(name, 0)
                if count > maximum:
                    raise EngineError(
                        f"the engine was built for at most {maximum} pages, not {count}; lower --kv-cache-gib."
                    )
        return super().allocate_pools(num_pages, state_pages, num_slots)

    def default_kv_cache_gib(self) -> float:
        """Return the K,V cache size to use unless told otherwise: most of the GPU memory that is free now, beside a
        step's results, and no more than the engine was built for."""
        manifest, (free, _) = self.manifest, torch.cuda.mem_get_info()
        logits = manifest.max_num_survivors * manifest.vocab_size * (2 if manifest.model.early_exit else 1)
        results = 4 * (manifest.max_num_tokens * manifest.model.hidden_size + logits)
        names = [name for name in self._pools_of("lower") if role_of(name) in CACHE_ROLES]
        maximum = min(self._plans["lower"].largest(name, 0) for name in names) * manifest.page_bytes
        return max(0.0, min((free - results) * CACHE_FRACTION, maximum)) / 2**30

    def _pools_of(self, graph: str) -> list[str]:
        of_step = {*INPUTS[graph], *(one.name for one in self._policy.keeping.state_inputs)}
        return [name for name in self._plans[graph].inputs if name not in of_step]


class PlanGraph:
    """A plan as ``CudaSession`` calls a graph: flat inputs on the GPU to flat results, pools written in place."""

    def __init__(
        self, name: str, plan: Plan, manifest: Manifest, stream: torch.cuda.Stream, device: torch.device
    ) -> None:
        owners = {"lower": manifest.model.owners, "upper": manifest.model.owners_above}.get(name, ())
        state = manifest.policy.keeping.state_inputs if name in ("lower", "upper") else ()
        self._name, self._plan, self._manifest = name, plan, manifest
        self._pools = pool_names(owners, manifest.kv_dtype, manifest.policy)
        self._inputs = (*INPUTS[name], *self._pools, *(one.name for one in state))
        self._stream, self._device = stream, device
        # TensorRT wants an address for a tensor without elements, too.
        self._nothing = torch.zeros(256, dtype=torch.uint8, device=device)

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        """Queue a run behind what the current stream has, and that stream behind it; returns the results.

        Under capture of a CUDA graph the run is part of that graph.
        """
        given = dict(zip(self._inputs, tensors, strict=True))
        current = torch.cuda.current_stream()
        if torch.cuda.is_current_stream_capturing():
            return self._run(given, current)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            results = self._run(given, self._stream)
        current.wait_stream(self._stream)
        return results

    def _run(self, given: dict[str, Tensor], stream: torch.cuda.Stream) -> list[Tensor]:
        results = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._results(given)]
        pools = {name: _as_plugins_have_it(given[name]) for name in self._pools}
        step = {name: tensor for name, tensor in given.items() if name not in pools}
        inputs, outputs = bind(self._plan, self._name, step, pools, results)
        self._plan.run(inputs, outputs, stream.cuda_stream, self._nothing.data_ptr())
        return results

    def _results(self, given: Mapping[str, Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        manifest = self._manifest
        if self._name == "lower":
            return [((given["input_ids"].shape[0], manifest.model.hidden_size), COMPUTE_DTYPES[manifest.dtype])]
        if self._name == "verify":
            return [(tuple(given["temperature"].shape), torch.int32)] * 2
        return [((given["survivor_index"].shape[0], manifest.vocab_size), torch.float32)]


class RepeatedRuns:
    """A ``Capture`` for a TensorRT that records runs itself: a decode step is the same run on the same addresses."""

    def __init__(self, plans: Collection[Plan]) -> None:
        self._plans = plans

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Captured, Tensor]:
        """Run ``function`` once, in the contexts that record what they run."""

        def run() -> Tensor:
            for plan in self._plans:
                plan.is_repeated = True
            try:
                return function()
            finally:
                for plan in self._plans:
                    plan.is_repeated = False

        return _Again(run), run()


class _Again:
    def __init__(self, run: Callable[[], Tensor]) -> None:
        self._run = run

    def replay(self) -> None:
        """Queue the work."""
        self._run()


def bind(
    plan: Plan,
    graph: str,
    step: Mapping[str, Tensor],
    pools: Mapping[str, Tensor],
    results: Sequence[Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a plan's inputs and outputs by name.

    A pool that comes out again is the tensor that went in. Inputs that a graph does not use may be missing from its
    plan, and pools of the KV policy that it does not touch. Raises EngineError when the plan has other tensors.
    """
    known = {**step, **pools}
    made = dict(zip(RESULTS[graph], results, strict=True)) | {f"{name}{WRITTEN}": pools[name] for name in pools}
    names = [*(name for name in plan.inputs if name not in known), *(name for name in plan.outputs if name not in made)]
    if names:
        raise EngineError(
            f"the plan of {graph} has a tensor {names[0]} that this runtime does not know; rebuild the engine."
        )
    needed = [name for name in pools if role_of(name) in CACHE_ROLES]
    missing = [
        *(name for name in needed if name not in plan.inputs),
        *(name for name in RESULTS[graph] if name not in plan.outputs),
        *(f"{name}{WRITTEN}" for name in needed if graph == "lower" and f"{name}{WRITTEN}" not in plan.outputs),
    ]
    if missing:
        raise EngineError(f"the plan of {graph} has no tensor {missing[0]}; rebuild the engine.")
    inputs = {name: known[name] for name in plan.inputs}
    outputs = {name: made[name] for name in plan.outputs}
    for name, tensor in (*inputs.items(), *outputs.items()):
        if tensor.dtype != plan.dtypes[name]:
            raise EngineError(
                f"{name} of {graph} is {plan.dtypes[name]} in the plan, not {tensor.dtype}; rebuild the engine."
            )
    return inputs, outputs


def _as_plugins_have_it(tensor: Tensor) -> Tensor:
    """Plugins have no unsigned bytes, of which they ask only whether they are 0."""
    return tensor.view(torch.int8) if tensor.dtype == torch.uint8 else tensor


def load_session(engine_dir: Path, manifest: Manifest) -> TensorRTSession:
    """Load the plans of an engine on the current GPU.

    Raises:
        EngineError: the plans' operators are other ones, or there are no plans, or they are of another TensorRT (what
            can be said without a GPU comes first), or there is no GPU or another one than they are for, or there is no
            Triton for a KV policy that changes caches.
    """
    check_operators(manifest, engine_dir)
    files = {graph: engine_dir / RANK_DIR / f"{graph}.plan" for graph in manifest.graphs}
    for file in files.values():
        if not file.is_file():
            raise EngineError(
                f"{engine_dir} has no {file.name}: it was exported where TensorRT is not installed; build the engine "
                "with build/build_tensorrt.py where it is."
            )
    check_builder(manifest, engine_dir, trt.__version__)
    if not torch.cuda.is_available():
        raise EngineError(
            f"{engine_dir} runs on an NVIDIA GPU and there is none; run it where one is, or rebuild it with "
            "--target cpu."
        )
    check_gpu(manifest, engine_dir, torch.cuda.get_device_capability())
    register_transitions(manifest)
    flavour().register_plugins()
    logger = plan_logger()
    runtime: trt.Runtime = trt.Runtime(logger)
    plans = {graph: Plan(file, runtime, logger) for graph, file in files.items()}
    insertion = manifest.policy.insertion.layer_insertion()
    has_tables = insertion is not None and insertion.needs_positions
    tables = load_tensors(engine_dir, ROPE_TABLES, "cuda") if has_tables else {}
    capture: Capture = RepeatedRuns(plans.values()) if flavour().RECORDS_RUNS else GraphRecorder()
    device = torch.device("cuda", torch.cuda.current_device())
    return TensorRTSession(manifest, plans, torch.cuda.Stream(), device, tables, capture)
