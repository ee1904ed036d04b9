"""Answers by transformers: its model is ours, and answers end where they should."""

from pathlib import Path

import pytest
import torch

from kvforge.checkpoint.model import open_model
from perf.harness.engines import TEACHER_DIR
from perf.quality.rewire_divergence import load
from perf.real_model.sampled import as_transformers, draw_answers
from tests.support.rounding import assert_near, model_error


@pytest.fixture(scope="module")
def model():
    return as_transformers(open_model(TEACHER_DIR), "cpu", torch.float32)


@torch.inference_mode()
def test_transformers_has_the_same_weights(model) -> None:
    ids, ours = torch.arange(5, 45)[None], load(Path(TEACHER_DIR))
    assert_near(model(ids).logits[0], ours(ids)[0], model_error(ours.sizes, ids.shape[1]))


@torch.inference_mode()
def test_padding_changes_no_answer_and_ends_are_left_out(model) -> None:
    """Nearly greedy, so that chance has no part."""
    prompts = [list(range(5, 25)), list(range(30, 37))]
    drawn = draw_answers(model, prompts, [2], 6, seed=0, temperature=1e-4)
    assert drawn == [draw_answers(model, [prompt], [2], 6, seed=1, temperature=1e-4)[0] for prompt in prompts]
    greedy, ids = [], list(prompts[0])
    for _ in range(6):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        greedy.append(ids[-1])
    assert drawn[0] == greedy and 2 not in greedy
    ended = draw_answers(model, prompts[:1], [greedy[2]], 6, seed=0, temperature=1e-4)[0]
    assert ended == greedy[: greedy.index(greedy[2])]


def test_a_seed_repeats_its_answers(model) -> None:
    prompts = [list(range(5, 25))] * 3
    first, again, other = (
        draw_answers(model, prompts, [2], 12, seed, temperature=2.0, top_p=1.0) for seed in (3, 3, 4)
    )
    assert first == again and first != other and len(set(map(tuple, first))) > 1
