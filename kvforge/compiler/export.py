"""Exporting the two graphs with every step dimension dynamic."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from kvforge.compiler.options import DTYPES, ResolvedOptions
from model_defs import ModelConfig
from model_defs.graphs import LowerGraph, UpperGraph

# Example sizes are pairwise different and not 0 or 1, so that no two dimensions are taken for one.
_TOKENS, _SEQUENCES, _SURVIVORS, _COLUMNS, _PAGES = 24, 3, 5, 7, 11


@dataclass(frozen=True)
class ExportedGraph:
    """An exported graph, and for each pool placeholder pair the owner layer it belongs to."""

    name: str
    program: ExportedProgram
    pool_owners: tuple[int, ...]


def _uninitialised(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Give a meta-device module storage: parameters in ``dtype`` are never written, so they cost no memory;
    buffers (fp32 frequencies) are left as they are."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=dtype)
                owner._parameters[name] = nn.Parameter(empty, requires_grad=False)
    return module.eval()


def _pools(config: ModelConfig, options: ResolvedOptions, num_owners: int) -> list[tuple[Tensor, Tensor]]:
    shape = (_PAGES, options.page_size, config.num_kv_heads, config.head_dim)
    dtype = DTYPES[options.kv_dtype]
    return [(torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)) for _ in range(num_owners)]


def _int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def export_lower(config: ModelConfig, options: ResolvedOptions) -> ExportedGraph:
    """Export ``lower``: T, S, M and the number of pages are dynamic."""
    with torch.device("meta"):
        module = LowerGraph(config)
    module.inverse_frequencies = config.rope.inverse_frequencies(config.head_dim)
    tokens = torch.zeros(_TOKENS, dtype=torch.int32)
    arguments: tuple[Any, ...] = (
        tokens,
        tokens.clone(),
        tokens.clone(),
        _int32(0, 5, 9, _TOKENS),
        _int32(5, 4, 15),
        torch.zeros(_SEQUENCES, _COLUMNS, dtype=torch.int32),
        _pools(config, options, len(config.owners)),
    )
    num_tokens, num_sequences, columns, pages = Dim.DYNAMIC, Dim.DYNAMIC, Dim.DYNAMIC, Dim.DYNAMIC
    dynamic = (
        {0: num_tokens},
        {0: num_tokens},
        {0: num_tokens},
        {0: num_sequences},
        {0: num_sequences},
        {0: num_sequences, 1: columns},
        [({0: pages}, {0: pages})] * len(config.owners),
    )
    program = torch.export.export(
        _uninitialised(module, DTYPES[options.dtype]), arguments, dynamic_shapes=dynamic, strict=False
    )
    return ExportedGraph("lower", program, config.owners)


def export_upper(config: ModelConfig, options: ResolvedOptions) -> ExportedGraph:
    """Export ``upper``: T, R, S, M and the number of pages are dynamic."""
    with torch.device("meta"):
        module = UpperGraph(config)
    module.inverse_frequencies = config.rope.inverse_frequencies(config.head_dim)
    hidden = torch.zeros(_TOKENS, config.hidden_size, dtype=DTYPES[options.dtype])
    arguments: tuple[Any, ...] = (
        hidden,
        torch.zeros(_SURVIVORS, dtype=torch.int32),
        _int32(0, 1, 3, _SURVIVORS),
        torch.zeros(_TOKENS, dtype=torch.int32),
        _int32(5, 4, 15),
        torch.zeros(_SEQUENCES, _COLUMNS, dtype=torch.int32),
        _pools(config, options, len(config.upper_owners)),
    )
    auto = Dim.DYNAMIC
    step = {0: auto} if config.is_swiftkv else {0: Dim.AUTO}  # without a cut these are not read
    dynamic = (
        {0: auto},
        {0: auto},
        step,
        step,
        step,
        {0: step[0], 1: step[0]},
        [({0: auto}, {0: auto})] * len(config.upper_owners),
    )
    program = torch.export.export(
        _uninitialised(module, DTYPES[options.dtype]), arguments, dynamic_shapes=dynamic, strict=False
    )
    return ExportedGraph("upper", program, config.upper_owners)
