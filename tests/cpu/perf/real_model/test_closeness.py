"""How close engines are to a model: rows of measured engines, means over texts, and what is kept of earlier runs."""

import json
from pathlib import Path

import pytest

from perf.real_model import closeness
from tests.support.models.engines import SWIFTKV


def row(name: str, kind: str, kl: float) -> dict[str, object]:
    def around(value: float) -> dict[str, float]:
        return {"value": value, "low": value, "high": value}

    return {
        "name": name,
        "kind": kind,
        "kl": around(kl),
        "agreement": around(1 - kl),
        "perplexity": around(10 * (1 + kl)),
        "teacher_perplexity": around(10.0),
    }


def test_means_count_each_kind_as_much() -> None:
    found = closeness.means([row("a", "x", 0.1), row("a", "y", 0.3), row("b", "x", 0.2)])
    assert [(m["name"], m["kinds"]) for m in found] == [("a", 2), ("b", 1)]
    assert found[0]["kl"] == pytest.approx(0.2) and found[0]["agreement"] == pytest.approx(0.8)
    assert found[0]["perplexity"] == pytest.approx(1.2)


def test_an_engine_is_as_close_to_itself_as_can_be(engines, tmp_path: Path, monkeypatch, capsys) -> None:
    """Rows of an earlier run stay."""
    engine = engines.engine(SWIFTKV)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "some.txt").write_text("Once upon a time there was a fox. " * 60)
    (tmp_path / "found.json").write_text(json.dumps({"rows": [row("old", "some", 0.5)]}))
    given = ["closeness", str(engine), str(tmp_path / "texts"), f"itself={engine}", "--length", "64"]
    monkeypatch.setattr("sys.argv", [*given, "--num-documents", "2", "--output", str(tmp_path / "found")])
    assert closeness.EXPERIMENT.run() == 0
    old, new = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert old["name"] == "old" and new["name"] == "itself" and new["kl"]["value"] == 0
    assert new["agreement"]["value"] == 1 and new["num_documents"] == 2
    said = capsys.readouterr().out
    assert "| itself | 0.0000 | 100.0% | 1.000 |" in said and said == (tmp_path / "found.md").read_text() + "\n"
    assert (tmp_path / "found.svg").is_file()


def test_names_and_texts_that_are_none_are_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["closeness", "engine", str(tmp_path), "no-name"])
    with pytest.raises(SystemExit):
        closeness.EXPERIMENT.run()
    monkeypatch.setattr("sys.argv", ["closeness", "engine", str(tmp_path), "a=engine"])
    assert closeness.EXPERIMENT.run() == 1
    assert "has no .txt file" in capsys.readouterr().err
