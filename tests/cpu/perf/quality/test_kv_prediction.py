"""What the program that measures predicted caches counts and reports."""

import json
from pathlib import Path

import pytest

from kvforge.common.exact_intervals import ExactTokens
from kvforge.compiler import BuildOptions
from kvforge.costs.flops import prompt_flops
from kvforge.planning.shape import shape_of_manifest
from perf.quality import kv_prediction, kv_prediction_costs
from perf.quality.kv_prediction_report import write_report
from perf.quality.scores import TASKS
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.prediction import random_predictor
from tests.support.sessions.eager import eager_session


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("costs")
    base = make_checkpoint(folder / "base", max_position_embeddings=128)
    predictor = random_predictor(folder / "p", base, layers=(0, 1, 1, 2), num_hidden_layers=3)
    return eager_session(base, BuildOptions(dtype="float32", kv_prediction=str(predictor))).manifest


def test_flops_are_those_of_what_is_run(manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_prediction_costs, "load_manifest", lambda engine: manifest)

    def flops(exact: ExactTokens | None) -> float:
        return kv_prediction_costs.flops(Path(), 100, exact)

    assert flops(None) == prompt_flops(shape_of_manifest(manifest), 100)
    kv = q = o = 2 * 64  # of a row of hidden state, for each output
    layer = kv * 64 + (q + o) * 64 + 6 * 64 * 96 + 4 * 64 * 50.5  # 2 of 3 layers run; heads are as the base's
    maps = 2 * 64 * 4 * 64
    full = 4 * (kv * 64 + (q + o) * 64 + 6 * 64 * 96)
    last = full + 4 * 4 * 64 * 100 + 2 * 64 * 320
    assert flops(ExactTokens()) == pytest.approx(100 * (2 * layer + maps) + last)
    ten = 10 * (full + 4 * 4 * 64 * 95.5) + 2 * 64 * 320
    assert flops(ExactTokens(last=10)) == pytest.approx(100 * (2 * layer + maps) + ten)
    assert flops(ExactTokens(share=0.32)) > flops(ExactTokens(last=32)) * 0.9


def test_the_report_has_a_row_a_setting(tmp_path: Path) -> None:
    names = [setting.name for setting in kv_prediction.settings()]
    assert len(set(names)) == len(names) >= 9 and names[0] == "teacher"
    cells = {
        name: {
            "correct": {task: [True, index % 2 == 0] for task in TASKS},
            "flops": 100.0 - index,
            "first_token_s": {"value": 0.02, "low": 0.01, "high": 0.03},
        }
        for index, name in enumerate(names)
    }
    maps = {kind: {half: [[0.1, 0.2]] * 8 for half in ("k", "v")} for kind in ("fitted", "trained")}
    about = {"prompt_tokens": 300, "steps": 7, "tokens_per_step": 2048, "auxiliary_layers": 4, "timed": 20}
    write_report(cells, maps, about, tmp_path / "out")
    text = (tmp_path / "out.md").read_text()
    assert all(f"| {name} |" in text for name in names) and "20.0 (10.0 to 30.0)" in text
    assert json.loads((tmp_path / "out.json").read_text())["rows"][names[1]]["accuracy"] == 0.5
    assert (tmp_path / "out.png").stat().st_size > 10_000
