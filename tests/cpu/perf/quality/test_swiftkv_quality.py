"""The quality tables: what the rows are, that merged heads stay merged, that curves continue, and the report."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvforge.swiftkv import SwiftKVForCausalLM
from model_defs import load_config
from perf.quality import swiftkv_students
from perf.quality.swiftkv import markdown, plot, reached, summarise, summarised
from perf.quality.swiftkv_students import Curve, merge_heads, student_of
from perf.quality.swiftkv_variants import HALF, TABLES, TEACHER, variants_of
from perf.training.config import TINY_MODEL
from tests.support.rounding import logprob_error, model_error

HF = {
    "model_type": "llama_swiftkv",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "num_key_value_layers": 1,
    "tie_word_embeddings": True,
}


def small_model() -> SwiftKVForCausalLM:
    torch.manual_seed(0)
    model = SwiftKVForCausalLM(load_config(HF), with_teacher=True)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_rows_have_the_reductions_of_their_sizes() -> None:
    assert TINY_MODEL.num_layers == 8
    reductions = {v.name: (v.prefill_reduction, v.kv_reduction) for v in TABLES["reduction"]}
    assert reductions["no cut"] == (0, 0) and reductions["cut 3"] == (0.625, 0)
    assert reductions["cut 4, 2-way"] == (0.5, 0.25) and reductions["cut 4, 4-way"] == (0.5, 0.375)
    assert reductions["cut 1, 4-way"] == (0.875, 0.625)
    across, within = TABLES["sharing"]
    assert across.kv_reduction == within.kv_reduction == 0.25
    slugs = [variant.slug for variant in variants_of()]
    assert len(slugs) == len(set(slugs)) and {v.slug for rows in TABLES.values() for v in rows} == set(slugs)


def test_merged_heads_stay_equal_in_training() -> None:
    model = small_model()
    merge_heads(model)
    names = [
        name
        for name, _ in model.named_parameters()
        if name.endswith(("k_proj_swiftkv.weight", "v_proj_swiftkv.weight"))
    ]
    assert len(names) == 4
    before = {name: model.get_parameter(name).detach().clone() for name in names}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ids = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        optimizer.zero_grad()
        model(ids).logsumexp(-1).square().mean().backward()
        optimizer.step()
    for name in names:
        first, second = model.get_parameter(name).chunk(2)
        assert torch.equal(first, second)
        assert not torch.equal(model.get_parameter(name), before[name])


def test_a_curve_is_continued_where_the_run_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        swiftkv_students, "held_out_documents", lambda num, subject: [list(range(3, 20)), list(range(5, 24))]
    )
    model, teacher = small_model(), small_model()
    curve = Curve(tmp_path / "run" / "held-out.json", model, teacher)
    for step in range(25):
        curve({"step": step})
    points = json.loads(curve.file.read_text())
    assert [point[0] for point in points] == [0, 10, 20] and all(value > 0 for _, value in points)
    curve({"step": 10})  # continued from a state before step 10
    assert [point[0] for point in json.loads(curve.file.read_text())] == [0, 10]
    for either in (model, teacher):
        for layer in either.model.layers[1:]:
            layer.self_attn.o_proj.weight.data.zero_()  # no attention, no difference
    assert Curve(tmp_path / "other.json", model, teacher).measure() == pytest.approx(
        0, abs=logprob_error(model.sizes.vocab_size, 1, model_error(model.sizes, 24))
    )


def test_the_teacher_and_finished_students_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert student_of(TEACHER, tmp_path, 1) == swiftkv_students.TEACHER_DIR
    trained = TABLES["reduction"][1]

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(swiftkv_students, "rewire_checkpoint", fail)
    with pytest.raises(AssertionError, match="made again"):
        student_of(trained, tmp_path, 1)
    (tmp_path / "rewired" / "cut6-group1-mean").mkdir(parents=True)
    (tmp_path / "students" / trained.slug).mkdir(parents=True)
    assert student_of(trained, tmp_path, 1) == tmp_path / "students" / trained.slug


SETTINGS = {"prompt_tokens": 300, "seed": 1, "documents": 2, "steps": 10, "tokens_per_step": 8, "device": "cpu"}


def make_cell(variant: Any, right: list[bool]) -> dict[str, Any]:
    estimate = {"value": 0.01, "low": 0.005, "high": 0.02}
    return {
        "variant": variant.name,
        "prefill_reduction": variant.prefill_reduction,
        "kv_reduction": variant.kv_reduction,
        "steps": 0,
        "fidelity": {"kl": estimate, "agreement": {"value": 0.99, "low": 0.98, "high": 1.0}},
        "correct": {"t": right},
    }


def test_the_report(tmp_path: Path) -> None:
    half = [True, False] * 50
    cells = {v.slug: make_cell(v, half) for v in variants_of()}
    worse = TABLES["reduction"][3]
    cells[worse.slug] = make_cell(worse, [False] * 4 + half[4:])
    row = summarise(cells[worse.slug], cells[TEACHER.slug])
    assert (row["accuracy"], row["versus_teacher"]["lost"], row["versus_teacher"]["gained"]) == (0.48, 2, 0)
    assert reached([(0, 0.5), (10, 0.2), (20, 0.1)], 0.2) == 10 and reached([(0, 0.5)], 0.2) is None
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    curves = {v.slug: [(0, 0.5), (10, 0.1 if v.init == "ridge" else 0.2)] for v in TABLES["inits"] if v.distilled}
    report = SETTINGS | {"command": "c", "rows": summarised(cells), "curves": curves}
    lines = markdown(report).splitlines()
    plot(report, tmp_path / "out.png")
    assert any(line.startswith("| cut 3 | 62.5 | 0.0 | 0 | 0.0100 (0.0050 to 0.0200)") for line in lines)
    assert "| cut 1, 1-way | ridge | 0.5000 | 0.1000 | 10 |" in lines
    assert report["rows"][worse.slug] == row
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_a_report_of_one_table_has_that_table_alone() -> None:
    rows = {
        v.slug: summarise(make_cell(v, [True] * 10), make_cell(TEACHER, [True] * 10))
        for v in variants_of(["reduction"])
    }
    report = SETTINGS | {"command": "c", "rows": rows, "curves": {HALF.slug: [(0, 0.5)]}}
    titles = [line for line in markdown(report).splitlines() if line.startswith("##")]
    assert titles == ["## Prefill and cache reduction (as Table 2)"]
