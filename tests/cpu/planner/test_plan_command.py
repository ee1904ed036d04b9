"""``kvforge plan``: what it reads, prints, plots and refuses."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.cli import main
from kvforge.common.errors import KvforgeError
from kvforge.compiler.options import BuildOptions, resolve
from kvforge.manifest import save_manifest
from kvforge.planning import load
from kvforge.planning.load import load_subject
from kvforge.planning.presets import PRESETS
from kvforge.runtime.sessions.pools import allocate_pools
from model_defs import ModelError, load_config
from perf.gpu.models import Limits, Variant, manifest_of, model_config, resolved_options
from perf.harness.random_checkpoint import LLAMA_8B
from tests.support.models.checkpoints import SMALL, make_checkpoint
from tests.support.models.draft_heads import add_mtp, make_head
from tests.support.models.foreign_weights import quantize_checkpoint
from tests.support.sessions.eager import eager_session
from tests.support.sessions.fake import fake_manifest

PAPER = 0.01
"""The paper rounds its terms to two or three digits, in mixed units (docs/planning.md): a hundredth."""
PAPER_GFLOP = 0.1
"""A unit of the one digit to which the paper rounds K, V and the vocabulary."""
PAPER_PERCENT = 0.2
"""A share printed with one digit, of terms rounded before: docs/planning.md derives each of the paper's."""
PRINTED = 0.005
"""Half a unit of the two digits that the README gives."""

ASSETS = Path(__file__).resolve().parents[3] / "model_defs" / "assets"


def plan(capsys, *arguments):
    assert main(["plan", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_formats_have_the_names_that_build_takes(capsys):
    short = plan(capsys, "--model", "llama-3.1-8b", "--kv-dtype", "fp8_e4m3", "bf16", "--weight-dtype", "f32")
    whole = plan(capsys, "--model", "llama-3.1-8b", "--kv-dtype", "fp8", "bfloat16", "--weight-dtype", "float32")
    assert short == whole


def test_table_1_as_json(capsys):
    rows = {row["name"]: row for row in plan(capsys, "--model", "llama-3.1-70b")["variants"]}
    for name, percent in {"cut 60 of 80": 75.5, "cut 40 of 80": 51.0, "cut 40 of 80, 4-way": 50.7}.items():
        assert 100 * rows[name]["table_1_relative"] == pytest.approx(percent, abs=PAPER_PERCENT)
    paper = rows["no cut"]["table_1_gflop"]
    assert paper["key_value"] == pytest.approx(2.684, abs=PAPER_GFLOP)
    assert paper["query_output"] == pytest.approx(21.475, rel=PAPER)
    assert paper["mlp"] == pytest.approx(112.743, rel=PAPER)
    assert paper["attention"] == pytest.approx(171.8, rel=PAPER)
    assert rows["cut 40 of 80, 2-way"]["cache_reduction"] == 0.25
    assert rows["all layers merged"]["cache_reduction"] == 1 - 1 / 80


def test_headline_throughput(capsys):
    arguments = ["--model", "llama-3.1-70b", "--gpus", 4, "--tokens-per-second", 16000, "--tflops", 989]
    rate = plan(capsys, *arguments)["throughput"]
    assert rate["normalized_tflops_per_gpu"] == pytest.approx(560, rel=PAPER)
    assert rate["share_of_tflops"] == pytest.approx(0.566, rel=PAPER)


@pytest.mark.parametrize(("asset", "mflop", "kv"), [("tiny-teacher", 13.54, 8192), ("tiny-swiftkv", 7.03, 6144)])
def test_tiny_models_cost_what_the_readme_says(capsys, asset, mflop, kv):
    """A checkpoint directory and its config.json, as the demo counts them: 1000 tokens, an fp32 cache."""
    arguments = ["--input", 1000, "--kv-dtype", "float32", "--weight-dtype", "float32"]
    by_folder = plan(capsys, "--model", ASSETS / asset, *arguments)
    assert plan(capsys, "--model", ASSETS / asset / "config.json", *arguments) == by_folder
    rows = {row["name"]: row for row in by_folder["variants"]}
    row = rows["no cut" if asset == "tiny-teacher" else "cut 4 of 8, 2-way"]
    assert row["prompt_token_flops"]["total"] / 1e6 == pytest.approx(mflop, abs=PRINTED)
    assert row["kv_bytes_per_token"] == kv
    assert row["prompt_token_flops"]["vocabulary"] == 0 < row["output_token_flops"]["vocabulary"]


def test_cuts_times_groups_times_formats(capsys):
    arguments = ["--model", "llama-3.1-8b", "--cut", 24, 16, "--group-size", 2, 8, "--kv-dtype", "bfloat16", "int8"]
    rows = plan(capsys, *arguments)["variants"]
    assert len(rows) == 2 * (1 + 4 + 1)
    assert [row["name"] for row in rows[:3]] == [
        "no cut, bfloat16",
        "cut 24 of 32, 2-way, bfloat16",
        "cut 24 of 32, 8-way, bfloat16",
    ]
    last = rows[-2]
    assert (last["cut"], last["group_size"], last["num_owners"], last["kv_dtype"]) == (16, 8, 18, "int8")
    assert last["kv_bytes_per_token"] == last["kv_element_bytes_per_token"] + last["kv_scale_bytes_per_token"]
    assert last["cache_reduction_with_scales"] < last["cache_reduction"] == 1 - 18 / 64


def test_capacity_table(capsys):
    arguments = ["--memory-gib", "80", "16", "--tflops", "989", "--bandwidth-gb-s", "3350"]
    assert main(["plan", "--model", "llama-3.1-8b", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("Requests that fit"))
    table = {line[:20].strip(): line for line in lines[begin + 2 :] if line}
    assert "does not fit" in table["no cut"] and "K tok/s" in table["no cut"]
    assert "does not fit" not in table["cut 16 of 32, 4-way"] and "does not fit" not in table["all layers merged"]
    assert any("GPU hours" in line for line in lines)
    head = next(i for i, line in enumerate(lines) if line.endswith("max speed-up"))
    assert len({len(line) for line in lines[head : head + 7]}) == 1


def test_4_bits_a_cut_and_4_way_groups_are_a_sixth_of_the_bytes(capsys):
    arguments = ["--model", "llama-3.1-8b", "--cut", 16, "--group-size", 4, "--kv-dtype", "bfloat16", "int4"]
    rows = {(row["cut"], row["group_size"], row["kv_dtype"]): row for row in plan(capsys, *arguments)["variants"]}
    sizes = {key: row["kv_bytes_per_token"] for key, row in rows.items()}
    assert sizes[32, 1, "bfloat16"] == 131_072 and sizes[32, 1, "int4"] == 34_816
    assert sizes[16, 4, "bfloat16"] == 81_920 and sizes[16, 4, "int4"] == 21_760
    assert rows[16, 4, "int4"]["kv_scale_bytes_per_token"] == 1_280
    limits = Limits(max_num_seqs=4, max_num_tokens=64, max_seq_len=128, page_size=32)
    for variant, num_bytes in ((Variant(0.5, 4, "int4"), 21_760), (Variant(), 131_072)):
        config = model_config(LLAMA_8B, variant)
        pools = allocate_pools(manifest_of(config, resolved_options(config, variant, limits, "cpu")), num_pages=2)
        assert sum(tensor.nbytes for pool in pools for tensor in pool) == 2 * 32 * num_bytes


def test_exact_pages_beside_those_of_2_bits_are_counted(capsys):
    """Two of each request and those of a step: as many as an engine allocates, and requests that fit leave room."""
    arguments = ["--model", "llama-3.1-8b", "--kv-dtype", "kivi2", "int4", "--page-size", 64, "--memory-gib", 20]
    found = plan(capsys, *arguments)
    sealed, other = ({row["name"]: row for row in found["variants"]}[f"no cut, {name}"] for name in ("kivi2", "int4"))
    assert sealed["kv_exact_bytes_per_request"] == 2 * 64 * 131_072
    assert sealed["kv_exact_bytes_per_step"] == 2048 // 64 * 64 * 131_072
    assert other["kv_exact_bytes_per_request"] == other["kv_exact_bytes_per_step"] == 0
    (fit,) = (row for row in found["capacity"][0]["variants"] if row["name"] == "no cut, kivi2")
    free = int(19.75 * 2**30) - sealed["weight_bytes"] - sealed["kv_exact_bytes_per_step"]
    each = 8448 * 24_576 + sealed["kv_exact_bytes_per_request"]
    assert fit["requests"] == free // each < free // (8448 * 24_576)
    assert fit["cache_tokens"] == (free - fit["requests"] * sealed["kv_exact_bytes_per_request"]) // 24_576
    limits = Limits(max_num_seqs=3, max_num_tokens=128, max_seq_len=128, page_size=64)
    variant = Variant(kv_dtype="kivi2")
    config = model_config(LLAMA_8B, variant)
    manifest = manifest_of(config, resolved_options(config, variant, limits, "cpu"))
    pools = allocate_pools(manifest, num_pages=2)
    exact = 3 * sealed["kv_exact_bytes_per_request"] + 2 * 64 * 131_072
    assert sum(tensor.nbytes for pool in pools for tensor in pool) == 2 * 64 * 24_576 + exact
    row = plan(capsys, *arguments, "--kv-policy", "full")["kv_policy"]["variants"][0]
    assert row["device_bytes"] == row["full_bytes"] == 8192 * 24_576 + sealed["kv_exact_bytes_per_request"]
    assert row["step_device_bytes_read"] == 8192 * 24_576
    assert main(["plan", *map(str, arguments)]) == 0
    assert "Exact pages besides\n" in capsys.readouterr().out
    assert main(["plan", *map(str, arguments[:-3]), "16"]) == 1
    assert "--page-size is 16; give a multiple." in capsys.readouterr().err


def test_equal_capacity(capsys):
    memory = plan(capsys, "--model", "llama-3.1-8b", "--memory-gib", 40)["capacity"][0]
    needed = {row["name"]: row["gib_per_gpu_for_as_many_as_first"] for row in memory["variants"]}
    assert needed["no cut"] <= 40
    assert needed["all layers merged"] < needed["cut 16 of 32, 4-way"] < needed["no cut"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_prints(capsys, name):
    assert main(["plan", "--model", name, "--memory-gib", "80", "--gpus", "8"]) == 0
    assert name in capsys.readouterr().out


def test_plot(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    file = tmp_path / "plan.svg"
    assert main(["plan", "--model", "llama-3.1-8b", "--plot", str(file)]) == 0
    drawing = file.read_text()
    assert "<svg" in drawing and drawing.rstrip().endswith("</svg>")
    assert list(tmp_path.iterdir()) == [file]
    assert main(["plan", "--model", "llama-3.1-8b", "--plot", str(tmp_path / "absent" / "plan.png")]) == 1
    assert "No such file or directory" in capsys.readouterr().err
    bad = tmp_path / "plan.doc"
    assert main(["plan", "--model", "llama-3.1-8b", "--plot", str(bad)]) == 1
    assert "name a .png, .svg or .pdf" in capsys.readouterr().err and not bad.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama-9"], "llama-9 is neither a preset nor a path; give a preset (llama-3.2-3b, "),
        (["--model", "EMPTY"], "is neither an engine (engine.json) nor a checkpoint (config.json)"),
        (["--model", "FILE"], "cannot be read as JSON"),
        (["--model", "OTHER"], "model_type 'gpt2' is not supported"),
        (["--model", "llama-3.1-8b", "--cut", "33"], "--cut 33 is outside llama-3.1-8b; give 1 to 32"),
        (["--model", "llama-3.1-8b", "--cut", "0"], "--cut 0 is outside"),
        (["--model", "llama-3.1-8b", "--group-size", "0"], "--group-size is 0; give"),
    ],
)
def test_errors_are_one_sentence(capsys, tmp_path, arguments, message):
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "FILE").write_text("{")
    (tmp_path / "OTHER").write_text('{"model_type": "gpt2", "num_hidden_layers": 2}')
    paths = [str(tmp_path / name) if name.isupper() else name for name in arguments]
    assert main(["plan", *paths]) == 1
    error = capsys.readouterr().err
    assert error.startswith("kvforge: error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize("option", ["--tflops", "--memory-gib", "--input", "--gpus", "--distillation-tokens"])
def test_numbers_must_be_positive(capsys, option):
    for value in ("0", "-3", "many"):
        with pytest.raises(SystemExit):
            main(["plan", "--model", "llama-3.1-8b", option, value])
    assert option in capsys.readouterr().err


def test_a_model_with_a_cut_is_shown_as_it_is():
    subject = load_subject(str(ASSETS / "tiny-swiftkv"))
    assert (subject.cuts, subject.group_sizes) == ((4,), (1, 2))
    assert load_subject(str(ASSETS / "tiny-teacher")).cuts == (4,)


KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
"""Of the layers of a small Gemma: two that follow each other cannot share a cache."""


@pytest.mark.parametrize(
    ("family", "shared", "cuts"),
    [("gemma4_text", 0, []), ("gemma4_text", 2, ["cut 2 of 4"]), ("gemma3_text", 0, ["cut 2 of 4"]),
     ("llama", 0, ["cut 2 of 4", "cut 2 of 4, 2-way", "cut 2 of 4, 4-way"])],
)  # fmt: skip
def test_the_cuts_of_a_plan_are_those_that_a_build_takes(capsys, tmp_path, family, shared, cuts):
    hf = {**SMALL, "model_type": family, "num_kv_shared_layers": shared, "layer_types": KINDS}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    rows = plan(capsys, "--model", tmp_path / "config.json")["variants"]
    assert [row["name"] for row in rows] == ["no cut", *cuts, "all layers merged"]


@pytest.mark.parametrize(
    ("family", "fields"),
    [("gemma4_text", {}), ("gemma4_text", {"cut_kind": "blind", "num_anchor_tokens": 4}),
     ("gemma3_text", {"key_value_group_size": 2})],
)  # fmt: skip
def test_a_plan_refuses_a_cut_with_the_words_of_a_build(capsys, tmp_path, family, fields):
    hf = {**SMALL, "model_type": family, "layer_types": KINDS}
    with pytest.raises(ModelError) as refused:
        load_config({**hf, "num_key_value_layers": 2, **fields})
    (tmp_path / "config.json").write_text(json.dumps(hf))
    asked = ["--cut", "2", "--group-size", str(fields.get("key_value_group_size", 1))]
    asked += ["--cut-kind", fields["cut_kind"]] if "cut_kind" in fields else []
    assert main(["plan", "--model", str(tmp_path / "config.json"), *asked]) == 1
    assert str(refused.value) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shared", "asked", "sentence"),
    [(2, ["--group-size", "2"], "--group-size 2 is not for"), (2, ["--group-size", "0"], "--group-size is 0;"),
     (2, ["--cut-kind", "blind"], "have no SwiftKV form"),
     (0, ["--group-size", "2"], "is planned without cuts"), (0, ["--cut-kind", "blind"], "is planned without cuts")],
)  # fmt: skip
def test_options_of_cuts_are_refused_where_they_say_nothing(capsys, tmp_path, shared, asked, sentence):
    hf = {**SMALL, "model_type": "gemma4_text", "num_kv_shared_layers": shared, "layer_types": KINDS}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    assert main(["plan", "--model", str(tmp_path / "config.json"), *asked]) == 1
    assert sentence in capsys.readouterr().err


def test_an_engine_is_planned_with_its_own_formats(capsys, tmp_path):
    """The row of its own cut and groups costs what ``kvforge inspect`` says of it."""
    config = load_config(json.loads((ASSETS / "tiny-swiftkv" / "config.json").read_text()))
    limits = Limits(max_num_seqs=4, max_num_tokens=64, max_seq_len=128, page_size=16)
    options = resolved_options(config, Variant(kv_dtype="int8"), limits, "cpu")
    manifest = dataclasses.replace(manifest_of(config, options), isa=("x86-64",))
    save_manifest(manifest, tmp_path)
    rows = plan(capsys, "--model", tmp_path, "--input", 1024)["variants"]
    row = next(row for row in rows if row["name"] == "cut 4 of 8, 2-way")
    assert row["prompt_token_flops"]["total"] == manifest.prefill_flops_per_token(1024)
    assert row["kv_bytes_per_token"] == manifest.kv_bytes_per_token
    assert config.early_exit and row["num_parameters"] == manifest.num_parameters  # the exit's head lies in memory
    assert row["weight_bytes"] == 2 * row["num_parameters"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_planned_as_build_would_build_it(capsys, tmp_path, dtype):
    checkpoint = make_checkpoint(tmp_path / "model", dtype=getattr(torch, dtype))
    opened = open_model(checkpoint)
    stored = opened.dtype("model.embed_tokens.weight")
    for weight_dtype in ("auto", "int8", "int4"):
        chosen = resolve(BuildOptions(weight_dtype=weight_dtype), read_model_config(opened), stored)
        given = [] if weight_dtype == "auto" else ["--weight-dtype", weight_dtype]
        for model in (checkpoint, checkpoint / "config.json"):
            made = plan(capsys, "--model", model, *given)
            assert made["weight_dtype"] == chosen.weight_dtype
            assert {row["kv_dtype"] for row in made["variants"]} == {chosen.kv_dtype}
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"dtype": "float16", "torch_dtype": "float16"}))
    assert load_subject(str(checkpoint)).weight_dtype == dtype  # what is stored counts


def test_a_checkpoint_calibrated_for_an_8_bit_cache_is_planned_with_it(capsys, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "model")
    (checkpoint / "hf_quant_config.json").write_text('{"quantization": {"kv_cache_quant_algo": "FP8"}}')
    for given in ([], ["--weight-dtype", "bfloat16"]):
        assert plan(capsys, "--model", checkpoint, *given)["variants"][0]["kv_dtype"] == "fp8_static"


def test_zero_points_are_counted_as_build_keeps_them(capsys, tmp_path):
    for zero_points, kept in ((True, "int4_zeros"), (False, "int4_scales")):
        checkpoint = make_checkpoint(tmp_path / kept, dtype=torch.float16)
        quantize_checkpoint(checkpoint, "gptq", zero_points)
        for asked in ("int4", "int4_scales"):
            assert plan(capsys, "--model", checkpoint, "--weight-dtype", asked)["weight_dtype"] == kept
        assert plan(capsys, "--model", checkpoint, "--weight-dtype", "int4_zeros")["weight_dtype"] == "int4_zeros"
        assert plan(capsys, "--model", checkpoint)["weight_dtype"] == "bfloat16"


def test_requests_beyond_the_models_positions_are_told(capsys):
    model = ["plan", "--model", str(ASSETS / "tiny-teacher"), "--output", "1", "--input"]
    most = load_subject(model[2]).model.max_position
    assert main([*model, str(most - 1)]) == 0 and capsys.readouterr().err == ""
    assert main([*model, str(most)]) == 0
    told = capsys.readouterr()
    assert f"{most} + 1 tokens are beyond the {most} positions of tiny-teacher, so no engine takes such" in told.err
    assert told.out.startswith("tiny-teacher: ")
    assert main(model[:-1]) == 0  # without --input as many as there are positions for
    told = capsys.readouterr()
    assert told.err == "" and f"requests of {most - 1} input and 1 output tokens" in told.out


def test_an_engine_that_predicts_is_not_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine.json").touch()
    monkeypatch.setattr(load, "load_manifest", lambda path: fake_manifest(auxiliary_model=fake_manifest().model))
    with pytest.raises(KvforgeError, match="fills the cache of prompts by another model"):
        load_subject(str(tmp_path))


def test_prefixes_in_files_are_bytes_over_bytes_a_token(capsys):
    arguments = ["--model", "llama-3.1-8b", "--cut", "16", "--group-size", "4", "--prefix-gib", "64"]
    assert main(["plan", *arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["prefixes"]["tokens"]["cut 16 of 32, 4-way"] == 64 * 2**30 // 81920
    assert main(["plan", *arguments]) == 0 and "838,860" in capsys.readouterr().out


@pytest.mark.parametrize(("family", "own"), [("deepseek_v3", False), ("glm4_moe", True), ("llama", True)])
def test_a_draft_head_is_counted(capsys, tmp_path, family, own):
    """As an engine's weights file and pools have it, where their copies of a few numbers are left out."""
    path = make_checkpoint(tmp_path / "c", family)
    head = str(make_head(tmp_path / "h", path, table=True)) if family == "llama" else "mtp"
    path = path if family == "llama" else add_mtp(path, leave_out="" if own else "embed_tokens|[.]head")
    session = eager_session(path, BuildOptions(dtype="float32", draft_head=head, max_draft_len=2, max_seq_len=128))
    stored = {name: each for name, each in session._weights.items() if name.startswith("draft.")}
    copies = sum(each.numel() * 15 // 16 for name, each in stored.items() if name.endswith("score_bias"))
    tables = sum(stored[f"draft.{name}"].numel() for name in ("inverse_frequencies", "token_of"))
    weights = 4 * (sum(each.numel() for each in stored.values()) - copies - tables)
    (tmp_path / "engine").mkdir()
    save_manifest(dataclasses.replace(session.manifest, isa=("x86_64",)), tmp_path / "engine")
    sizes = ["--input", 64, "--output", 16, "--memory-gib", 0.3]
    found = plan(capsys, "--model", tmp_path / "engine", *sizes)
    kept = sum(each.nbytes for each in session.allocate_draft_pool(4)) // (4 * session.manifest.page_size)
    counted = {"kind": session.manifest.draft_head.kind, "weight_bytes": weights, "kv_bytes_per_token": kept}
    assert found["draft_head"] == counted
    save_manifest(dataclasses.replace(session.manifest, isa=("x86_64",), draft_head=None), tmp_path / "engine")
    without = plan(capsys, "--model", tmp_path / "engine", *sizes)["capacity"][0]["variants"]
    for one, other in zip(found["capacity"][0]["variants"], without, strict=True):
        assert 0 < one["requests"] < other["requests"] and 0 < one["cache_tokens"] < other["cache_tokens"]
    if not own:
        assert plan(capsys, "--model", path, "--draft-head", "mtp", *sizes)["draft_head"] == counted
        by_policy = ("--model", path, "--weight-dtype", "float32", "--kv-policy", "full", *sizes)
        one, other = (plan(capsys, *by_policy, *head)["kv_policy"] for head in ((), ("--draft-head", "mtp")))
        for row, with_head in zip(one["variants"], other["variants"], strict=True):
            assert with_head["device_bytes"] - row["device_bytes"] == 64 * kept
            assert with_head["full_bytes"] - row["full_bytes"] == 64 * kept
        for row, with_head in zip(*(each["capacity"][0]["variants"] for each in (one, other)), strict=True):
            assert 0 < with_head["sequences"] < row["sequences"]
        assert main(["plan", "--model", str(path), "--draft-head", "mtp", "--kv-policy", "h2o"]) == 1
        assert "--kv-policy h2o needs a cache that nothing else changes, but with draft head" in capsys.readouterr().err
    for arguments, message in (
        (["--model", str(tmp_path / "engine")], "families with such a module, which engine is not one of"),
        (["--model", "llama-3.1-8b"], "which llama-3.1-8b is not one of"),
        (["--model", str(ASSETS / "tiny-teacher")], "which tiny-teacher is not one of"),
    ):
        assert main(["plan", *arguments, "--draft-head", "mtp"]) == 1
        assert message in capsys.readouterr().err
