"""What the program that measures predicted caches counts and reports."""

from pathlib import Path

import pytest

from kvforge.common.exact_intervals import ExactTokens
from kvforge.compiler import BuildOptions
from kvforge.costs.flops import prompt_flops
from perf.quality import kv_prediction, kv_prediction_costs
from perf.quality.kv_prediction_report import plot, summarised
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

    assert flops(None) == prompt_flops(manifest.model, 100)
    kv = q = o = 2 * 64  # of a row of hidden state, for each output
    layer = kv * 64 + (q + o) * 64 + 6 * 64 * 96 + 4 * 64 * 50.5  # 2 of 3 layers run; heads are as the base's
    maps = 2 * 64 * 4 * 64
    full = 4 * (kv * 64 + (q + o) * 64 + 6 * 64 * 96)
    last = full + 4 * 4 * 64 * 100 + 2 * 64 * 320
    assert flops(ExactTokens()) == pytest.approx(100 * (2 * layer + maps) + last)
    ten = 10 * (full + 4 * 4 * 64 * 95.5) + 2 * 64 * 320
    assert flops(ExactTokens(last=10)) == pytest.approx(100 * (2 * layer + maps) + ten)
    assert flops(ExactTokens(share=0.32)) > flops(ExactTokens(last=32)) * 0.9


def test_trained_rows_have_a_predictor_for_each_seed() -> None:
    rows = {setting.name: setting.seeded([1, 2, 5]) for setting in kv_prediction.settings(7)}
    assert len(rows["teacher"]) == len(rows["fitted, last 32 exact"]) == 1
    trained = [one.predictor for one in rows["trained, last token exact"]]
    assert [one.seed for one in trained] == [1, 2, 5] and len({one.slug for one in trained}) == 3
    assert all(one.steps == 7 and not one.is_independent for one in trained)
    slugs = {one.predictor.slug for several in rows.values() for one in several if one.predictor}
    assert len(slugs) == 2 * 3 + 3  # lower and independent: trained thrice, fitted; and own layers, fitted


def test_the_report_has_a_row_a_setting(tmp_path: Path) -> None:
    rows = {setting.name: setting.seeded([1, 2]) for setting in kv_prediction.settings(7)}
    names = list(rows)
    assert len(names) >= 9 and names[0] == "teacher"
    cells = {
        name: {
            "kind": rows[name][0].kind,
            "correct": [{task: [True, (index + seed) % 2 == 0] for task in TASKS} for seed in range(len(rows[name]))],
            "flops": 100.0 - index,
            "first_token_s": {"value": 0.02, "low": 0.01, "high": 0.03},
        }
        for index, name in enumerate(names)
    }
    maps = {kind: {half: [[0.1, 0.2]] * 8 for half in ("k", "v")} for kind in ("fitted", "trained")}
    about = {"prompt_tokens": 300, "steps": 7, "tokens_per_step": 2048, "auxiliary_layers": 4, "timed": 20, "rounds": 3}
    found = summarised(cells)
    about |= {"seeds": [1, 2], "independent_tokens": 9, "command": "c", "rows": found, "differences": maps}
    text = kv_prediction.EXPERIMENT.show(about)
    plot(about, tmp_path / "out.png")
    assert all(f"| {name} |" in text for name in names) and "20.0 (10.0 to 30.0)" in text
    assert found[names[1]]["accuracy"] == 0.5
    trained = found["trained, last token exact"]
    assert sorted(trained["by_seed"]) == [0.5, 1.0] and trained["accuracy"] == 0.75
    assert (trained["low"], trained["high"]) == (0, 1)  # two seeds say little
    assert trained["versus_teacher"]["difference"] == trained["accuracy"] - found["teacher"]["accuracy"]
    assert (tmp_path / "out.png").stat().st_size > 10_000
