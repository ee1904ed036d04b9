"""What the user may choose when building an engine, and how "auto" is resolved."""

from dataclasses import dataclass

import torch

from kvforge.errors import BuildError
from model_defs import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ALIASES = {"fp32": "float32", "bf16": "bfloat16"}
TARGETS = ("cpu",)


@dataclass(frozen=True)
class BuildOptions:
    """Options as given; ``None`` and ``"auto"`` leave the choice to :func:`resolve`."""

    target: str = "cpu"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    max_num_seqs: int = 64
    max_num_tokens: int = 2048
    max_seq_len: int | None = None
    page_size: int = 32


@dataclass(frozen=True)
class ResolvedOptions:
    """Options with every choice made; dtypes are keys of ``DTYPES``, sizes in tokens."""

    target: str
    dtype: str
    kv_dtype: str
    max_num_seqs: int
    max_num_tokens: int
    max_seq_len: int
    page_size: int


def resolve(options: BuildOptions, config: ModelConfig, checkpoint_dtype: str) -> ResolvedOptions:
    """Fill in what was left open: compute in fp32 for fp32 checkpoints, else bf16; cache in the same dtype.

    ``checkpoint_dtype`` is safetensors' name of the stored weights' dtype.

    Raises:
        BuildError: an unknown target or dtype, a limit below 1, or ``max_seq_len`` beyond the model's.
    """
    if options.target not in TARGETS:
        raise BuildError(f"Target {options.target!r} is not supported; supported: {', '.join(TARGETS)}.")
    for name in ("max_num_seqs", "max_num_tokens", "max_seq_len", "page_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise BuildError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")
    max_seq_len = options.max_seq_len or config.max_position
    if max_seq_len > config.max_position:
        raise BuildError(
            f"--max-seq-len {max_seq_len} is beyond the {config.max_position} positions this model was "
            "trained for; choose a smaller one."
        )
    auto = "float32" if checkpoint_dtype in ("F32", "F64") else "bfloat16"
    dtype = _dtype_name(options.dtype, auto, "--dtype")
    return ResolvedOptions(
        target=options.target,
        dtype=dtype,
        kv_dtype=_dtype_name(options.kv_dtype, dtype, "--kv-dtype"),
        max_num_seqs=options.max_num_seqs,
        max_num_tokens=options.max_num_tokens,
        max_seq_len=max_seq_len,
        page_size=options.page_size,
    )


def _dtype_name(given: str, auto: str, flag: str) -> str:
    name = auto if given == "auto" else ALIASES.get(given, given)
    if name not in DTYPES:
        raise BuildError(f"{flag} {given!r} is not supported; choose auto, {', '.join(DTYPES)}.")
    return name
