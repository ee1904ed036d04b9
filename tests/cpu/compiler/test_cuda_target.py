"""Target cuda, as far as a machine without a GPU can tell: what goes into the packages, and that it computes the model.

Machine code is proven in tests/gpu.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch.aot_autograd import aot_function, make_boxed_func

import plugins
from kvforge.common.errors import BuildError, EngineError
from kvforge.compiler.options import ResolvedOptions
from kvforge.compiler.targets import load_target
from kvforge.runtime.sessions import cuda as cuda_session
from plugins import cuda_ops
from tests.support.models.kept_answers import kept_answer
from tests.support.sessions.fake import fake_manifest

ROOT = Path(__file__).resolve().parents[3]


def run_module(*arguments: str, **environment: str) -> dict[str, Any]:
    """Run ``python -m`` in a process of its own and return the JSON it prints."""
    result = subprocess.run(
        [sys.executable, "-m", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


GRAPHS = ("lower:bfloat16", "upper:fp8", "early_exit:bfloat16", "upper:shadowkv")
IN_PIECES = ("lower:bfloat16:8", "upper:shadowkv:8")


@pytest.fixture(scope="module")
def offline() -> dict[str, Any]:
    """What Inductor would generate code for; sources alone decide it."""
    program, asked = "tests.support.cuda.offline", (*GRAPHS, *IN_PIECES)
    return kept_answer(program, asked, lambda: run_module(program, *asked, TRITON_INTERPRET="0"), ["triton"])


@pytest.fixture(scope="module")
def graphs(offline: dict[str, Any]) -> dict[str, Any]:
    return {name: offline[name] for name in GRAPHS}


@pytest.fixture(scope="module")
def pieces(offline: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return {name: offline[name] for name in IN_PIECES}


def names(graph: dict[str, Any]) -> list[str]:
    return [kernel["name"].removesuffix("_kernel") for kernel in graph["kernels"]]


def test_packages_hold_triton_kernels_and_no_operator(graphs: dict[str, Any]) -> None:
    attention = ["paged_attention_partial", "paged_attention_combine"]
    below = ["rope_paged_kv_write", *attention]
    # Cut at 2 of 4 layers: two layers write and attend, then one more owner is written.
    assert names(graphs["lower:bfloat16"]) == [*below, *below, "rope_paged_kv_write"]
    assert names(graphs["upper:fp8"]) == [*attention, *attention]
    assert names(graphs["early_exit:bfloat16"]) == []
    selection = [
        "landmark_select_scores",
        "landmark_select_choose",
        "chunk_cache_update",
        "selected_kv_write",
    ]
    assert names(graphs["upper:shadowkv"]) == [*selection, *attention] * 2
    assert all(graph["operators"] == [] for graph in graphs.values())


def test_grids_follow_the_step(graphs: dict[str, Any]) -> None:
    """No size of the example step is frozen into a launch."""
    depends = {
        ("lower:bfloat16", "rope_paged_kv_write_kernel"): {"slot_mapping[0]"},
        ("lower:bfloat16", "paged_attention_partial_kernel"): {"kv_length[0]"},
        ("lower:bfloat16", "paged_attention_combine_kernel"): {"input_ids[0]", "kv_length[0]"},
        ("upper:shadowkv", "landmark_select_scores_kernel"): {"state_1[1]", "state_2[0]"},
        ("upper:shadowkv", "landmark_select_choose_kernel"): {"state_2[0]"},
        ("upper:shadowkv", "chunk_cache_update_kernel"): {"state_0[0]"},
        ("upper:shadowkv", "selected_kv_write_kernel"): {"state_0[0]"},
        ("upper:shadowkv", "paged_attention_partial_kernel"): {"kv_length[0]"},
        ("upper:shadowkv", "paged_attention_combine_kernel"): {"survivor_index[0]", "kv_length[0]"},
        ("upper:fp8", "paged_attention_partial_kernel"): {"kv_length[0]"},
        ("upper:fp8", "paged_attention_combine_kernel"): {"survivor_index[0]", "kv_length[0]"},
    }
    for name, graph in graphs.items():
        for kernel in graph["kernels"]:
            assert depends[name, kernel["name"]] <= set(kernel["depends"]), kernel


def test_pools_are_updated_in_place(graphs: dict[str, Any]) -> None:
    """Functionalization must not copy a cache; it may copy the few integers that say where sequences begin."""
    for graph in graphs.values():
        assert graph["clones"] == []
        assert set(graph["copies"]) <= {"query_start", "survivor_start"}
    for kernel in graphs["lower:bfloat16"]["kernels"]:
        if kernel["name"] == "rope_paged_kv_write_kernel":
            assert "k_pool_out" in kernel["arguments"] and "k_pool" not in kernel["arguments"]


def test_pieces_are_packages_like_whole_graphs(pieces: dict[str, list[dict[str, Any]]]) -> None:
    """Four layers below the cut and four above it: what is before, a layer, what is behind; above the cut the last
    layer, whose result is normed alone, is one more. Caches are updated in place, and nothing of ours is left."""
    attention = ["paged_attention_partial", "paged_attention_combine"]
    before, layer, behind = pieces["lower:bfloat16:8"]
    assert names(before) == [] and names(layer) == ["rope_paged_kv_write", *attention]
    assert set(names(behind)) == {"rope_paged_kv_write"}
    above = [names(piece) for piece in pieces["upper:shadowkv:8"]]
    assert [len(kernels) for kernels in above] == [0, 6, 6, 0] and above[1] == above[2]
    assert above[1][-2:] == attention
    for piece in (piece for each in pieces.values() for piece in each):
        assert piece["operators"] == [] and piece["clones"] == [] and set(piece["copies"]) <= {"?"}


def test_interpreted_kernels_compute_the_model() -> None:
    """Prefill, mixed and decode steps through both graphs, three cache formats, against the definitions."""
    program = "tests.support.cuda.interpreted"
    report = kept_answer(program, None, lambda: run_module(program, TRITON_INTERPRET="1"), ["triton", "numpy"])
    assert set(report) == {"float32", "int8", "fp8"}
    for steps in report.values():
        for rounding, logits_error, cache_error in steps.values():
            assert logits_error <= rounding and cache_error <= rounding, steps


def test_an_input_updated_in_place_is_passed_once() -> None:
    arguments = {"k": 1, "pool": 2, "pool_out": 2}
    assert cuda_ops.without_aliased_inputs(arguments) == {"k": 1, "pool": None, "pool_out": 2}


def test_registration_leaves_the_cpu_alone() -> None:
    """On CPU tensors a traced graph keeps the operator although its CUDA decomposition is registered."""
    cuda_ops.register()
    cuda_ops.register()
    calls: list[Any] = []

    def compiler(module: torch.fx.GraphModule, inputs: Any) -> Any:
        calls.extend(argument for node in module.graph.nodes for argument in (node.target, *node.args))
        return make_boxed_func(module)

    def write(k: Tensor, cos: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        torch.ops.kvforge.rope_paged_kv_write(k, k, cos, cos, slots, k_pool, v_pool)
        return k + 1

    plugins.load_library()
    pools = [torch.zeros(2, 4, 1, 8) for _ in range(2)]
    with torch.no_grad():
        aot_function(write, compiler)(torch.ones(3, 1, 8), torch.ones(3, 4), torch.tensor([1, -1, 2]).int(), *pools)
    assert torch.ops.kvforge.rope_paged_kv_write.default in calls
    assert torch.equal(pools[1].sum((1, 2, 3)), torch.tensor([16.0, 0.0]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_building_and_loading_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="sees none; build where the engine will run"):
        load_target("cuda").check_toolchain(ResolvedOptions("cuda", "bfloat16", "bfloat16", 8, 100, 1000, 32))
    manifest = dataclasses.replace(fake_manifest(), target="cuda", isa=("sm_90",))
    with pytest.raises(EngineError, match=r"rebuild it with --target cpu\.$"):
        cuda_session.check_gpu(manifest, tmp_path)
