"""A real model's student on a GPU: its small form is interrupted and continued, and what comes back is a checkpoint."""

import argparse
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvforge.checkpoint.model import open_model
from kvforge.common.errors import KvforgeError
from perf.gpu import student
from perf.gpu.student import TINY, Run
from perf.gpu.student_files import Files
from perf.gpu.student_tiny import tiny_files
from perf.harness.files import in_six_digits
from perf.real_model.assemble import assemble
from perf.real_model.closeness import means
from perf.real_model.recovery import WEIGHTS, recovered
from tests.support.models.distillation import load_with_teacher


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return tiny_files(tmp_path_factory.mktemp("tiny") / "files")


@pytest.fixture(scope="module")
def whole(files: Files, tmp_path_factory) -> Run:
    """A run that nothing interrupted."""
    run = Run(options(tmp_path_factory.mktemp("whole")), files, TINY, [])
    run.all()
    return run


def options(work: Path, seconds: float = 500.0) -> argparse.Namespace:
    return argparse.Namespace(device="cpu", work=work, json=work / "report.json", seconds=seconds, answer_seconds=100.0)


def test_the_report_says_what_was_done(whole: Run) -> None:
    report = json.loads((whole.work / "report.json").read_text())
    stages = {row["stage"]: row for row in report["stages"]}
    assert stages["answers"]["num_answers"] == stages["answers"]["num_prompts"] == 6
    assert stages["load"]["data"]["num_samples"] > 6 and not stages["load"]["started_from_weights"]
    assert [row["step"] for row in report["curve"]] == [2, 4] and stages["distillation"]["steps"] == 4
    assert [row["kind"] for row in report["before"]] == [row["kind"] for row in report["after"]] == ["one", "two"]
    expected = recovered(*(means(whole.report[when])[0] for when in ("before", "after")))
    assert report["recovered"] == in_six_digits(expected)
    assert len((whole.work / "training/metrics.csv").read_text().splitlines()) == 5


def test_a_run_without_time_ends_after_a_part_and_is_continued(whole: Run, files: Files, tmp_path: Path) -> None:
    """The steps of the whole run are planned; those that are left are the same."""
    (tmp_path / "plan.json").write_text(json.dumps({"max_steps": 4}))
    for name in ("answers.jsonl", "data.jsonl"):
        (tmp_path / name).write_bytes((whole.work / name).read_bytes())
    for expected in ([2], [2, 4]):
        run = Run(options(tmp_path, seconds=0.001), files, TINY, [])
        run.all()
        assert [row["step"] for row in run.report["curve"]] == expected
    assert in_six_digits(run.report["before"]) == in_six_digits(whole.report["before"])
    one, other = (load_file(work / WEIGHTS) for work in (whole.work, tmp_path))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_answers_go_on_where_they_were(whole: Run, files: Files, tmp_path: Path) -> None:
    lines = (whole.work / "answers.jsonl").read_text().splitlines()
    (tmp_path / "answers.jsonl").write_text("".join(f"{line}\n" for line in lines[:4]))
    run = Run(options(tmp_path), files, TINY, [])
    run._rewire()
    assert run._answer()["num_answers"] == 6
    assert (tmp_path / "answers.jsonl").read_text().splitlines() == lines


def test_a_run_begins_with_weights_that_were_carried(whole: Run, files: Files, tmp_path: Path) -> None:
    files.copy_to(tmp_path / "files")
    (tmp_path / "files" / WEIGHTS).write_bytes((whole.work / WEIGHTS).read_bytes())
    assert Files(tmp_path / "files").all[-1].name == WEIGHTS
    run = Run(options(tmp_path), Files(tmp_path / "files"), TINY, [])
    run.rewired = whole.rewired
    (tmp_path / "answers.jsonl").write_bytes((whole.work / "answers.jsonl").read_bytes())
    model, _, told = run._load()
    assert told["started_from_weights"]
    kept = load_file(whole.work / WEIGHTS)
    assert kept and all(torch.equal(model.state_dict()[name], tensor) for name, tensor in kept.items())


def test_weights_that_came_back_make_the_student(whole: Run, tmp_path: Path) -> None:
    assemble(whole.rewired, whole.work / WEIGHTS, tmp_path / "student")
    written, trained = open_model(tmp_path / "student"), load_file(whole.work / WEIGHTS)
    for name, tensor in trained.items():
        assert torch.equal(written.read_raw(name), tensor.to(written.read_raw(name).dtype))
    assert "model.layers.7.self_attn.q_proj.weight" not in written.file_of_tensor
    before = load_with_teacher(whole.rewired).state_dict()
    same = [name for name in before if name in written.file_of_tensor and name not in trained]
    assert same and all(torch.equal(written.read_raw(name).float(), before[name]) for name in same)
    with pytest.raises(KvforgeError, match="has not the weights that"):
        assemble(whole.rewired, whole.files.checkpoint / "model.safetensors", tmp_path / "other")


def test_what_is_recovered_counts_kinds_alike() -> None:
    def rows(kl: float, agreement: float, perplexity: float) -> list[dict[str, object]]:
        found = {"kl": kl, "agreement": agreement, "perplexity": perplexity, "teacher_perplexity": 10.0}
        values = {name: {"value": value} for name, value in found.items()}
        return [{"name": "student", "kind": kind, **values} for kind in ("x", "y")]

    first, last = (means(found)[0] for found in (rows(2.0, 0.2, 110.0), rows(0.5, 0.9, 12.0)))
    assert recovered(first, last) == pytest.approx({"kl": 0.75, "agreement": 0.875, "perplexity": 1.2})


def test_missing_files_are_named(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(student, "PLACE", tmp_path)
    with pytest.raises(KvforgeError, match="has 0 models and one is needed"):
        student.main(["--prepare", str(tmp_path / "out")])
    files.copy_to(tmp_path / "some")
    (tmp_path / "some/texts/train/prompts.jsonl").unlink()
    with pytest.raises(KvforgeError, match=r"prompts\.jsonl is missing; perf\.real_model\.texts makes it"):
        Files(tmp_path / "some").copy_to(tmp_path / "other")


def test_the_steps_fit_the_time(files: Files, whole: Run, tmp_path: Path) -> None:
    """A speed is measured, and the first steps of it are undone."""
    run = Run(options(tmp_path, seconds=1e9), files, dataclasses.replace(TINY, most_steps=7), [])
    run.rewired = whole.rewired
    (tmp_path / "answers.jsonl").write_bytes((whole.work / "answers.jsonl").read_bytes())
    model, data, _ = run._load()
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert run._planned(model, data).max_steps == 7 and not (tmp_path / "probe").exists()
    assert all(torch.equal(tensor, first[name]) for name, tensor in model.state_dict().items())
    late = Run(options(tmp_path / "late", seconds=0.001), files, TINY, [])
    assert late._planned(model, data).max_steps == 1
