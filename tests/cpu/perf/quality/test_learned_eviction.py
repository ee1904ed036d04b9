"""KVzap beside other rules at equal bytes: the program on the tiny teacher, without compiled graphs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvforge.compiler import BuildOptions
from kvforge.evaluation import engine as evaluation
from kvforge.runtime import engine as runtime
from kvforge.runtime import loading
from kvforge.runtime.text.tokenizer import Tokenizer
from perf.harness import policy_engines
from perf.harness.engines import TEACHER_DIR
from perf.quality import learned_eviction
from tests.support.sessions.eager import EagerSession, eager_session

PAGE = 16


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> dict[Path, EagerSession]:
    """Engines by folder, of which only the name is used."""
    made, options_of = dict[Path, EagerSession](), dict[Path, BuildOptions]()

    def build(engine: Path, checkpoint: Path, options: BuildOptions) -> Path:
        if engine not in made:
            made[engine], options_of[engine] = eager_session(checkpoint, options), options
        return engine

    def with_parameters(engine: Path, copy: Path, policy: str) -> Path:
        return build(copy, TEACHER_DIR, replace(options_of[engine], kv_policy=policy))

    for module in (policy_engines, learned_eviction):
        monkeypatch.setattr(module, "cached_engine", build)
        monkeypatch.setattr(module, "with_parameters", with_parameters)
    for module in (runtime, evaluation, learned_eviction):
        monkeypatch.setattr(module, "load_manifest", lambda engine: made[Path(engine)].manifest)
    monkeypatch.setattr(runtime, "load_session", lambda engine, manifest: made[engine])
    monkeypatch.setattr(loading, "target_of", lambda engine: "cpu")
    monkeypatch.setattr(evaluation, "load_tokenizer", lambda engine: Tokenizer.from_dir(TEACHER_DIR))
    return made


def test_others_keep_the_pages_that_kvzap_keeps(sessions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a budget every prompt keeps as much, by a threshold each has a length of its own."""
    monkeypatch.setattr(learned_eviction, "TEXTS", (4, 128))
    length = ["--num-prompts", "1", "--length", "200", "--model", "no cut", "--units", "0"]
    cuts = ["--budget", "32", "--threshold", "300"]
    places = ["--work", str(tmp_path), "--output", str(tmp_path / "found")]
    monkeypatch.setattr("sys.argv", ["learned_eviction", *length, *cuts, *places])
    assert learned_eviction.EXPERIMENT.run() == 0
    full, *rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert (full["kept"], full["kl"]) == (1, 0)
    assert [row["rule"] for row in rows] == ["kvzap", *learned_eviction.OTHERS] * 2
    kib = next(iter(sessions.values())).manifest.kv_bytes_per_token * PAGE / 1024
    for first, *others in (rows[:4], rows[4:]):
        pages = first["kib"] / kib
        assert 0 < first["kept"] < 1 and first["kl"] > 0
        assert {row["kib"] for row in others} == {kib * -(-pages // 1)}
        assert {row["budget"] for row in others} == {PAGE * -(-pages // 1)}
    assert rows[0]["kib"] == rows[1]["kib"] == 3 * kib  # two pages of the budget, and the end of the prompt
    assert rows[4]["budget"] == learned_eviction.LARGEST
