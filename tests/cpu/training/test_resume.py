"""An interrupted training run continues to the very same weights."""

import csv
import dataclasses

import pytest
import torch
from torch import nn

from kvforge.training.config import TINY_MODEL, Stage, TeacherConfig
from kvforge.training.loop import Progress, advance, learning_rate
from kvforge.training.teacher import train_teacher
from kvforge.training.tokenizer import FastEncoder, train_tokenizer

MODEL = dataclasses.replace(
    TINY_MODEL,
    vocab_size=1000,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    layer_windows=(0, 0),
    cut=2,
)
STAGES = (Stage(64, 4, 5), Stage(96, 2, 4))


@pytest.fixture(scope="module")
def encode():
    return FastEncoder(train_tokenizer(vocab_size=1000, seed=0, num_items=100))


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_teacher_resumes_to_the_same_weights(tmp_path, encode):
    config = TeacherConfig(model=MODEL, stages=STAGES, warmup_steps=3, checkpoint_every=2)
    whole, done = train_teacher(config, tmp_path / "whole", encode)
    early, _ = train_teacher(config, tmp_path / "parts", encode, stop_after=3)
    assert not equal(early, whole)
    train_teacher(config, tmp_path / "parts", encode, stop_after=6)
    with (tmp_path / "parts" / "metrics.csv").open("a") as file:
        file.write("7,1,96,1,1.0,1e-3,1.0,1.0\n8,1,96")  # killed after its last checkpoint
    resumed, progress = train_teacher(config, tmp_path / "parts", encode)
    assert equal(resumed, whole)
    assert (progress.step, progress.stage, progress.tokens) == (done.step, 2, done.tokens) == (9, 2, 2048)
    rows = list(csv.DictReader((tmp_path / "parts" / "metrics.csv").open()))
    assert [int(row["step"]) for row in rows] == list(range(1, 10))
    assert {row["length"] for row in rows} == {"64", "96"}


def test_a_stage_ends_early_only_when_its_target_is_held():
    stage = Stage(64, 4, max_steps=10, target=0.9, min_steps=3)
    progress = Progress()
    for _ in range(2):
        advance(progress, stage, 1.0, 0.1)
    assert (progress.stage, progress.stage_step) == (0, 2)
    advance(progress, stage, 1.0, 0.1)
    assert (progress.stage, progress.stage_step, progress.accuracy) == (1, 0, 0.0)
    progress = Progress()
    for _ in range(10):
        advance(progress, stage, 0.5, 0.1)
    assert (progress.stage, progress.step, progress.tokens) == (1, 10, 2560)


def test_learning_rate_rises_holds_and_falls():
    stages = (Stage(64, 4, 5, lr_scale=2.0), Stage(96, 2, 4, lr_end=0.1))
    assert learning_rate(Progress(step=0), stages, 1.0, 10) == pytest.approx(0.2)
    assert learning_rate(Progress(step=20, stage_step=4), stages, 1.0, 10) == 2.0
    assert learning_rate(Progress(step=20, stage=1, stage_step=2), stages, 1.0, 10) == pytest.approx(0.55)
