"""What the user may choose when building an engine, and how "auto" is resolved."""

from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from kvforge.common.dtypes import COMPUTE_DTYPES
from kvforge.common.errors import BuildError
from kvforge.common.hardware import best_isa
from kvforge.common.number_formats import (
    HEAD_DTYPES,
    KV_FORMATS,
    NEAREST,
    QUANTIZED_WEIGHT_BYTES,
    WEIGHT_BYTES,
    automatic_dtype,
    automatic_kv_dtype,
    static_kv_dtype,
    whole_name,
    written_formats,
)
from kvforge.costs.cache_layout import CacheLayout
from kvforge.kv_policies import Full, KVPolicy, compatibility, of_cache, parse
from kvforge.kv_policies.features import Asked, features_of
from kvforge.manifest import graph_names
from model_defs import ModelConfig, ModelError
from model_defs.draft_head import DraftHead
from model_defs.prediction import Prediction, check_runs
from plugins.packed_linear.packing import IN_STEPS, WITH_SCALES, WITH_ZEROS

PACKED_DTYPES = {"int8": torch.int8, "int4": IN_STEPS, "int4_scales": WITH_SCALES, "int4_zeros": WITH_ZEROS}
"""What weights of ``QUANTIZED_WEIGHT_BYTES`` are packed as."""
PACKED_HEADS = {PACKED_DTYPES[weights]: PACKED_DTYPES[head] for weights, head in HEAD_DTYPES.items()}
"""``HEAD_DTYPES`` as they are packed."""

LIMITS = {
    "max_num_seqs": (1, 2**20),
    "max_num_tokens": (1, 2**24),
    "max_seq_len": (1, 2**31 - 1),
    "page_size": (1, 2**12),
    "max_draft_len": (0, 2**20),
    "tensor_parallel_size": (1, 2**16),
    "pipeline_parallel_size": (1, 2**16),
}
"""The least and the largest value of each size option: beyond, a step's int32 tensors or one page could not be had."""


@dataclass(frozen=True)
class BuildOptions:
    """Options as given; ``None`` and ``"auto"`` leave the choice to :func:`resolve`. Without ``early_exit`` the head of
    that name is left out where the checkpoint has one. ``kv_policy`` is what ``kvforge.kv_policies.parse`` takes.
    ``decoupled_mode`` is how ``kvforge serve`` serves the engine where it is not told. ``compute_capabilities`` are the
    GPUs that plans of target ``tensorrt`` are for: "current", or such as "8.9,12.0". Those from ``engine_python`` on
    are for target ``vllm`` alone: the interpreter with vLLM, ranks, further arguments of vLLM's as JSON, and whether
    the engine has the checkpoint in it. ``kv_prediction`` is the checkpoint of a predictor for the model's cache,
    ``kv_scorer`` that of the scorer of a policy that has one, by default the checkpoint's own, and ``draft_head`` that
    of a draft head, or ``mtp``. ``calibration`` is what ``kvforge.compiler.calibration`` takes; ``weight_bits``, for
    weights in 4 bits, how many they are at most on average where some layers are int8."""

    target: str = "cpu"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    max_num_seqs: int = 64
    max_num_tokens: int = 2048
    max_seq_len: int | None = None
    page_size: int = 32
    max_draft_len: int = 0
    early_exit: bool = True
    weight_dtype: str = "auto"
    kv_policy: str = "full"
    decoupled_mode: bool = True
    compute_capabilities: str = "auto"
    engine_python: str | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    engine_args: str | None = None
    copy_checkpoint: bool = False
    kv_prediction: str | None = None
    kv_scorer: str | None = None
    calibration: str = "auto"
    draft_head: str | None = None
    weight_bits: float | None = None


OF_TARGET = {
    "compute_capabilities": "tensorrt",
    "engine_python": "vllm",
    "tensor_parallel_size": "vllm",
    "pipeline_parallel_size": "vllm",
    "engine_args": "vllm",
    "copy_checkpoint": "vllm",
}
"""Options of one target, and which."""


@dataclass(frozen=True)
class ResolvedOptions:
    """Options with every choice made; sizes in tokens.

    ``dtype`` is a key of ``kvforge.common.dtypes.COMPUTE_DTYPES``, ``kv_dtype`` of ``KV_FORMATS``; ``kv_scales`` holds
    (k_scale, v_scale) of each owner of the model where ``kv_dtype`` is static, else nothing; ``early_exit`` is the
    model's. ``quantized_weights`` is a key of ``kvforge.common.number_formats.QUANTIZED_WEIGHT_BYTES`` where linear
    layers have such weights, else None; ``int8_layers`` names those whose weights are int8 beside others in 4 bits.
    """

    target: str
    dtype: str
    kv_dtype: str
    max_num_seqs: int
    max_num_tokens: int
    max_seq_len: int
    page_size: int
    max_draft_len: int = 0
    kv_scales: tuple[tuple[float, float], ...] = ()
    early_exit: bool = False
    quantized_weights: str | None = None
    policy: KVPolicy = field(default_factory=Full)
    decoupled_mode: bool = True
    prediction: Prediction | None = None
    compute_capabilities: str = "auto"
    draft_head: DraftHead | None = None
    int8_layers: tuple[str, ...] = ()

    @property
    def weight_dtype(self) -> str:
        """The dtype of linear layers' weights, a key of ``kvforge.common.number_formats.WEIGHT_BYTES``."""
        return self.quantized_weights or self.dtype

    @property
    def packed_dtype(self) -> torch.dtype | None:
        """What linear layers' weights are packed as for ``plugins.packed_linear``; None where they are torch's:
        elsewhere than on CPUs, in float32, and in bfloat16 on a CPU without vector kernels."""
        if self.quantized_weights is not None:
            return PACKED_DTYPES[self.quantized_weights]
        packs = self.target == "cpu" and self.dtype == "bfloat16" and best_isa() != "portable"
        return torch.bfloat16 if packs else None

    def packed_dtype_of(self, layer: str) -> torch.dtype | None:
        """What the weights of a linear layer of this name are packed as."""
        return torch.int8 if layer in self.int8_layers else self.packed_dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of weights and hidden state."""
        return COMPUTE_DTYPES[self.dtype]

    @property
    def torch_kv_dtype(self) -> torch.dtype:
        """The dtype of K's pool that a step writes to, which is V's too where a target's kernels take no others."""
        return getattr(torch, written_formats(self.kv_dtype, self.dtype)[0].torch_dtype)

    def cache_layout(self, model: ModelConfig) -> CacheLayout:
        """Return the tensors of the cache of a model."""
        return CacheLayout(model, self.kv_dtype, self.dtype, self.page_size, self.policy)

    @property
    def rotates_keys(self) -> bool:
        """Whether the graphs rotate keys in int8: on CPUs, where a KV policy neither reads nor moves them. Latent
        attention has none."""
        return self.target == "cpu" and not self.policy.needs and KV_FORMATS[self.kv_dtype].may_rotate_keys

    @property
    def has_scale_pools(self) -> bool:
        """Whether each owner has pools of scales beside K and V."""
        return KV_FORMATS[self.kv_dtype].scales == "dynamic"

    @property
    def has_static_scales(self) -> bool:
        """Whether each owner has one scale for K and one for V."""
        return KV_FORMATS[self.kv_dtype].scales == "static"

    @property
    def graphs(self) -> tuple[str, ...]:
        """The names of the engine's graphs, in the order they are built."""
        return graph_names(
            self.max_draft_len, self.early_exit, self.prediction is not None, self.draft_head is not None
        )


def resolve(
    options: BuildOptions,
    config: ModelConfig,
    checkpoint_dtype: str,
    kv_cache_algo: str | None = None,
) -> ResolvedOptions:
    """Fill in what was left open: the dtype by ``automatic_dtype``, weights in the same, the cache's by
    ``automatic_kv_dtype``.

    ``checkpoint_dtype`` is safetensors' name of the stored weights' dtype; ``kv_cache_algo`` is what the
    checkpoint says of the cache: ``FP8`` or ``INT8`` where it has static scales, something else that no engine has, or
    None. ``kv_scales`` of the result is left empty.

    Raises:
        BuildError: an unknown dtype, a limit outside
            ``LIMITS``, ``max_seq_len`` beyond the model's, a cache of the checkpoint's that no engine has and no other
            asked for, a static cache format for a checkpoint without scales, two features that do not go together
            (``features_of``), or parameters of a KV policy that do not suit the model.
    """
    policy = parse(options.kv_policy)
    check_limits(options)
    if options.max_draft_len >= options.max_num_tokens:
        raise BuildError(
            f"--max-draft-len {options.max_draft_len} needs a step of {options.max_draft_len + 1} tokens, but "
            f"--max-num-tokens is {options.max_num_tokens}; raise that or lower the drafts."
        )
    max_seq_len = longest_sequence(options, config.max_position)
    quantized = options.weight_dtype if options.weight_dtype in QUANTIZED_WEIGHT_BYTES else None
    dtype = compute_dtype(options, automatic_dtype(checkpoint_dtype, quantized is not None))
    _check_weight_dtype(options, dtype)
    static = static_kv_dtype(kv_cache_algo)
    if options.kv_dtype == "auto" and kv_cache_algo is not None and static is None:
        raise BuildError(
            f"The checkpoint quantizes the KV cache by {kv_cache_algo}, which no engine has; give --kv-dtype "
            f"{dtype}, int4, int8 or fp8, which use none of its scales."
        )
    kv_dtype = _choice(options.kv_dtype, automatic_kv_dtype(dtype, kv_cache_algo), KV_FORMATS, "--kv-dtype")
    if KV_FORMATS[kv_dtype].scales == "static" and static is None:
        raise BuildError(
            f"--kv-dtype {kv_dtype} needs a checkpoint that was calibrated for an 8-bit cache; make one with "
            f"kvforge quantize, or choose {kv_dtype.removesuffix('_static')}, which needs no calibration."
        )
    if options.draft_head is not None and options.max_draft_len == 0:
        raise BuildError("--draft-head drafts tokens, and the engine is to verify none; give --max-draft-len too.")
    drafts, *more = options.max_draft_len, options.kv_prediction is not None, options.draft_head is not None
    asked = Asked(config, policy, kv_dtype, dtype, options.target, options.weight_dtype, drafts, *more)
    compatibility.check(features_of(asked))
    if config.num_anchors % options.page_size:
        raise BuildError(
            f"The model has {config.num_anchors} anchors above its cut, which fill no whole pages of "
            f"{options.page_size} tokens; give a --page-size that divides them."
        )
    policy = of_cache(policy, kv_dtype)
    policy.check(config.num_kv_heads, config.head_dim, options.page_size)
    return ResolvedOptions(
        target=options.target,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_num_seqs=options.max_num_seqs,
        max_num_tokens=options.max_num_tokens,
        max_seq_len=max_seq_len,
        page_size=options.page_size,
        max_draft_len=options.max_draft_len,
        early_exit=config.early_exit,
        quantized_weights=quantized,
        policy=policy,
        decoupled_mode=options.decoupled_mode,
        compute_capabilities=options.compute_capabilities,
    )


def check_prediction(options: ResolvedOptions, prediction: Prediction) -> None:
    """Raise BuildError unless an engine of ``options`` can run this auxiliary model."""
    try:
        check_runs(prediction)
    except ModelError as error:
        raise BuildError(f"--kv-prediction: {error}") from None
    if any(0 < window < options.max_seq_len for window in prediction.auxiliary.layer_windows):
        raise BuildError("--kv-prediction takes auxiliary models that attend to all tokens; train another one.")
    if prediction.auxiliary.max_position < options.max_seq_len:
        raise BuildError(
            f"--max-seq-len {options.max_seq_len} is beyond the {prediction.auxiliary.max_position} positions of the "
            "predictor; choose a smaller one."
        )


def check_limits(options: BuildOptions) -> None:
    """Raise BuildError for a size outside ``LIMITS``, or for an option of another target."""
    for name, (minimum, maximum) in LIMITS.items():
        value = getattr(options, name)
        if value is not None and not minimum <= value <= maximum:
            bound = f"at least {minimum}" if value < minimum else f"at most {maximum}"
            raise BuildError(f"--{name.replace('_', '-')} is {value}; it must be {bound}.")
    for name, target in OF_TARGET.items():
        if options.target != target and getattr(options, name) != getattr(BuildOptions, name):
            flag = f"--{name.replace('_', '-')}"
            raise BuildError(f"{flag} is for --target {target}; leave it out for {options.target}.")


def longest_sequence(options: BuildOptions, max_position: int) -> int:
    """Return the tokens of the longest sequence; raises BuildError for more than the model's positions."""
    length = options.max_seq_len or max_position
    if length > max_position:
        raise BuildError(
            f"--max-seq-len {length} is beyond the {max_position} positions this model was trained for; choose a "
            "smaller one."
        )
    return length


def compute_dtype(options: BuildOptions, automatic: str) -> str:
    """Return the dtype of the computation, ``automatic`` unless one is given; raises BuildError for an unknown one."""
    return _choice(options.dtype, automatic, COMPUTE_DTYPES, "--dtype")


def _check_weight_dtype(options: BuildOptions, dtype: str) -> None:
    name = _choice(options.weight_dtype, dtype, WEIGHT_BYTES, "--weight-dtype")
    if name != dtype and name not in QUANTIZED_WEIGHT_BYTES:
        known = " or ".join(QUANTIZED_WEIGHT_BYTES)
        raise BuildError(f"--weight-dtype {name} is not --dtype {dtype}; give {known}, or leave it out.")


def _choice(given: str, auto: str, known: Collection[str], flag: str) -> str:
    name = auto if given == "auto" else whole_name(given)
    if name not in known:
        near = f", {NEAREST[given]} is nearest" if NEAREST.get(given) in known else ""
        raise BuildError(f"{flag} {given!r} is not supported{near}; choose auto, {', '.join(known)}.")
    return name
