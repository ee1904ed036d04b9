"""The ONNX graphs of small models: exported once, executed by onnxruntime."""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvforge.checkpoint.model import open_model
from kvforge.compiler.build import num_positions
from kvforge.compiler.convert import convert_weights
from kvforge.compiler.onnx_export import write_onnx
from kvforge.compiler.options import ResolvedOptions
from kvforge.kv_policies import parse
from kvforge.tensorrt.graph_tensors import RESULTS, pool_names
from model_defs import ModelConfig, load_config
from model_defs.layers import Pool
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.kept_answers import kept_folder
from tests.support.onnx.nodes import OnnxSession


@dataclass(frozen=True)
class OnnxCase:
    """A model to export; ``kv_dtype`` as in ``ResolvedOptions``."""

    family: str
    cut: int | None = None
    group_size: int = 1
    kv_dtype: str = "float32"
    dtype: str = "float32"
    model: tuple[tuple[str, object], ...] = ()
    policy: str = "full"


CASES = {
    "swiftkv": OnnxCase("llama", 2, 2, model=(("num_hidden_layers", 5),)),
    "plain, sliding window": OnnxCase("mistral", model=(("num_hidden_layers", 2), ("sliding_window", 24))),
    "rotation in part, norms of branches": OnnxCase("glm4", 2, 2, model=(("num_hidden_layers", 3),)),
    "qk norm, tied, int8": OnnxCase(
        "qwen3", 1, 2, "int8", model=(("num_hidden_layers", 3), ("tie_word_embeddings", True))
    ),
    "fp8": OnnxCase("qwen2", 1, 1, "fp8", model=(("num_hidden_layers", 2),)),
    "static fp8": OnnxCase("llama", 1, 1, "fp8_static", model=(("num_hidden_layers", 2),)),
    "static int8": OnnxCase("llama", 1, 1, "int8_static", model=(("num_hidden_layers", 2),)),
}


def static_scales(config: ModelConfig, kv_dtype: str) -> tuple[tuple[float, float], ...]:
    """Scales of each owner for a static format, small enough for a few numbers to saturate."""
    largest = {"fp8_static": 448.0, "int8_static": 127.0}.get(kv_dtype)
    if largest is None:
        return ()
    return tuple(((2.0 + owner) / largest, (1.5 + owner) / largest) for owner in config.owners)


@dataclass(frozen=True)
class ExportedEngine:
    """Where the ONNX files and the checkpoint of a case are, and what they were made with."""

    folder: Path
    checkpoint: Path
    config: ModelConfig
    options: ResolvedOptions

    def file(self, graph: str) -> Path:
        """The ONNX file of a graph."""
        return self.folder / f"{graph}.onnx"

    @property
    def weights(self) -> Path:
        """The file that all graphs refer to."""
        return self.folder / "weights.safetensors"


def export_case(case: OnnxCase, graphs: tuple[str, ...] = ("lower", "upper")) -> ExportedEngine:
    """Return the export of a case, made once for all runs of the same sources: nobody writes into its directory."""
    question = [dataclasses.asdict(case), graphs]
    folder = kept_folder(__name__, question, lambda new: _export(case, new, graphs), ("onnx", "onnx_ir", "onnxscript"))
    return _exported(case, folder)


def _exported(case: OnnxCase, folder: Path) -> ExportedEngine:
    checkpoint = folder / "checkpoint"
    config = load_config(json.loads((checkpoint / "config.json").read_text()))
    options = ResolvedOptions(
        "tensorrt",
        case.dtype,
        case.kv_dtype,
        4,
        64,
        512,
        8,
        kv_scales=static_scales(config, case.kv_dtype),
        policy=parse(case.policy),
    )
    return ExportedEngine(folder, checkpoint, config, options)


def _export(case: OnnxCase, folder: Path, graphs: tuple[str, ...]) -> None:
    """Make the checkpoint of a case, its weights file and its ONNX graphs below ``folder``."""
    make_checkpoint(folder / "checkpoint", case.family, cut=case.cut, group_size=case.group_size, **dict(case.model))
    engine = _exported(case, folder)
    options, positions = engine.options, num_positions(engine.options)
    convert_weights(
        open_model(engine.checkpoint), engine.config, options.torch_dtype, engine.weights, num_positions=positions
    )
    for graph in graphs:
        write_onnx(graph, engine.config, options, engine.file(graph), engine.weights)


class OnnxGraphs:
    """Lower and upper graph in onnxruntime; the files as they were written. Pools come in and new ones go out."""

    def __init__(self, engine: ExportedEngine) -> None:
        self.engine = engine
        self.sessions = {graph: OnnxSession(str(engine.file(graph))) for graph in ("lower", "upper")}

    def lower(self, step: tuple[Tensor, ...], pools: list[Pool]) -> tuple[Tensor, list[Pool]]:
        """Return hidden and the new pools of every owner."""
        names = self._pools(self.engine.config.owners)
        results = self._run("lower", step, names, pools)
        flat = iter([results[f"{name}_out"] for name in names])
        return results["hidden"], [tuple(itertools.islice(flat, len(pool))) for pool in pools]

    def upper(self, step: tuple[Tensor, ...], pools: list[Pool]) -> Tensor:
        """Return the logits; ``pools`` are those of all owners."""
        config = self.engine.config
        upper_pools = [pool for owner, pool in zip(config.owners, pools, strict=True) if owner in config.upper_owners]
        names = self._pools(config.upper_owners)
        return self._run("upper", step, names, upper_pools)[RESULTS["upper"][0]]

    def _pools(self, owners: Sequence[int]) -> list[str]:
        return pool_names(owners, self.engine.options.kv_dtype, self.engine.options.policy)

    def _run(self, graph: str, step: tuple[Tensor, ...], names: list[str], pools: list[Pool]) -> dict[str, Tensor]:
        session = self.sessions[graph]
        tensors = [*step, *itertools.chain.from_iterable(pools)]
        assert len(session.inputs) == len(tensors) and session.inputs[len(step) :] == names
        return session.run(dict(zip(session.inputs, tensors, strict=True)))


def empty_pools(engine: ExportedEngine, num_pages: int) -> list[Pool]:
    """Pools of every owner, poisoned: NaN, or 127 where the dtype has none."""
    config, options = engine.config, engine.options
    shape = (num_pages, options.page_size, config.num_kv_heads, config.head_dim)

    def poison(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.full(size, 127.0 if dtype == torch.int8 else float("nan")).to(dtype)

    def pool() -> Pool:
        scales = [poison(shape[:3], torch.float32) for _ in range(2 if options.has_scale_pools else 0)]
        return (*(poison(shape, options.torch_kv_dtype) for _ in range(2)), *scales)

    return [pool() for _ in config.owners]
