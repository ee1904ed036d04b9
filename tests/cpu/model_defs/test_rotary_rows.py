"""Rows of q and k as engines store them: rotating halves is what the definition does in the checkpoint's order."""

import pytest
import torch

from model_defs.reference import _rotate
from model_defs.rope import apply_rope, rope_tables
from model_defs.rope_config import RopeConfig, RotaryRows
from model_defs.rotary_rows import engine_rows, factors_of_rows, order_of_rows
from plugins.packed_linear.int4 import Codes
from tests.support.rounding import assert_near, sum_error

TOKENS, HEADS, HEAD_DIM = 20, 3, 16
ROPES = [
    RopeConfig(),
    RopeConfig(amplitude=1.3),
    RopeConfig(interleaved=True),
    RopeConfig(partial=0.75, amplitude=1.3),
    RopeConfig(partial=0.5, interleaved=True, amplitude=1.3),
    RopeConfig(partial=0.125, interleaved=True),
]


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_scores_are_those_of_the_checkpoints_order(rope: RopeConfig) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = RotaryRows(rope, HEAD_DIM)
    scores, expected = [], []
    for _ in "qk":
        stored = torch.randn(HEADS * HEAD_DIM, TOKENS, generator=generator)
        turned = apply_rope(
            engine_rows(rows, stored).T.unflatten(1, (HEADS, HEAD_DIM)), *rope_tables(rope, HEAD_DIM, TOKENS)
        )
        scores.append(turned.transpose(0, 1))
        expected.append(_rotate(stored.T.unflatten(1, (HEADS, HEAD_DIM)).transpose(0, 1), rope))
        assert_near(scores[-1].sort(-1).values, expected[-1].sort(-1).values, sum_error(4))
    assert_near(scores[0] @ scores[1].mT, expected[0] @ expected[1].mT, sum_error(HEAD_DIM, 8))
    assert rows.is_nothing == (rope == RopeConfig())


def test_a_norm_behind_them_takes_the_amplitude() -> None:
    rows = RotaryRows(RopeConfig(amplitude=1.3, interleaved=True), HEAD_DIM, is_last=False)
    stored = torch.arange(2 * HEAD_DIM)
    assert factors_of_rows(rows, 2 * HEAD_DIM) is None and engine_rows(rows, stored)[:3].tolist() == [0, 2, 4]


@pytest.mark.parametrize("zeros", [None, torch.arange(2 * HEAD_DIM * 2, dtype=torch.uint8).view(-1, 2) % 16])
def test_codes_are_ordered_and_their_scales_multiplied(zeros: torch.Tensor | None) -> None:
    generator = torch.Generator().manual_seed(0)
    number = 2 * HEAD_DIM
    codes = Codes(
        torch.randint(0, 16, (number, 40), generator=generator, dtype=torch.uint8),
        torch.rand(number, 2, generator=generator),
        zeros,
    )
    rows = RotaryRows(RopeConfig(partial=0.5, interleaved=True, amplitude=1.25), HEAD_DIM)
    found = codes.rows(order_of_rows(rows, number), factors_of_rows(rows, number)).dequantize()
    assert_near(found, engine_rows(rows, codes.dequantize()), sum_error(2))
