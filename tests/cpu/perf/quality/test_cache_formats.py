"""Simulated formats of the KV cache: what a codec keeps, what it costs, and the program on a short document."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from model_defs.reference import attend
from perf.quality import cache_formats
from perf.quality.cache_codecs import asymmetric, by_channel, nearest, nvfp4, rotated, symmetric
from perf.quality.cache_formats import attend_residual
from perf.quality.cache_table import FORMATS
from plugins.kv_rotation import block_size, rotate_blocks

ROUNDING = 1e-5
"""Of float32 sums of up to 128 numbers near 1, relative to the largest."""


@pytest.mark.parametrize("head_dim", [20, 64, 80, 96, 128])
def test_a_rotation_is_its_own_inverse_and_keeps_products(head_dim: int) -> None:
    assert block_size(head_dim) == {20: 4, 64: 64, 80: 16, 96: 32, 128: 128}[head_dim]
    x, y = torch.randn(2, 5, head_dim, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rotate_blocks(rotate_blocks(x)), x, rtol=0, atol=ROUNDING)
    torch.testing.assert_close(
        (rotate_blocks(x) * rotate_blocks(y)).sum(-1), (x * y).sum(-1), rtol=0, atol=ROUNDING * 20
    )
    outlier = torch.zeros(head_dim).index_fill(0, torch.tensor([3]), 8.0)
    assert rotate_blocks(outlier).abs().max() == 8.0 * block_size(head_dim) ** -0.5  # spread over its block


def test_codecs_round_to_the_nearest_of_their_numbers() -> None:
    x = torch.tensor([[[7.0, 3.4, -2.6, 0.5, -7.0, 1.0, 6.49, 0.0]]])
    assert symmetric(x, 7)[0, 0].tolist() == [7, 3, -3, 0, -7, 1, 6, 0]
    row = torch.tensor([[[0.0, 3.0, 1.4, 2.6]]])
    assert asymmetric(row, 2)[0, 0].tolist() == pytest.approx([0, 3, 1, 3])
    assert nearest(torch.tensor([0.2, 2.6, 9.0]), torch.tensor([0.0, 1.0, 4.0])).tolist() == [0, 4, 4]
    tokens = torch.randn(2, 37, 8)
    stored = by_channel(tokens, 4, 32)
    assert torch.equal(stored[:, 32:], tokens[:, 32:]) and not torch.equal(stored[:, :32], tokens[:, :32])
    grid = torch.tensor([6.0, 4, 3, 2, 1.5, 1, 0.5, 0, -6, -4, -3, -2, -1.5, -1, -0.5, 0])
    assert torch.equal(nvfp4(grid[None, None]), grid[None, None])


def test_a_fitted_range_has_less_error_than_the_whole_one() -> None:
    x = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(0))
    for codec in (partial(asymmetric, bits=2, group=32), partial(by_channel, bits=2, group=32)):
        whole, fitted = (float((codec(x, fitted=choice) - x).square().mean()) for choice in (False, True))
        assert fitted < whole


def test_a_rotation_helps_where_there_are_outliers() -> None:
    x = torch.randn(1, 200, 64, generator=torch.Generator().manual_seed(0))
    x[..., 5] *= 30
    plain, turned = (float((codec(x) - x).square().mean()) for codec in (partial(symmetric, largest=7),
                     rotated(partial(symmetric, largest=7))))  # fmt: skip
    assert turned < plain / 4


def test_bits_and_bytes_of_llama() -> None:
    bits = {name: made.bits_per_number(8, 128) for name, made in FORMATS.items()}
    assert (bits["bf16"], bits["int8"], bits["int4, rotated"], bits["nvfp4"]) == (16, 8.25, 4.25, 4.5)
    assert (bits["KIVI-4"], bits["KIVI-2"], bits["int2 groups of 32, rotated"]) == (5, 3, 3)
    assert bits["nuq4, 1% outliers"] == pytest.approx(4.335625)


def test_a_residual_of_exact_keys_is_exact_attention() -> None:
    q, kv = torch.randn(4, 70, 16), torch.randn(2, 2, 70, 16)
    exact = attend(0, q, kv[0], kv[1], 0)
    torch.testing.assert_close(attend_residual(q, (kv[0], kv[1]), (kv[0], kv[1]), 32), exact, rtol=0, atol=ROUNDING)
    stored = attend_residual(q, (kv[0], kv[1]), (torch.zeros(2, 70, 16), torch.zeros(2, 70, 16)), 32)
    torch.testing.assert_close(stored[:32], exact[:32], rtol=0, atol=ROUNDING)  # the first group reads nothing else
    assert (stored[32:] - exact[32:]).abs().max() > 0.1


def test_the_program_adds_rows_and_orders_formats_by_loss(tmp_path: Path, capsys, monkeypatch) -> None:
    command = ["cache_formats", "--model", "no cut", "--num-documents", "2", "--length", "64"]
    command += ["--output", str(tmp_path / "out"), "--json"]
    for formats in (["int8", "int4, rotated", "nuq4"], ["KIVI-2", "int8"]):
        only = [word for name in formats for word in ("--only", name)]
        monkeypatch.setattr("sys.argv", [*command, *only])
        assert cache_formats.EXPERIMENT.run() == 0
    rows = {row["format"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert list(rows) == ["int8", "int4, rotated", "nuq4", "KIVI-2"] and rows["int8"]["num_tokens"] == 128
    kl = {name: row["kl"]["value"] for name, row in rows.items()}
    assert 0 < kl["int8"] < min(kl["int4, rotated"], kl["nuq4"], kl["KIVI-2"])
    assert rows["int4, rotated"]["llama_bytes_per_token"] == {"no cut": 34816, "cut 16, 4-way": 21760}
    assert "| int4, rotated | 4.25 | 34816 | 21760 |" in (tmp_path / "out.md").read_text()
    assert (tmp_path / "out.png").stat().st_size > 1000
