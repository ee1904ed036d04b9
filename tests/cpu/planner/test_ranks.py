"""``kvforge plan --tensor-parallel-size``: what each rank keeps, against sizes counted by hand."""

import json
from typing import Any

import pytest

from kvforge.cli import main


def ranks(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    assert main(["plan", *map(str, arguments), "--json", "--quiet"]) == 0
    return json.loads(capsys.readouterr().out)["ranks"]


def test_70b_on_four_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    found = ranks(
        capsys, "--model", "llama-3.1-70b", "--cut", 40, "--group-size", 1, 4, "--tensor-parallel-size", 4,
        "--memory-gib", 80,
    )  # fmt: skip
    assert found["tensor_parallel_size"] == 4
    rows = {row["name"]: row for row in found["variants"]}
    plain, shared = rows["no cut"], rows["cut 40 of 80, 4-way"]
    norms = 161 * 8192
    of_layer = 2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 8192 * 28672
    matrices = 80 * of_layer + 2 * 128256 * 8192
    assert plain["weight_bytes"] == 2 * (matrices // 4 + norms)
    assert plain["kv_bytes_per_token"] == 80 * 2 * 2 * 128 * 2  # two of the eight KV heads
    assert shared["kv_bytes_per_token"] * 8 == plain["kv_bytes_per_token"] * 5
    free = int((80 - 0.25) * 2**30) - plain["weight_bytes"]
    assert plain["requests"] == {"80": free // plain["kv_bytes_per_token"] // 8448}


def test_more_ranks_than_kv_heads_keep_the_same_head(capsys: pytest.CaptureFixture[str]) -> None:
    eight, sixteen = (
        ranks(capsys, "--model", "llama-3.1-70b", "--tensor-parallel-size", size)["variants"][0] for size in (8, 16)
    )
    assert sixteen["kv_bytes_per_token"] == eight["kv_bytes_per_token"]
    norms = 2 * 161 * 8192
    again = 8 * 2 * 128 * 8192 * 80 * 2
    assert (sixteen["weight_bytes"] - norms) * 16 == (eight["weight_bytes"] - norms) * 8 + again


def test_one_rank_keeps_all(capsys: pytest.CaptureFixture[str]) -> None:
    (row, *_) = ranks(capsys, "--model", "llama-3.1-8b", "--tensor-parallel-size", 1)["variants"]
    assert (row["weight_bytes"], row["kv_bytes_per_token"]) == (2 * 8_030_261_248, 131072)


def test_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--model", "llama-3.1-70b", "--tensor-parallel-size", "4", "--memory-gib", "40", "80", "--quiet"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "Each of 4 ranks, and requests that fit at a time, by memory per rank" in text
    assert "32.86" in text and "81920" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "llama-3.1-70b", "--tensor-parallel-size", 3), "cannot be divided among 3 ranks"),
        (("--model", "deepseek-v2-lite", "--tensor-parallel-size", 4), "keeps one latent for all heads"),
        (("--model", "llama-3.1-70b", "--tensor-parallel-size", 4, "--gpus", 2), "--gpus is 2"),
    ],
)
def test_what_cannot_be_divided_is_said(
    capsys: pytest.CaptureFixture[str], arguments: tuple[Any, ...], words: str
) -> None:
    assert main(["plan", *map(str, arguments), "--quiet"]) == 1
    assert words in capsys.readouterr().err
