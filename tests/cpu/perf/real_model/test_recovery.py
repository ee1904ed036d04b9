"""What distillation recovers over tokens: the points of a run, an interrupted one continued, the weights it leaves."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvforge.evaluation.documents import text_documents
from kvforge.rewire import RewireOptions, rewire_checkpoint
from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.swiftkv import make_layout
from perf.harness.engines import ROOT, TEACHER_DIR
from perf.real_model import recovery
from perf.real_model.assemble import assemble
from perf.real_model.recovery import EXPERIMENT, WEIGHTS, part_ends, student_rows
from tests.support.models.distillation import load_with_teacher

ROUNDING = 0.05
"""Of products in bf16, on the KL of a student that is far away, relative."""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    (folder / "texts").mkdir()
    for name, text in (("one", page[6000:9000]), ("two", page[9000:12000])):
        (folder / "texts" / f"{name}.txt").write_text(text)
    (folder / "data.txt").write_text(page[:6000])
    rewire_checkpoint(TEACHER_DIR, folder / "rewired", RewireOptions(cut=4, group_size=2, init="copy"))
    return folder


def arguments(files: Path, work: Path, *more: str) -> list[str]:
    places = [str(files / name) for name in ("rewired", "data.txt", "texts")]
    sizes = ["--max-steps", "6", "--num-points", "3", "--batch-size", "2", "--length", "48", "--num-documents", "2"]
    return [*places, *sizes, "--work", str(work), *more]


def points(work: Path) -> list[dict[str, float]]:
    """What was reached, without times."""
    return [{**row, "seconds": 0} for row in json.loads((work / "curve.json").read_text())]


def test_an_interrupted_run_has_the_points_of_a_whole_one(files: Path, tmp_path: Path, monkeypatch) -> None:
    assert EXPERIMENT.run(arguments(files, tmp_path / "whole", "--output", str(tmp_path / "found"))) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["step"] for row in rows] == [0, 2, 4, 6] and [row["tokens"] for row in rows] == [0, 192, 384, 576]
    assert rows[0]["recovered"]["kl"] == 0 and rows[-1]["recovered"]["kl"] > 0
    assert rows[-1]["recovered"]["kl"] == pytest.approx(1 - rows[-1]["kl"] / rows[0]["kl"])
    assert (tmp_path / "found.svg").is_file() and "| 576 |" in (tmp_path / "found.md").read_text()

    measured = []

    def ended(*args, **kwargs):
        measured.append(0)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return student_rows(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(recovery, "student_rows", ended)
        EXPERIMENT.run(arguments(files, tmp_path / "part"))
    assert [row["step"] for row in points(tmp_path / "part")] == [0, 2]
    assert EXPERIMENT.run(arguments(files, tmp_path / "part", "--minutes", "0", "--output", str(tmp_path / "two"))) == 0
    assert [row["step"] for row in json.loads((tmp_path / "two.json").read_text())["rows"]] == [0, 2]
    assert EXPERIMENT.run(arguments(files, tmp_path / "part")) == 0
    assert points(tmp_path / "part") == points(tmp_path / "whole")
    one, other = (load_file(tmp_path / name / WEIGHTS) for name in ("part", "whole"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assemble(files / "rewired", tmp_path / "part" / WEIGHTS, tmp_path / "student")


@torch.inference_mode()
def test_rows_are_of_the_student_beside_its_teacher(files: Path) -> None:
    model, tokenizer, text = (
        load_with_teacher(files / "rewired"),
        Tokenizer.from_dir(files / "rewired"),
        "texts/one.txt",
    )
    (row,) = student_rows(model, tokenizer, [files / text], 2, 40, "cpu")
    expected = []
    for document in text_documents(files / text, tokenizer, 2, 40):
        hidden = model.model.lower(torch.tensor([document]), layout := make_layout(model.sizes, 40))
        teacher, student = (
            model.head(model.model.upper(hidden, layout, which)[0][0])[:-1].log_softmax(-1) for which in (True, False)
        )
        expected.append(float((teacher.exp() * (teacher - student)).sum(-1).mean()))
    assert row["kl"]["value"] == pytest.approx(sum(expected) / 2, rel=ROUNDING)
    assert row["num_tokens"] == 2 * 39 and row["kind"] == "one"


def test_parts_are_as_many_as_there_are_steps() -> None:
    assert part_ends(64, 8) == [8, 16, 24, 32, 40, 48, 56, 64]
    assert part_ends(2, 8) == [1, 2] and part_ends(7, 2) == [4, 7]


def test_a_model_without_a_cut_is_refused(files: Path, tmp_path: Path, capsys) -> None:
    plain = arguments(files, tmp_path)
    assert EXPERIMENT.run([str(TEACHER_DIR), *plain[1:]]) == 1
    assert "has no cut or no tokenizer" in capsys.readouterr().err
    assert EXPERIMENT.run([*plain, "--minutes", "0"]) == 1 and "give more --minutes" in capsys.readouterr().err
