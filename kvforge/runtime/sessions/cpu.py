"""An engine of target ``cpu``: its compiled graphs, its weights and the allocation of its cache."""

import itertools
import logging
import os
from pathlib import Path

from torch import Tensor

import plugins
from kvforge.common.errors import EngineError
from kvforge.common.hardware import ISA_NAMES, available_isas, best_isa, cpu_isa
from kvforge.common.heap import keep_freed_memory
from kvforge.manifest import OPERATORS_FILE, Manifest
from kvforge.runtime.sessions.aot_package import Graph, load_graph, load_weights, private_tmpdir
from kvforge.runtime.sessions.compatibility import check_operators, check_torch, rope_tables
from kvforge.runtime.sessions.inputs import (
    DraftStep,
    LowerStep,
    PredictStep,
    UpperStep,
    VerifyStep,
    past_cut_inputs,
    policy_inputs,
)
from kvforge.runtime.sessions.missing import NO_DRAFT_HEAD, NO_DRAFTS, NO_EARLY_EXIT, NO_PREDICTION
from kvforge.runtime.sessions.pools import (
    Pool,
    Pools,
    allocate_auxiliary_pools,
    allocate_draft_pool,
    upper_pools,
)
from kvforge.runtime.sessions.session import Session

logger = logging.getLogger(__name__)

LARGEST_TEMPORARY = 2**28
"""Bytes of the largest block that a step frees and its process keeps; weights and pools have memory of their own."""


class CpuSession(Session):
    """The graphs of an engine on this CPU; stateless between calls, all state is in the pools.

    See ``kvforge.runtime.sessions.session.Session``.
    """

    def __init__(self, manifest: Manifest, weights: dict[str, Tensor], graphs: dict[str, Graph]) -> None:
        self.manifest = manifest
        self._lower_pools = manifest.lower_pools
        self._policy = manifest.policy
        self._weights = weights  # the graphs use this memory without owning it
        self._lower, self._upper = graphs["lower"], graphs["upper"]
        self._early_exit, self._verify = graphs.get("early_exit"), graphs.get("verify")
        self._predict, self._draft = graphs.get("predict"), graphs.get("draft")

    def lower(self, step: LowerStep, pools: Pools) -> Tensor:
        memory = itertools.chain.from_iterable(pools[self._lower_pools])
        return self._lower([*step.inputs, *memory, *policy_inputs(step, self._policy), *step.rows])[0]

    def upper(self, step: UpperStep, pools: Pools) -> Tensor:
        memory = itertools.chain.from_iterable(upper_pools(self.manifest, pools))
        return self._upper([*step.inputs, *memory, *policy_inputs(step, self._policy), *past_cut_inputs(step)])[0]

    def upper_and_states(self, step: UpperStep, pools: Pools) -> tuple[Tensor, Tensor]:
        memory = itertools.chain.from_iterable(upper_pools(self.manifest, pools))
        behind = policy_inputs(step, self._policy), past_cut_inputs(step)
        logits, states = self._upper([*step.inputs, *memory, *itertools.chain.from_iterable(behind)])
        return logits, states

    def allocate_draft_pool(self, num_pages: int) -> Pool:
        if self._draft is None:
            raise EngineError(NO_DRAFT_HEAD)
        return allocate_draft_pool(self.manifest, num_pages)

    def draft(self, step: DraftStep, pool: Pool) -> tuple[Tensor, Tensor]:
        if self._draft is None:
            raise EngineError(NO_DRAFT_HEAD)
        tokens, hidden = self._draft([*step, *pool])
        return tokens, hidden

    def early_exit(self, hidden: Tensor, survivor_index: Tensor) -> Tensor:
        if self._early_exit is None:
            raise EngineError(NO_EARLY_EXIT)
        return self._early_exit([hidden, survivor_index])[0]

    def allocate_auxiliary_pools(self, num_pages: int) -> Pools:
        if self._predict is None:
            raise EngineError(NO_PREDICTION)
        return allocate_auxiliary_pools(self.manifest, num_pages)

    def predict(self, step: PredictStep, pools: Pools, auxiliary_pools: Pools) -> Tensor:
        if self._predict is None:
            raise EngineError(NO_PREDICTION)
        return self._predict([*step.inputs, *itertools.chain.from_iterable((*pools, *auxiliary_pools))])[0]

    def verify(self, step: VerifyStep) -> tuple[Tensor, Tensor]:
        if self._verify is None:
            raise EngineError(NO_DRAFTS)
        accepted, next_token = self._verify(list(step))
        return accepted, next_token

    @property
    def rope_tables(self) -> tuple[Tensor, Tensor]:
        return rope_tables(self._weights)


def check_chosen_isa(library: Path) -> None:
    """Raise EngineError where ``KVFORGE_CPU_ISA`` names kernels that the library lacks, or that this CPU cannot run;
    else the first step would."""
    chosen = os.environ.get("KVFORGE_CPU_ISA")
    runs = available_isas()
    if "avx512_bf16" in runs:
        runs = (*runs, "amx_software")
    usable = [isa for isa in runs if plugins.has_kernels_for(isa)]
    if chosen and chosen not in usable:
        raise EngineError(
            f"KVFORGE_CPU_ISA={chosen} names no kernels that this CPU runs and {library} has; choose from "
            f"{', '.join(usable)}, or unset it."
        )


def load_session(engine_dir: Path, manifest: Manifest) -> CpuSession:
    """Load the graphs of an engine and bind them to the weights of its one file.

    Raises:
        EngineError: the engine was built for another torch, another CPU or another operator version, or one of
            its files is damaged.
    """
    check_torch(manifest, engine_dir)
    missing = set(manifest.isa) - set(cpu_isa())
    if missing:
        raise EngineError(
            f"{engine_dir} was built for a CPU with {', '.join(sorted(missing))}, which this one lacks; "
            "rebuild the engine on this machine with kvforge build."
        )
    check_operators(manifest, engine_dir)
    keep_freed_memory(LARGEST_TEMPORARY)
    try:
        library = plugins.load_library(engine_dir / OPERATORS_FILE)
    except plugins.PluginError as error:
        raise EngineError(str(error)) from error
    check_chosen_isa(library)
    if not plugins.has_kernels_for(best_isa()):
        logger.warning(
            "The kernels for %s, which this CPU runs, were not compiled into %s: build the engine here with kvforge "
            "build, without KVFORGE_BUILD_ISA, for full speed.",
            ISA_NAMES[best_isa()],
            library,
        )
    weights = load_weights(engine_dir)
    with private_tmpdir():
        graphs = {name: load_graph(engine_dir, name, weights) for name in manifest.graphs}
    return CpuSession(manifest, weights, graphs)
