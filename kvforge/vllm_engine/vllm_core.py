"""vLLM's engine as few calls: what of vLLM's own names kvforge depends on is in this file."""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvforge.common.errors import EngineError, first_line
from kvforge.common.hardware import available_memory_bytes
from kvforge.manifest import Manifest
from kvforge.runtime.config import DEFAULT_FRACTION, DEFAULT_KV_CACHE_BYTES, RuntimeConfig
from kvforge.runtime.requests.params import MAX_LOGPROBS
from kvforge.vllm_engine.settings import VllmSettings, load_settings

logger = logging.getLogger(__name__)

UNCOMPILED = {"custom_ops": ["all"]}
"""vLLM's own kernels for norms, gates and rotations, which it otherwise leaves to torch.compile: a model with a cut is
not compiled."""

CPU_WORKER = "kvforge.vllm_models.cpu_worker.KvforgeCpuWorker"

DEATH_S = 2.0
"""Above what vLLM's monitor of its ranks takes to notice that one has ended."""


@dataclass(frozen=True)
class CoreState:
    """Of vLLM's scheduler now: pages are blocks of ``page_size`` tokens; ``computed`` are the computed tokens of the
    running requests by name; ``cache_bytes`` are those of all ranks."""

    num_waiting: int
    num_preempted: int
    computed: dict[str, int]
    num_pages: int
    num_free_pages: int
    cache_bytes: int


class VllmCore:
    """vLLM's ``LLMEngine``, which steps its scheduler in this process; ranks beyond the first are its processes."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._scheduler = engine.engine_core.engine_core.scheduler
        self._executor = engine.engine_core.engine_core.model_executor
        cache = self._scheduler.kv_cache_config
        parallel = engine.vllm_config.parallel_config
        self.num_pages = cache.num_blocks - 1  # vLLM keeps one block for itself
        num_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self._cache_bytes = sum(tensor.size for tensor in cache.kv_cache_tensors) * num_ranks  # those of the first

    def add(
        self, name: str, prompt: list[int], fields: dict[str, Any], guide: dict[str, Any] | None, priority: int
    ) -> None:
        """Queue a request of one sequence, with fields of vLLM's SamplingParams and StructuredOutputsParams.

        Raises:
            ValueError: vLLM refuses it.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        guided = None if guide is None else StructuredOutputsParams(**guide)
        params = SamplingParams(**fields, structured_outputs=guided, output_kind=RequestOutputKind.DELTA)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params, priority=priority)

    def abort(self, name: str) -> None:
        """Give a request up; one that has ended is passed over."""
        self._engine.abort_request([name])

    def step(self) -> list[Any]:
        """Run one step; returns vLLM's RequestOutputs, with the tokens of this step alone.

        Raises:
            EngineError: a rank has ended. What vLLM itself raises then is some other rank's broken connection.
        """
        try:
            outputs: list[Any] = self._engine.step()
        except Exception:
            self._check_ranks(DEATH_S if hasattr(self._executor, "workers") else 0.0)
            raise
        return outputs

    def state(self) -> CoreState:
        """Return the state between two steps. Raises EngineError where a rank has ended."""
        self._check_ranks()
        scheduler = self._scheduler
        waiting = list(scheduler.waiting)
        return CoreState(
            num_waiting=len(waiting) + len(getattr(scheduler, "skipped_waiting", ())),
            num_preempted=sum(request.num_preemptions > 0 for request in waiting),
            computed={_name(request): request.num_computed_tokens for request in scheduler.running},
            num_pages=self.num_pages,
            num_free_pages=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            cache_bytes=self._cache_bytes,
        )

    def _check_ranks(self, wait_s: float = 0.0) -> None:
        """Raise EngineError where a rank has ended, which vLLM is given ``wait_s`` to notice."""
        until = time.monotonic() + wait_s
        while not getattr(self._executor, "is_failed", False):
            if time.monotonic() >= until:
                return
            time.sleep(0.05)
        raise EngineError("a process of vLLM's ranks ended unexpectedly")


def _name(request: Any) -> str:
    """The name that a request was added by: vLLM adds a hyphen and eight characters."""
    return str(request.request_id).rpartition("-")[0]


def load_core(engine_dir: Path, manifest: Manifest, limits: RuntimeConfig, kv_cache_gib: float | None) -> VllmCore:
    """Load vLLM's engine for an engine directory.

    Raises:
        EngineError: the checkpoint is not there, vLLM is not, or it does not take the model or the arguments.
    """
    if logging.getLogger().isEnabledFor(logging.INFO):
        logging.getLogger("vllm").setLevel(logging.NOTSET)
    else:  # its warnings are about choices that are made here
        logging.getLogger("vllm").setLevel(logging.ERROR)
    settings = load_settings(engine_dir)
    checkpoint = settings.checkpoint_in(engine_dir)
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError as error:
        raise EngineError(f"vLLM cannot be imported ({first_line(error)}); install it where the engine runs.") from None
    arguments = engine_arguments(settings, manifest, limits, str(checkpoint))
    cache_bytes = None if kv_cache_gib is None else int(kv_cache_gib * 2**30)
    if cache_bytes is None and current_platform.is_cpu():
        cache_bytes = min(DEFAULT_KV_CACHE_BYTES, int(available_memory_bytes() * DEFAULT_FRACTION)) or None
        cache_bytes = None if cache_bytes is None else cache_bytes // settings.tensor_parallel_size
    if cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = cache_bytes
    if current_platform.is_cpu():
        arguments.setdefault("worker_cls", CPU_WORKER)
    try:
        return VllmCore(LLMEngine.from_engine_args(EngineArgs(**arguments)))
    except Exception as error:
        logger.exception("vLLM does not load the engine")
        raise EngineError(f"vLLM does not load {checkpoint}: {_reason(error)}") from None


def engine_arguments(
    settings: VllmSettings, manifest: Manifest, limits: RuntimeConfig, checkpoint: str
) -> dict[str, Any]:
    """Return the arguments of vLLM's engine, all but the size of its cache."""
    return {
        "model": checkpoint,
        "dtype": manifest.dtype,
        "block_size": manifest.page_size,
        "max_model_len": limits.max_seq_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_tokens,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "enable_prefix_caching": limits.enable_prefix_cache,
        "kv_sharing_fast_prefill": settings.has_cut,
        "scheduling_policy": "priority",
        "async_scheduling": False,
        "max_logprobs": MAX_LOGPROBS,
        "logprobs_mode": "raw_logprobs",
        "generation_config": "vllm",  # a request says all of its sampling
        "structured_outputs_config": {"backend": "guidance"},
        "use_tqdm_on_load": False,
        **({"hf_overrides": settings.config} if settings.config else {}),
        **({"compilation_config": UNCOMPILED} if settings.has_cut else {}),
        **settings.arguments,
    }


def _reason(error: BaseException) -> str:
    """The last words of an error and of what it came of."""
    texts = list(dict.fromkeys(first_line(each) for each in _chain(error)))
    return "; ".join(texts[-2:])


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
