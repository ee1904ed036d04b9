"""The comparison's plan, protocol and report, from a fake system and made-up lines."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvforge.bench.workload import Workload, load_workloads
from kvforge.common.errors import KvforgeError, MissingToolError
from perf.harness.engines import TEACHER_DIR, WORKLOADS
from perf.peers import compare
from perf.peers.client import Worker
from perf.peers.compare import append, chosen_systems, place_and_length, plan_runs, read_lines, write_report
from perf.peers.prepare import LLAMA_FILE, LLAMA_Q4, prepare_peer
from perf.peers.report import CHECKS, Check, group, make_report, results_of, with_floors
from perf.peers.systems import (
    CUT_4WAY,
    EVERY_VARIANT,
    KV_VARIANTS,
    LLAMA_CPP,
    LLAMA_CPP_FILE,
    NO_CUT,
    NO_CUT_INT4,
    NO_CUT_INT8,
    OPENVINO,
    OPENVINO_INT4,
    PACE,
    PEERS,
    TRANSFORMERS,
    VARIANTS,
    checkpoint_of,
)
from perf.peers.tables import workload_table

FAKE = """
import sys
from perf.peers.phases import PhaseTimes
from perf.peers.protocol import serve

def load():
    print("loading, loudly")
    def run(prompts, output_tokens):
        print("running")
        if output_tokens == 13:
            raise ValueError("thirteen")
        if output_tokens == 14:
            sys.exit(3)
        return PhaseTimes(total_s=1.0, decode_steps=output_tokens, first_tokens=prompts[:, 0].tolist())
    return run

serve(load)
"""


@pytest.fixture
def fake(tmp_path):
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    worker = Worker("fake", [sys.executable, str(script)])
    yield worker
    worker.close()


def test_a_worker_answers_until_its_input_ends(fake):
    workload = Workload("w", 3, 5, 7)
    first = fake.run(workload, seed=1)
    assert first["decode_steps"] == 7 and len(first["first_tokens"]) == 3
    assert fake.run(workload, seed=1) == first
    assert fake.run(workload, seed=2)["first_tokens"] != first["first_tokens"]
    with pytest.raises(KvforgeError, match="fake failed: ValueError: thirteen"):
        fake.run(Workload("w", 1, 1, 13), 0)
    assert fake.run(workload, seed=1) == first
    with pytest.raises(KvforgeError, match="fake has ended"):
        fake.run(Workload("w", 1, 1, 14), 0)
    with pytest.raises(KvforgeError, match="fake has ended"):
        fake.run(workload, 0)


def test_a_worker_that_cannot_start_is_named(tmp_path):
    with pytest.raises(KvforgeError, match="broken has ended"):
        Worker("broken", [sys.executable, "-c", "raise SystemExit(1)"])
    with pytest.raises(KvforgeError, match=r"^absent cannot be started: /no/python: No such file or directory\.$"):
        Worker("absent", ["/no/python", "-m", "perf.peers.transformers_worker"])


def test_the_plan_completes_a_round_then_goes_on():
    systems = ["a", "b"]
    plan = plan_runs([], ["w", "v"], systems, 2, {"b": 1})
    assert plan == [(0, "w", "a"), (0, "w", "b"), (0, "v", "a"), (0, "v", "b"), (1, "w", "a"), (1, "v", "a")]
    done = [{"round": 0, "workload": workload, "system": system} for _, workload, system in plan[:3]]
    assert plan_runs(done, ["w", "v"], systems, 1, {}) == [(0, "v", "b")]
    assert plan_runs(done, ["w", "v"], systems, 2, {})[1:] == [
        (1, "w", "b"),
        (1, "w", "a"),
        (1, "v", "b"),
        (1, "v", "a"),
    ]


def test_cache_dtypes_are_compared_where_they_matter():
    plan = plan_runs([], ["chat", "single"], [*VARIANTS, *KV_VARIANTS], 1, {})
    assert {workload for _, workload, system in plan if system in KV_VARIANTS} == {"chat"}


def line(index: int, system: str, rate: float, **changes):
    run = {"round": index, "workload": "chat", "system": system, "combined_tok_s": rate, "ttft_s": 1.0}
    run |= {"total_s": 100 / rate, "prefill_s": 2.0, "decode_s": 4.0, "decode_steps": 8, "first_tokens": [1, 2]}
    return run | changes


RATES = {"rates": {"bf16_gemm": 10.0, "int8_gemm": 20.0, "read": 5.0, "copy": 5.0}}
WORK = {"linear_flops": 10.0, "attention_flops": 5.0, "num_bytes": 0.0, "weight_dtype": "bfloat16"}


def test_ratios_are_paired_by_round_and_their_median_is_judged():
    check = Check("faster", "combined_tok_s", "a", "b", 1.4, ("chat", "single"))
    lines = [line(0, "a", 10), line(0, "b", 10), line(1, "a", 30), line(1, "b", 20), line(2, "a", 60), line(2, "b", 20)]
    lines += [line(3, "a", 1000)]  # without its pair
    (result,) = results_of(check, with_floors(lines))
    assert result["value"] == 1.5 and result["rounds"] == 3 and result["passed"]
    (result,) = results_of(Check("t", "combined_tok_s", "a", "b", 1.4, ("chat",), at_most=True), with_floors(lines))
    assert not result["passed"]


def test_shares_use_the_better_rates_of_those_measured_before_and_after_a_run():
    slow = {"rates": {**RATES["rates"], "bf16_gemm": 7.5, "read": 1.0}}
    works = {"prefill_work": WORK, "decode_work": {**WORK, "num_bytes": 15.0}}
    runs = [line(index, NO_CUT, 10, **works) for index in range(3)]
    lines = [slow, runs[0], RATES, slow, runs[1], slow, runs[2]]
    first, second, third = with_floors(lines)
    assert second["decode_floor_s"] == third["decode_floor_s"] == 15.0
    assert (first["prefill_floor_s"], second["prefill_floor_s"]) == (1.5, 2.0)
    assert (first["prefill_share"], second["prefill_share"]) == (0.75, 1.0)
    assert first["decode_floor_s"] == 3.0 and first["decode_share"] == 0.75 and first["decode_rate"] == 2.0


def test_report_has_medians_tables_and_a_figure(tmp_path):
    lines = [{"command": "c", "machine": "m"}, RATES]
    for index, rate in enumerate((100.0, 300.0, 200.0)):
        lines += [line(index, NO_CUT, rate, prefill_work=WORK, decode_work=WORK), line(index, OPENVINO, 100.0)]
    lines += [line(0, TRANSFORMERS, 50.0, first_tokens=[1, 3])]
    file = tmp_path / "r.jsonl"
    for entry in lines:
        append(file, entry)
    report = write_report(read_lines(file), [Workload("chat", 8, 256, 128)], tmp_path / "r")
    assert [(row["system"], row["combined_tok_s"], row["rounds"]) for row in report["rows"]] == [
        (NO_CUT, 200.0, 3),
        (OPENVINO, 100.0, 3),
        (TRANSFORMERS, 50.0, 1),
    ]
    assert report["same_first_token"] == {NO_CUT: 0.5, OPENVINO: 0.5}
    text = (tmp_path / "r.md").read_text()
    assert "8 × 256 → 128" in text and f"| {NO_CUT} | 3 | 200 | 2.00 |" in text
    assert "| ≥ 0.9 | 2.00 (3) | pass |" in text
    assert "**falls short**" not in text.split("share of the floor")[0]
    assert (tmp_path / "r.svg").read_text().count("floor") >= 1


def test_checks_name_systems_that_are_there():
    known = {*EVERY_VARIANT, *PEERS}
    assert all(check.system in known and check.other in {*known, None} for check in CHECKS)
    lines = [line(0, CUT_4WAY, 10.0), line(0, TRANSFORMERS, 2.0)]
    assert make_report(lines)["checks"] == []  # neither a pair nor a floor on this workload
    assert list(group(with_floors(lines))) == [("chat", CUT_4WAY), ("chat", TRANSFORMERS)]


def test_wrong_arguments_and_missing_runs(tmp_path: Path, capsys):
    for arguments in (["--rounds", "0"], ["--most", "transformers"], ["--systems", "vllm"]):
        with pytest.raises(SystemExit):
            compare.parse_arguments(arguments)
    with pytest.raises(KvforgeError, match="no runs"):
        compare.main(["--report", "--output", str(tmp_path / "none")])


def test_what_cannot_run_is_said_first_and_loses_nothing(tmp_path: Path):
    output, file = tmp_path / "r", tmp_path / "r.jsonl"
    append(file, line(0, NO_CUT, 10.0))
    before = file.read_text()
    common = ["--work", str(tmp_path / "work"), "--output", str(output)]
    for arguments, words in (
        (["--systems", NO_CUT], "holds runs"),
        (["--systems", TRANSFORMERS, "--append"], "need --peers-python"),
        (["--peers-python", str(tmp_path / "python"), "--append"], "is not a program"),
        (["--systems", PACE, "--pace-python", str(tmp_path / "python"), "--append"], "pace-python .* is not a program"),
        (["--systems", NO_CUT, "--only", "nope", "--append"], "no workload 'nope'"),
    ):
        with pytest.raises(KvforgeError, match=words):
            compare.main([*common, *arguments])
    assert file.read_text() == before and not (tmp_path / "work").exists()


def test_engines_and_peers_in_4_bits_are_systems():
    options = compare.parse_arguments(["--systems", NO_CUT_INT4, OPENVINO_INT4, LLAMA_CPP, "--llama-python", "python"])
    assert chosen_systems(options, {LLAMA_CPP: Path("python")}) == [NO_CUT_INT4, LLAMA_CPP]
    ratios = {(check.other, check.metric): check.limit for check in CHECKS if check.system == NO_CUT_INT4}
    assert ratios == {
        (peer, f"{phase}_rate"): limit
        for peer in (OPENVINO_INT4, LLAMA_CPP)
        for phase, limit in (("prefill", 1.5), ("decode", 1.0))
    } | {(NO_CUT_INT8, "decode_rate"): 1.6}
    table = workload_table(make_report([RATES, line(0, NO_CUT_INT4, 30.0), line(0, LLAMA_CPP, 20.0)])["rows"])
    assert f"× {LLAMA_CPP}" in table and f"| {NO_CUT_INT4} | 1 | 30 | 1.50 |" in table


def test_llama_cpp_needs_its_converter_before_anything_is_written(tmp_path: Path):
    """The Hugging Face model that all peers have is there."""
    (tmp_path / "peer-transformers").mkdir()
    (tmp_path / "peer-transformers" / "config.json").write_text("{}")
    for source in (None, tmp_path):
        with pytest.raises(MissingToolError, match=r"no convert_hf_to_gguf\.py in .* --llama-source"):
            prepare_peer(tmp_path, tmp_path, Path(sys.executable), LLAMA_Q4, source)
    (tmp_path / "convert_hf_to_gguf.py").write_text("raise SystemExit(1)")
    with pytest.raises(KvforgeError, match="could not convert"):
        prepare_peer(tmp_path, tmp_path, Path(sys.executable), LLAMA_Q4, tmp_path)
    assert not (tmp_path / f"peer-{LLAMA_Q4}").exists()


def test_a_checkpoint_takes_the_place_of_the_random_one(tmp_path: Path):
    """Systems with a cut are left out or refused, sequences are as long as the chosen workloads' alone."""
    common = ["--work", str(tmp_path), "--llama-python", "python", "--only", "chat"]
    python = {LLAMA_CPP_FILE: Path("python"), LLAMA_CPP: Path("python")}
    directory = compare.parse_arguments([*common, "--checkpoint", str(tmp_path)])
    assert chosen_systems(directory, python) == [*(n for n, v in EVERY_VARIANT.items() if v.cut is None), LLAMA_CPP]
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    options = compare.parse_arguments([*common, "--checkpoint", str(file)])
    assert chosen_systems(options, python)[-2:] == [LLAMA_CPP, LLAMA_CPP_FILE]
    assert LLAMA_CPP_FILE not in chosen_systems(compare.parse_arguments(common), python)
    workloads = load_workloads(WORKLOADS)
    assert place_and_length(options, workloads, ["chat"]) == (tmp_path / "model.gguf", 384)
    with pytest.raises(KvforgeError, match="random weights; leave them out"):
        checkpoint_of(tmp_path, EVERY_VARIANT[CUT_4WAY], file)
    folder = prepare_peer(file, tmp_path, Path("python"), LLAMA_FILE)
    assert (folder / "model.gguf").read_bytes() == b"GGUF"
    with pytest.raises(KvforgeError, match="no GGUF file"):
        prepare_peer(tmp_path, tmp_path, Path("python"), LLAMA_FILE)


def test_peers_get_the_checkpoints_own_tokenizer_and_weights(tmp_path: Path):
    model = prepare_peer(TEACHER_DIR, tmp_path, Path("python"), "transformers")
    assert (model / "tokenizer.json").read_bytes() == (TEACHER_DIR / "tokenizer.json").read_bytes()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto").state_dict()
    given = load_file(TEACHER_DIR / "model.safetensors")
    assert given.keys() <= loaded.keys()
    assert all(loaded[name].equal(weight.bfloat16()) for name, weight in given.items())


def test_peers_are_told_the_checkpoints_own_class(tmp_path: Path):
    copied = shutil.copytree(TEACHER_DIR, tmp_path / "checkpoint")
    config = json.loads((copied / "config.json").read_text())
    for given, wanted in ((["MistralForCausalLM"], ["MistralForCausalLM"]), (None, ["LlamaForCausalLM"])):
        own = {name: value for name, value in config.items() if name != "architectures"}
        (copied / "config.json").write_text(json.dumps(own if given is None else {**own, "architectures": given}))
        model = prepare_peer(copied, tmp_path / str(given), Path("python"), "transformers")
        assert json.loads((model / "config.json").read_text())["architectures"] == wanted


def test_weights_in_bf16_stay_as_they_are_by_any_name(tmp_path: Path):
    copied = shutil.copytree(TEACHER_DIR, tmp_path / "checkpoint")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    weights = {"of.this.family.alone": torch.ones(2, dtype=torch.bfloat16)}
    save_file(weights, copied / "model.safetensors")
    model = prepare_peer(copied, tmp_path, Path("python"), "transformers")
    assert load_file(model / "model.safetensors").keys() == weights.keys()
    assert (model / "tokenizer.json").read_bytes() == (copied / "tokenizer.json").read_bytes()
