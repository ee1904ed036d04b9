"""Students before distillation: those that ``kvforge rewire`` writes, and how close they are, by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvforge.rewire import RewireOptions, rewire_checkpoint
from kvforge.rewire.inputs import record_inputs
from kvforge.rewire.source import open_source
from kvforge.swiftkv import load_model
from kvforge.tokenization.calibration import calibration_samples
from perf.harness.engines import ROOT, TEACHER_DIR
from perf.quality.rewire_divergence import load
from perf.real_model import cuts
from perf.real_model.cuts import Teacher, cuts_of, student_of
from perf.real_model.outputs import ROWS, closeness, sums_of

SUMS = 1e-4
"""Of float32 logits' products in other orders, summed over some hundred tokens, relative."""


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    folder = tmp_path_factory.mktemp("texts")
    (folder / "page.txt").write_text(page[:6000])
    return folder / "page.txt"


def test_a_student_is_what_rewire_writes(text: Path, tmp_path: Path) -> None:
    options = RewireOptions(cut=4, group_size=2, init="ridge", num_samples=3, num_tokens=64)
    rewire_checkpoint(TEACHER_DIR, tmp_path / "rewired", options, calibration=text)
    source = open_source(TEACHER_DIR)
    samples = calibration_samples(TEACHER_DIR, source.config.vocab_size, text, 3, 64)
    inputs = record_inputs(source, samples, tmp_path, 2)  # of several cuts, the first below this one
    plain = load_model(source.checkpoint, source.config, torch.float32)
    student = student_of(source, plain, replace(source.config, cut=4, group_size=2), inputs)
    expected = load(tmp_path / "rewired").state_dict()
    assert expected.keys() == student.state_dict().keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in student.state_dict().items())
    documents = [list(range(3, 40)), list(range(60, 97))]
    assert Teacher(plain, documents, [4]).compare(student) == Teacher(plain, documents, [2, 4]).compare(student)
    assert Teacher(plain, documents, [8]).hidden == [{}, {}]


@torch.inference_mode()
def test_sums_are_those_of_whole_sequences(text: Path, tmp_path: Path) -> None:
    rewire_checkpoint(TEACHER_DIR, tmp_path / "rewired", RewireOptions(cut=4, init="copy"))
    plain, student = load(TEACHER_DIR), load(tmp_path / "rewired")
    ids = torch.randint(3, plain.sizes.vocab_size, (ROWS + 40,), generator=torch.Generator().manual_seed(0))
    outputs = [model.model.upper(model.model.lower(ids[None], layout), layout)[0][0] for model, layout in
               ((one, cuts.make_layout(one.sizes, len(ids))) for one in (student, plain))]  # fmt: skip
    found = sums_of(*outputs, plain.head, ids)
    ours, theirs = (model(ids[None])[0, :-1].double().log_softmax(-1) for model in (student, plain))
    kl = (theirs.exp() * (theirs - ours)).sum()
    nll = [-one.gather(1, ids[1:, None]).sum() for one in (ours, theirs)]
    same = (ours.argmax(-1) == theirs.argmax(-1)).sum()
    assert found == pytest.approx([float(kl), float(same), *map(float, nll)], rel=SUMS)
    told = closeness([found, found], [ids.tolist()] * 2)
    assert told["kl"]["value"] == pytest.approx(found[0] / (len(ids) - 1)) and told["num_tokens"] == 2 * len(ids) - 2
    assert told["perplexity"]["value"] > told["teacher_perplexity"]["value"]


def test_cuts_leave_shares_out() -> None:
    assert cuts_of(30, [0.25, 0.4, 0.5, 0.625]) == [22, 18, 15, 11]
    assert cuts_of(4, [0.01, 0.99]) == [3, 1]


def test_the_program_reports_every_student(text: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    given = ["cuts", str(TEACHER_DIR), str(text.parent), str(text), "--skipped", "0.5", "--group-size", "1", "2"]
    small = ["--num-samples", "3", "--num-documents", "2", "--length", "64", "--output", str(tmp_path / "found")]
    monkeypatch.setattr("sys.argv", [*given, *small])
    assert cuts.EXPERIMENT.run() == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["name"], row["kind"], row["skipped"]) for row in rows] == [
        ("cut 4 of 8", "page", 0.5),
        ("cut 4 of 8, 2-way", "page", 0.5),
    ]
    assert all(row["num_documents"] == 2 and row["num_tokens"] == 126 and row["kl"]["value"] > 0 for row in rows)
    assert (tmp_path / "found.svg").is_file() and "| cut 4 of 8, 2-way |" in (tmp_path / "found.md").read_text()
    (tmp_path / "none").mkdir()
    monkeypatch.setattr("sys.argv", ["cuts", str(TEACHER_DIR), str(tmp_path / "none"), str(text)])
    assert cuts.EXPERIMENT.run() == 1 and "has no .txt file" in capsys.readouterr().err
