"""One loaded engine: its compiled graphs, its weights and the allocation of its cache."""

import contextlib
import itertools
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import plugins
from kvforge.engine import LOWER_FILE, OPERATORS_FILE, UPPER_FILE, WEIGHTS_FILE, Manifest
from kvforge.errors import EngineError, first_line
from kvforge.hardware import cpu_isa

Pool = tuple[Tensor, Tensor]
Graph = Callable[[list[Tensor]], list[Tensor]]
"""A compiled graph: flat inputs to flat outputs."""

_TMPDIR_LOCK = threading.Lock()
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Session:
    """The two graphs of an engine on this CPU; stateless between calls, all state is in the pools.

    ``lower`` and ``upper`` take int32 tensors as DESIGN's step table says; pools are those of all owners.
    """

    def __init__(self, manifest: Manifest, weights: dict[str, Tensor], lower: Graph, upper: Graph) -> None:
        self.manifest = manifest
        self._weights = weights  # the graphs use this memory without owning it
        self._lower = lower
        self._upper = upper
        first_upper = sum(owner < manifest.cut for owner in manifest.owners)
        self._upper_owners = slice(first_upper, None)

    def lower(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        query_start: Tensor,
        kv_length: Tensor,
        page_table: Tensor,
        pools: list[Pool],
    ) -> Tensor:
        """Run all T tokens to the cut, writing every owner's K,V; returns hidden ``[T, hidden_size]``."""
        step = (input_ids, positions, slot_mapping, query_start, kv_length, page_table)
        return self._lower([*step, *itertools.chain.from_iterable(pools)])[0]

    def upper(
        self,
        hidden: Tensor,
        survivor_index: Tensor,
        survivor_start: Tensor,
        positions: Tensor,
        kv_length: Tensor,
        page_table: Tensor,
        pools: list[Pool],
    ) -> Tensor:
        """Run the R survivors past the cut; returns fp32 logits ``[R, vocab_size]``."""
        step = (hidden, survivor_index, survivor_start, positions, kv_length, page_table)
        return self._upper([*step, *itertools.chain.from_iterable(pools[self._upper_owners])])[0]

    def allocate_pools(self, num_pages: int) -> list[Pool]:
        """Return K and V pools ``[num_pages, page_size, kv_heads, head_dim]`` per owner, zeroed views of one
        allocation of ``num_pages * manifest.page_bytes`` bytes."""
        manifest = self.manifest
        shape = (manifest.num_owners, 2, num_pages, manifest.page_size, manifest.num_kv_heads, manifest.head_dim)
        memory = torch.zeros(shape, dtype=_DTYPES[manifest.kv_dtype])
        return [(memory[owner, 0], memory[owner, 1]) for owner in range(manifest.num_owners)]


def load_session(engine_dir: str | Path, manifest: Manifest) -> Session:
    """Load the graphs of an engine and bind them to its one memory-mapped weights file.

    Raises:
        EngineError: the engine was built for another torch, another CPU or another operator version, or one of
            its files is damaged.
    """
    engine_dir = Path(engine_dir)
    _check_compatible(manifest, engine_dir)
    try:
        plugins.load_library(engine_dir / OPERATORS_FILE)
    except plugins.PluginError as error:
        raise EngineError(str(error)) from error
    try:
        with safe_open(engine_dir / WEIGHTS_FILE, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise EngineError(f"{engine_dir / WEIGHTS_FILE} is damaged ({error}); rebuild the engine.") from error
    with _private_tmpdir():
        lower, upper = (_load_graph(engine_dir / name, weights) for name in (LOWER_FILE, UPPER_FILE))
    return Session(manifest, weights, lower, upper)


@contextlib.contextmanager
def _private_tmpdir() -> Iterator[None]:
    """Packages are unpacked under $TMPDIR and mapped; the files can go as soon as that is done, so that a killed
    process leaves none behind. The variable is the process's, so loads take turns."""
    with _TMPDIR_LOCK, tempfile.TemporaryDirectory(prefix="kvforge-", ignore_cleanup_errors=True) as folder:
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = folder
        try:
            yield
        finally:
            os.environ.pop("TMPDIR")
            if before is not None:
                os.environ["TMPDIR"] = before


def _load_graph(path: Path, weights: dict[str, Tensor]) -> Graph:
    """Load an AOTInductor package and bind ``weights`` without copying them."""
    try:
        graph = torch._inductor.aoti_load_package(str(path))
        names = graph.get_constant_fqns()
        graph.load_constants({name: weights[name] for name in names}, check_full_update=True, user_managed=True)
    except KeyError as error:
        raise EngineError(f"{path} needs the weight {error}, which the engine lacks; rebuild the engine.") from error
    except Exception as error:
        raise EngineError(f"{path} cannot be loaded ({first_line(error)}); rebuild the engine.") from error
    return graph.loader.boxed_run


def _check_compatible(manifest: Manifest, engine_dir: Path) -> None:
    if manifest.target != "cpu":
        raise EngineError(f"{engine_dir} was built for target {manifest.target}, which this runtime does not run.")
    if manifest.torch_version != torch.__version__:
        raise EngineError(
            f"{engine_dir} was built with torch {manifest.torch_version}, this is torch "
            f"{torch.__version__}; rebuild the engine with kvforge build."
        )
    missing = set(manifest.isa) - set(cpu_isa())
    if missing:
        raise EngineError(
            f"{engine_dir} was built for a CPU with {', '.join(sorted(missing))}, which this one lacks; "
            "rebuild the engine on this machine with kvforge build."
        )
    versions = {operator.name: operator.version for operator in plugins.OPERATORS.values()}
    if manifest.operators != versions:
        raise EngineError(
            f"{engine_dir} uses other operator versions ({manifest.operators}) than this kvforge "
            f"({versions}); rebuild the engine with kvforge build."
        )
