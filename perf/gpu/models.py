"""Llama-3.1-8B-shaped engines with random weights that are drawn on the device: no checkpoint, no weights file."""

import dataclasses
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvforge.compiler.convert import FREQUENCIES, ROPE_TABLES
from kvforge.compiler.cpu_graph import linears, packed_tensors
from kvforge.compiler.manifest_fields import manifest_fields
from kvforge.compiler.options import BuildOptions, ResolvedOptions, resolve
from kvforge.compiler.targets import load_target
from kvforge.costs.weights import num_parameters
from kvforge.kv_policies.shadowkv import ShadowKV
from kvforge.manifest import RANK_DIR, SCHEMA_VERSION, Manifest
from kvforge.runtime.sessions.aot_package import load_graph, private_tmpdir
from kvforge.runtime.sessions.cpu import CpuSession
from kvforge.runtime.sessions.cuda import CudaSession, make_session
from kvforge.version import __version__
from model_defs import ModelConfig, load_config
from model_defs.rope import inverse_frequencies, rope_tables
from model_defs.weights import weight_specs
from perf.gpu.queue.sources import GRAPHS, digest_of
from perf.harness.random_checkpoint import LLAMA_8B, with_cut
from plugins import load_library

COMPLETE = "complete"
"""The file that says of which sources, and for which machine, the graphs in its folder were compiled."""

TINY: dict[str, Any] = {
    **LLAMA_8B, "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A cut as a fraction of the layers (None: no cut), an AcrossKV group size, a cache format and a KV policy."""

    cut: float | None = None
    group_size: int = 1
    kv_dtype: str = "auto"
    kv_policy: str = "full"


VARIANTS = {
    "baseline": Variant(),
    "cut16": Variant(0.5),
    "cut16-4way": Variant(0.5, 4),
    "cut16-4way-fp8": Variant(0.5, 4, "fp8"),
}


@dataclass(frozen=True)
class Limits:
    """Limits of an engine, as of ``BuildOptions``."""

    max_num_seqs: int
    max_num_tokens: int
    max_seq_len: int
    page_size: int


def model_config(shape: dict[str, Any], variant: Variant) -> ModelConfig:
    """Return the model of a variant."""
    cut = None if variant.cut is None else int(shape["num_hidden_layers"] * variant.cut)
    return load_config(with_cut(shape, cut, variant.group_size))


def resolved_options(config: ModelConfig, variant: Variant, limits: Limits, target: str) -> ResolvedOptions:
    """Return the build options of a variant: bf16 weights, the variant's cache."""
    cache = {"kv_dtype": variant.kv_dtype, "kv_policy": variant.kv_policy}
    return resolve(BuildOptions(target, "bfloat16", **cache, **dataclasses.asdict(limits)), config, "BF16")


def compile_graphs(config: ModelConfig, options: ResolvedOptions, folder: Path) -> None:
    """Compile the graphs into ``folder`` unless they are there, from the same sources for the same machine; prints each
    stage."""
    target = load_target(options.target)
    target.check_toolchain(options)
    digest = digest_of(GRAPHS, repr((config, options, torch.__version__, target.isa(), target.PIECES)))
    mark = folder / COMPLETE
    if mark.is_file() and mark.read_text() == digest:
        return
    shutil.rmtree(folder, ignore_errors=True)
    (folder / RANK_DIR).mkdir(parents=True)
    target.write_graphs(config, options, folder, lambda stage: print(f"{folder.name}: {stage}", flush=True))
    mark.write_text(digest)


def random_weights(config: ModelConfig, options: ResolvedOptions, seed: int = 0) -> dict[str, Tensor]:
    """Return bf16 weights of both graphs (normal, standard deviation 1/sqrt(fan-in), norm gains 1) on the target's
    device, packed where the graphs' are, and the tables of positions that ShadowKV's have."""
    device = "cuda" if options.target == "cuda" else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    weights = {FREQUENCIES: inverse_frequencies(config.rope, config.head_dim).to(device)}
    if isinstance(options.policy, ShadowKV):
        tables = rope_tables(config.rope, config.head_dim, options.max_seq_len)
        weights |= {name: table.to(device) for name, table in zip(ROPE_TABLES, tables, strict=True)}
    for spec in weight_specs(config):
        tensor = torch.empty(spec.shape, dtype=torch.bfloat16, device=device)
        if tensor.dim() == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 1 / math.sqrt(spec.shape[1]), generator=generator)
        weights[spec.name] = tensor
    if options.packed_dtype is not None:
        for name, layer in linears(config).items():
            packed = packed_tensors(weights[f"{name}.weight"], layer, options.packed_dtype)
            weights |= {f"{name}.{part}": tensor for part, tensor in packed.items()}
    return weights


def manifest_of(config: ModelConfig, options: ResolvedOptions) -> Manifest:
    """Return the manifest of an engine that lies in memory only."""
    return Manifest(
        schema_version=SCHEMA_VERSION, kvforge_version=__version__, isa=(),
        torch_version=torch.__version__, **manifest_fields(config, options), num_parameters=num_parameters(config),
        weights_file_bytes=0, checkpoint_sha256="", operators={}, files={},
    )  # fmt: skip


def open_session(manifest: Manifest, weights: dict[str, Tensor], folder: Path) -> CudaSession | CpuSession:
    """Return a session on the compiled graphs in ``folder`` and these weights."""
    if manifest.target == "cuda":
        return make_session(folder, manifest, weights)
    load_library()
    with private_tmpdir():
        graphs = {name: load_graph(folder, name, weights) for name in manifest.graphs}
    return CpuSession(manifest, weights, graphs)
