"""Plans of everything that target ``tensorrt`` claims, built by TensorRT for RTX without a GPU, and wrong graphs.

The claims are derived from what the build refuses. Nothing is run: what a plan is built of and what the builder says of
it is checked.
"""

import dataclasses
from typing import Any

import pytest

from kvforge.costs.weights import weight_bytes
from tests.support.tensorrt.claims import POLICIES, Claim, claim_with, claimed_values, claims, is_claimed, values
from tests.support.tensorrt.rtx import built_by_rtx

pytestmark = pytest.mark.timeout(1800)  # nothing kept, on a slow machine: 22 claims take 350 core-seconds
CLAIMS = claims()
SHADOWKV = POLICIES["shadowkv"]
PORTABLE = ["8.0", "8.6", "8.9", "12.0"]


def case_id(claim: Claim) -> str:
    given = dataclasses.asdict(claim)
    return "-".join(str(value) for name, value in given.items() if value != getattr(Claim(), name)) or "default"


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> dict[Claim, dict[str, Any]]:
    """What was built of each claim that is tested in this run, some of them at a time."""
    cases = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    tested = [case.params["claim"] for case in cases if case is not None and "claim" in case.params]
    answers = built_by_rtx("plans", [dataclasses.asdict(claim) for claim in tested])
    return dict(zip(tested, answers, strict=True))


def test_each_claimed_value_is_built_and_no_other() -> None:
    assert all(map(is_claimed, CLAIMS))
    for name, claimed in claimed_values().items():
        assert {getattr(claim, name) for claim in CLAIMS} == set(claimed), name
        assert all(claim_with(name, value) is None for value in set(values()[name]) - {*claimed})
    assert {"llama", "qwen3"} <= set(claimed_values()["family"])
    assert {"full", "streaming", "snapkv", "h2o", "roco", SHADOWKV} <= set(claimed_values()["kv_policy"])
    assert not {"quest", "adakv", "expected"} & set(claimed_values()["kv_policy"])


@pytest.mark.parametrize("claim", CLAIMS, ids=case_id)
def test_a_plan_of_every_graph(claim: Claim, built: dict[Claim, dict[str, Any]]) -> None:
    check_files_and_fields(claim, built[claim])
    check_kernels(claim, built[claim]["kernels"])
    check_sizes(claim, built[claim]["reports"])


def check_files_and_fields(claim: Claim, answer: dict[str, Any]) -> None:
    graphs = claim.options.graphs
    assert set(answer["reports"]) == set(graphs)
    files = [f"{graph}.{ending}" for graph in graphs for ending in ("onnx", "plan")]
    assert answer["files"] == sorted(["plans.json", "weights.safetensors", *files])
    fields = answer["fields"]
    has_fp8 = claim.kv_dtype.startswith("fp8")
    assert fields["plan_builder"] == "tensorrt-rtx" and fields["plan_version"]
    assert fields["plan_capabilities"] == (PORTABLE[2:] if has_fp8 else PORTABLE)
    assert fields["plan_is_portable"]
    ending = "Dynamic" if claim.options.has_scale_pools else ""
    names = ["PagedAttentionCombine", "PagedAttentionPartial", "RopePagedKvWrite", *plugins_of_policy(claim)]
    assert fields["plan_plugins"] == sorted(
        [f"{name}{ending}" for name in names] + (["SpeculativeVerify"] if claim.max_draft_len else [])
    )


def plugins_of_policy(claim: Claim) -> list[str]:
    """Without the ending of caches with dynamic scales."""
    if claim.kv_policy == SHADOWKV:
        chosen = ["ChunkCacheUpdate", "LandmarkSelectChoose", "LandmarkSelectScores"]
        return [*chosen, "LowRankKeyReconstruct", "SelectedKvPlace"]
    if claim.options.policy.insertion.operators != ("kvforge::attention_mass",):
        assert claim.options.policy.insertion.operators == ()
        return []
    adds = "AddSquares" if "squares" in {pool.name for pool in claim.options.policy.keeping.named_pools} else "Add"
    return ["AttentionMassTotals", f"AttentionMass{adds}"]


def check_kernels(claim: Claim, kernels: dict[str, list[list[dict[str, Any]]]]) -> None:
    """They are in the plan for each GPU that it is for, whole: what a plan without Triton starts."""
    compiled = [89] if claim.kv_dtype.startswith("fp8") else [80, 89]
    for graph in claim.options.graphs:
        assert all([launch["capability"] for launch in found] == compiled for found in kernels[graph])
        entries = {launch["entry"] for found in kernels[graph] for launch in found}
        attends = {"paged_attention_partial_kernel", "paged_attention_combine_kernel"}
        if claim.kv_policy == SHADOWKV:
            attends |= {f"{name}_kernel" for name in ("chunk_cache_update", "low_rank_key_reconstruct")}
            attends |= {"selected_kv_place_kernel"}
            attends |= {f"landmark_select_{step}_kernel" for step in ("choose", "scores")}
        elif plugins_of_policy(claim):
            attends |= {"attention_mass_totals_kernel", "attention_mass_add_kernel"}
        assert entries == {
            "lower": attends | {"rope_paged_kv_write_kernel"},
            "upper": attends,
            "early_exit": set(),
            "verify": {"speculative_verify_kernel"},
        }[graph] or (graph, claim.cut) == ("upper", None)


def check_sizes(claim: Claim, reports: dict[str, dict[str, int]]) -> None:
    """Weights are those that the planner counts, each once in a graph."""
    config = claim.config
    table = config.vocab_size * config.hidden_size * claim.options.torch_dtype.itemsize
    twice = table if config.tie_embeddings else 0
    planned = weight_bytes(config, claim.dtype) + twice
    slack = 2**12 * len(reports)  # padding, and what is in two graphs: norms and the frequencies of RoPE
    if claim.kv_policy == SHADOWKV:  # both graphs have cos and sin of every position
        planned, slack = planned + len(reports) * claim.options.max_seq_len * config.head_dim * 4, 2 * slack
    assert abs(sum(report["weight_bytes"] for report in reports.values()) - planned) <= slack
    assert all(report["plan_bytes"] > report["weight_bytes"] for report in reports.values())
    assert all(report["activation_bytes"] < 2**25 for report in reports.values())


WRONG = {
    "no_hidden": "has no output hidden;",
    "no_pool": "has no output v_pool_1_out;",
    "another_output": "has an output linear, which the runtime does not know;",
    "copied_pool": "returns k_pool_1_out in other memory than k_pool_1: k_pool_1_out is no plugin's output;",
    "swapped_pools": "returns k_pool_0_out in other memory than k_pool_0",
    "wide_product": "_wide in node_linear in FLOAT, not in BF16;",
    "wide_weight": "has the weight layers.0.o.weight_wide in FLOAT, not in BF16;",
    "forgotten_alias": "does not write it in place;",
    "no_reconstruction": "has 1 plugins LowRankKeyReconstruct for 2 attentions;",
    "copied_places": "returns v_pool_1_out in other memory than v_pool_1: v_pool_1_out is no plugin's output;",
    "no_statistics": "has no output mass_0_out;",
    "copied_statistics": "returns mass_0_out in other memory than mass_0: mass_0_out is no plugin's output;",
}


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    return built_by_rtx("wrong_graphs", [None])[0]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_graph_is_caught_by_name(name: str, said: dict[str, str]) -> None:
    assert said["sound"] == "built" and said.keys() == {"sound", *WRONG}
    assert said[name].startswith("The network of lower ") and WRONG[name] in said[name]
