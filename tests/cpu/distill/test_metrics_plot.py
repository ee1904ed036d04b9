"""The log of a distillation as a figure."""

import math
import re
from pathlib import Path

import pytest

from kvforge.common.errors import KvforgeError
from kvforge.distill.plot import plot_metrics

pytest.importorskip("matplotlib")


def write_log(path: Path, num_steps: int = 20) -> Path:
    lines = ["step,tokens,lr,loss,kl,hidden,early_exit_kl,agreement"]
    for step in range(1, num_steps + 1):
        lines.append(f"{step},{step * 512},{1e-4 / step},{math.exp(-step)},{math.exp(-step) / 2},0.1,,{step / 30}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_all_columns_are_drawn(tmp_path: Path) -> None:
    log, out = write_log(tmp_path / "metrics.csv"), tmp_path / "metrics.svg"
    plot_metrics(log, out)
    texts = re.findall(r"<text[^>]*>(.*?)</text>", out.read_text())
    assert {"loss", "KL", "before the last layer", "most probable token", "tokens", "step"} <= set(texts)
    assert "KL of the early-exit head" not in texts, "an empty column has no line"
    plot_metrics(write_log(log, num_steps=1), tmp_path / "metrics.png")
    assert (tmp_path / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.csv", "metrics.png", "metrics.svg"]


def test_a_log_that_is_being_written_is_drawn_up_to_its_last_whole_line(tmp_path: Path) -> None:
    log = write_log(tmp_path / "metrics.csv")
    log.write_text(log.read_text() + "21,10")
    plot_metrics(log, tmp_path / "whole.svg")
    log.write_text("step,loss\n1,nan\n2,0\n3,1.5\n")
    plot_metrics(log, tmp_path / "nan.svg")
    assert (tmp_path / "whole.svg").exists() and (tmp_path / "nan.svg").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("", "has no steps"),
        ("step,loss\n", "has no steps"),
        ("a,b\n1,2\n", "no column named step"),
        ("step,loss\n1,x\n", "not a number"),
    ],
)
def test_bad_logs_are_one_sentence(tmp_path: Path, text: str | None, message: str) -> None:
    log = tmp_path / "metrics.csv"
    if text is not None:
        log.write_text(text)
    with pytest.raises(KvforgeError, match=message):
        plot_metrics(log, tmp_path / "out.svg")
    assert not (tmp_path / "out.svg").exists()


def test_bad_places_are_one_sentence(tmp_path: Path) -> None:
    log = write_log(tmp_path / "metrics.csv")
    with pytest.raises(KvforgeError, match=r"name a \.png"):
        plot_metrics(log, tmp_path / "out.xyz")
    with pytest.raises(KvforgeError, match="cannot be written"):
        plot_metrics(log, tmp_path / "none" / "out.svg")
