"""Ablations: students that differ in one thing, differences seed by seed, and the report."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from perf.quality import ablations
from perf.quality.ablations import ABLATIONS, compared, seeded
from perf.quality.scores import interval_of_mean
from perf.quality.swiftkv_variants import RECIPES, Variant


def test_students_differ_in_one_thing_and_each_has_its_folder() -> None:
    slugs: dict[str, Variant] = {}
    for ablation in ABLATIONS.values():
        first, *others = (asdict(variant) for variant in ablation.variants)
        for other in others:
            assert len({name for name in other if name != "name" and other[name] != first[name]} - {"group_size"}) == 1
        for students in seeded(ablation, [1, 2, 3]):
            assert len({student.slug for student in students}) == 3
            for student in students:
                known = slugs.setdefault(student.slug, student)
                assert {**asdict(known), "name": ""} == {**asdict(student), "name": ""}
    for mix in RECIPES.values():
        assert all(share > 0 for _, share in mix) and len(dict(mix)) == len(mix)


def test_the_interval_of_a_mean_is_students() -> None:
    assert interval_of_mean([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5))
    assert interval_of_mean([0.5, 0.5]) == (0.5, 0.5, 0.5)


def test_differences_are_taken_seed_by_seed() -> None:
    first, second = compared(
        {"a": [[(0, 1.0), (10, 0.1)], [(0, 1.0), (10, 0.3)]], "b": [[(0, 2.0), (10, 0.2)], [(0, 2.0), (10, 0.4)]]}
    )
    assert first["difference"] is None and first["recovered"] == [10, None]
    assert second["difference"] == pytest.approx((0.1, 0.1, 0.1)) and second["recovered"] == [10, None]
    assert second["last"] == [0.2, 0.4] and second["before"] == 2.0


def test_the_program_reports_the_curves_of_its_students(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(ablations, "make_students", lambda students, *_: made.extend(s.slug for s in students))
    monkeypatch.setattr(ablations, "curve_of", lambda student, _: [(0, 0.5), (10, 0.01 * student.seed)])
    command = ["ablations", "--output", str(tmp_path / "out"), "--ablation", "data", "--seeds", "1", "3"]
    monkeypatch.setattr(sys, "argv", command)
    assert ablations.EXPERIMENT.run() == 0
    assert len(made) == len(set(made)) == 6
    report = json.loads((tmp_path / "out.json").read_text())
    (table,) = report["tables"]
    assert [row["last"] for row in table["rows"]] == [[0.01, 0.03]] * 3
    assert (
        "| documents of all tasks | 0.5000 | 0.0200 | 0.0100, 0.0300 |  | 40,960, 40,960 |"
        in (tmp_path / "out.md").read_text()
    )
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_one_seed_gives_no_interval(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["ablations", "--seeds", "1", "1"])
    with pytest.raises(SystemExit):
        ablations.EXPERIMENT.run()
    assert "at least two different seeds" in capsys.readouterr().err
