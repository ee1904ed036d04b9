"""The figures of docs/gallery.md: the committed numbers are what the code gives, and every picture is shown there."""

import json
from pathlib import Path

import pytest

from kvforge.planning.presets import PRESETS
from perf.gallery.figures import FIGURES, draw
from perf.gallery.memory import MECHANISMS, MODEL

ROOT = Path(__file__).resolve().parents[4]
LARGEST_PICTURE = 150_000


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_current_small_and_shown(name: str, tmp_path: Path) -> None:
    for folder in ("perf/results", "docs/images"):
        (tmp_path / folder).mkdir(parents=True)
    draw(FIGURES[name], tmp_path)
    numbers, picture = f"perf/results/gallery-{name}.json", f"docs/images/gallery-{name}.svg"
    assert json.loads((tmp_path / numbers).read_text()) == json.loads((ROOT / numbers).read_text())
    assert 0 < (ROOT / picture).stat().st_size < LARGEST_PICTURE and (tmp_path / picture).stat().st_size
    assert f"](images/gallery-{name}.svg)" in (ROOT / "docs/gallery.md").read_text()


def test_memory_by_hand() -> None:
    """Llama-3.1-8B: 32 layers of K and V, 8 heads of 128 numbers of 2 bytes. 4096 tokens are whole pages."""
    model, by_name = PRESETS[MODEL].model, {mechanism.name: mechanism for mechanism in MECHANISMS}
    full = 32 * 2 * 8 * 128 * 2 * 4096

    def times(name: str) -> float:
        return full / by_name[name].num_bytes(model, 4096)[0]

    assert times("full, bf16") == times("cut 16") == 1
    assert times("cut 16, 4-way AcrossKV") == 32 / 20
    assert times("fp8") == pytest.approx(2 * 128 / (128 + 4))
    assert times("int4") == pytest.approx(4 * 128 / (128 + 2 * 4))
    exact = 2 * 64 / 4096  # two pages in bf16 besides
    assert times("kivi2") == pytest.approx(1 / (3 / 16 + exact))
    on_host = {name: by_name[name].num_bytes(model, 4096)[1] for name in ("ShadowKV", "int4")}
    assert on_host["ShadowKV"] == full / 2 and on_host["int4"] == 0
