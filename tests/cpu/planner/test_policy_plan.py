"""``kvforge plan --kv-policy``: bytes of a sequence, what fits, what a step reads, and refusals."""

import dataclasses
import json
import re

import pytest

from kvforge.cli import main
from kvforge.kv_policies.shadowkv import ShadowKV
from kvforge.manifest import save_manifest
from kvforge.planning.sequence_memory import sequences_that_fit
from tests.support.sessions.fake import fake_manifest

PRINTED = 0.0005
"""Half a unit of the three digits of the documented size."""

GIB = 2**30
LONG = ["--model", "llama-3.1-8b", "--input", "124928"]


def policy_plan(capsys, *arguments):
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["kv_policy"]


def test_llama_8b_at_122k(capsys):
    plan = policy_plan(capsys, *LONG, "--cut", "16", "--group-size", "1", "2", "--kv-policy", "shadowkv")
    assert plan["parameters"] == ShadowKV().parameters and plan["context"] == 124928
    rows = {row["name"]: row for row in plan["variants"]}
    plain, cut, pairs = rows["no cut"], rows["cut 16 of 32"], rows["cut 16 of 32, 2-way"]
    assert plain["full_bytes"] == 15.25 * GIB
    assert plain["prefill_bytes"] == 32 * (124928 - 2464) * 4096
    assert plain["host_bytes"] == 7.625 * GIB
    assert plain["device_bytes"] == 32 * 82_512_000 == pytest.approx(2.459 * GIB, abs=PRINTED * GIB)
    assert plain["times_smaller"] == plain["full_bytes"] / plain["device_bytes"] >= 6
    assert {**cut, "name": ""} == {**plain, "name": ""}
    assert pairs["device_bytes"] == 24 * 82_512_000 and pairs["host_bytes"] == 24 / 32 * plain["host_bytes"]
    assert pairs["times_smaller"] == plain["times_smaller"]
    assert pairs["times_smaller_than_first_in_full"] == pytest.approx(32 / 24 * plain["times_smaller"])


def test_each_layer_reads_for_itself(capsys):
    """Landmarks and marks, SV, U of selected tokens, compact K,V; 128 numbers a head in bf16, 15612 chunks."""
    rows = policy_plan(capsys, *LONG, "--cut", "16", "--group-size", "4", "--kv-policy", "shadowkv")["variants"]
    of_layer = 15612 * 8 * 257 + 160 * 1024 * 2 + 2048 * 8 * 160 * 2 + 2464 * 4096
    for row in rows:
        assert row["step_device_bytes_read"] == 32 * of_layer
        assert row["step_host_bytes_read"] == 32 * 2048 * 1024 * 2
        assert row["step_full_bytes_read"] == 32 * 124928 * 4096


def test_what_fits_leaves_room_for_a_prompt_being_computed(capsys):
    plan = policy_plan(capsys, *LONG, "--output", "1024", "--kv-policy", "shadowkv", "--memory-gib", "80", "20")
    large, small = ({row["name"]: row for row in memory["variants"]} for memory in plan["capacity"])
    weights = 2 * 8_030_261_248
    each = 32 * (82_512_000 + 1024 * 4096)
    free = (80 - 0.25) * GIB - weights
    assert large["no cut"]["sequences"] == int((free - 32 * (124928 - 2464) * 4096) / each) == 19
    assert large["no cut"]["sequences_in_full"] == int(free / (32 * (124928 + 1024) * 4096)) == 4
    assert large["no cut"]["host_gib"] == 19 * 7.625
    assert small["no cut"]["sequences"] == small["no cut"]["sequences_in_full"] == 0
    assert sequences_that_fit(10, 3, 1) == 3 and sequences_that_fit(10, 3, 2) == 2 and sequences_that_fit(1, 3, 2) == 0


def test_short_prompts_keep_what_they_keep_in_full(capsys):
    arguments = ["--model", "llama-3.1-8b", "--input", "2471", "--kv-policy", "shadowkv", "--memory-gib", "40"]
    plan = policy_plan(capsys, *arguments)
    for row in plan["variants"]:
        assert row["times_smaller"] == 1 and row["host_bytes"] == row["prefill_bytes"] == 0
        assert row["step_device_bytes_read"] == row["step_full_bytes_read"]
    assert all(row["sequences"] == row["sequences_in_full"] > 0 for row in plan["capacity"][0]["variants"])


def test_bytes_over_contexts_are_those_of_each_context(capsys):
    curve = policy_plan(capsys, *LONG, "--kv-policy", "shadowkv")["variants"][0]["by_context"]
    assert list(map(int, curve)) == [2**power for power in range(10, 18)]
    assert curve["2048"]["device_bytes"] == curve["2048"]["full_bytes"] == 2048 * 4096 * 32
    at_64k = policy_plan(capsys, "--model", "llama-3.1-8b", "--input", "65536", "--kv-policy", "shadowkv")
    assert curve["65536"]["device_bytes"] == at_64k["variants"][0]["device_bytes"]


def test_text(capsys):
    assert main(["plan", *LONG, "--cut", "16", "--kv-policy", "shadowkv", "--memory-gib", "80"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    begin = next(index for index, line in enumerate(lines) if line.startswith("KV policy shadowkv (rank 160, "))
    table = lines[begin + 2 : begin + 8]
    assert len({len(line) for line in table}) == 1
    assert re.split(r"  +", table[1])[1:6] == ["2.46 GiB", "7.62 GiB", "15.25 GiB", "6.20x", "6.20x"]
    assert "A prompt is computed in full first: until it is, it takes up to 14.95 GiB of pages more." in text
    assert any(line.startswith("no cut") and line.endswith("20 (4; 152.50 GiB)") for line in lines)
    assert all(len(line) <= 120 for line in lines[begin:])


def test_without_a_policy_nothing_is_said(capsys):
    assert main(["plan", *LONG, "--json"]) == 0
    assert "kv_policy" not in json.loads(capsys.readouterr().out)
    full = policy_plan(capsys, *LONG, "--kv-policy", "full")
    assert full["parameters"] == {} and all(row["times_smaller"] == 1 for row in full["variants"])


def test_an_engine_is_planned_with_its_own_policy_and_pages(capsys, tmp_path):
    policy = ShadowKV(rank=2, chunk_size=4, sparse_budget=8, num_outlier_chunks=1, num_local_tokens=0)
    manifest = fake_manifest(page_size=8, kv_policy="shadowkv", kv_policy_parameters=policy.parameters)
    save_manifest(dataclasses.replace(manifest, isa=("x86-64",)), tmp_path)
    plan = policy_plan(capsys, "--model", str(tmp_path), "--input", "100")
    assert (plan["parameters"], plan["page_size"]) == (policy.parameters, 8)
    row = plan["variants"][0]
    assert row["device_bytes"] == manifest.model.num_owners * policy.device_bytes(manifest.owner_cache, 100)
    assert main(["plan", "--model", str(tmp_path), "--input", "100"]) == 0
    text = capsys.readouterr().out
    line = re.split(r"  +", next(line for line in text.splitlines() if line.startswith("no cut") and "KiB" in line))
    assert line[1:3] == [f"{row[name] / 1024:.1f} KiB" for name in ("device_bytes", "host_bytes")]
    assert f"{row['step_host_bytes_read']} bytes" in line and "GiB" not in text
    assert policy_plan(capsys, "--model", str(tmp_path), "--kv-policy", "full", "--page-size", "16")["page_size"] == 16


def test_plot(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    file = tmp_path / "plan.svg"
    assert main(["plan", *LONG, "--kv-policy", "shadowkv", "--plot", str(file)]) == 0
    assert file.read_text().rstrip().endswith("</svg>")
    plain = tmp_path / "plain.svg"
    assert main(["plan", *LONG, "--plot", str(plain)]) == 0
    assert file.read_text().count("<clipPath") == 3 and plain.read_text().count("<clipPath") == 2  # of each axes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [*LONG, "--kv-policy", "h3o"],
            "the KV policy 'h3o' is unknown; choose from adakv, batchmax, expected, fastgen, full, h2o,",
        ),
        ([*LONG, "--kv-policy", "shadowkv:ranks=1"], "shadowkv has no parameter 'ranks'; it has rank, chunk_size"),
        ([*LONG, "--kv-policy", "shadowkv:rank=1025"], "rank 1025 exceeds the 1024 dimensions of a token's keys"),
        ([*LONG, "--kv-policy", "shadowkv", "--page-size", "20"], "--page-size 20 is no multiple of"),
        ([*LONG, "--kv-policy", "shadowkv", "--kv-dtype", "fp8"], "but with 8-bit cache the numbers in it have anoth"),
        (
            ["--model", "deepseek-v2-lite", "--kv-policy", "shadowkv"],
            "deepseek-v2-lite (latent attention) one row of a token is K and V of all heads; leave --kv-policy out.",
        ),
    ],
)
def test_errors_are_one_sentence(capsys, arguments, message):
    assert main(["plan", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("kvforge: error: ") and message in error and error.count("\n") == 1


def test_windows_are_refused(capsys, tmp_path):
    save_manifest(fake_manifest(isa=("x86-64",), layer_windows=(0, 8), page_size=8), tmp_path)
    assert main(["plan", "--model", str(tmp_path), "--kv-policy", "shadowkv:rank=1"]) == 1
    assert "(sliding windows) some layers see only the last tokens;" in capsys.readouterr().err
