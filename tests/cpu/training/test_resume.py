"""An interrupted training run continues to the very same weights."""

import csv
import dataclasses

import pytest
import torch
from torch import nn

from perf.training.config import TINY_MODEL, Stage, TeacherConfig
from perf.training.loop import learning_rate, stage_of
from perf.training.teacher import train_teacher
from perf.training.tokenizer import FastEncoder, train_tokenizer

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
    config = TeacherConfig(model=MODEL, stages=STAGES, warmup_steps=3, checkpoint_every=2, log_every=1)
    whole, done = train_teacher(config, tmp_path / "whole", encode)
    early, _ = train_teacher(config, tmp_path / "parts", encode, stop_after=3)
    assert not equal(early, whole)
    train_teacher(config, tmp_path / "parts", encode, stop_after=6)
    with (tmp_path / "parts" / "metrics.csv").open("a") as file:
        file.write("7,1,96,1,1.0,1e-3,1.0,1.0\n8,1,96")  # killed after its last checkpoint
    resumed, progress = train_teacher(config, tmp_path / "parts", encode)
    assert equal(resumed, whole)
    assert (progress.step, progress.tokens) == (done.step, done.tokens) == (9, 2048)
    rows = list(csv.DictReader((tmp_path / "parts" / "metrics.csv").open()))
    assert [int(row["step"]) for row in rows] == list(range(1, 10))
    assert {row["length"] for row in rows} == {"64", "96"}


def test_a_step_belongs_to_one_stage():
    assert [stage_of(STAGES, step) for step in (0, 4, 5, 8)] == [(0, 0), (0, 4), (1, 0), (1, 3)]
    with pytest.raises(ValueError, match="beyond the last stage"):
        stage_of(STAGES, 9)


def test_workers_make_the_same_batches(tmp_path, encode):
    config = TeacherConfig(model=MODEL, stages=STAGES, warmup_steps=3, threads=1)
    alone, _ = train_teacher(config, tmp_path / "alone", encode)
    helped, _ = train_teacher(config, tmp_path / "helped", encode, workers=2)
    assert equal(alone, helped)


def test_learning_rate_rises_holds_and_falls():
    stages = (Stage(64, 4, 20), Stage(96, 2, 4, lr_end=0.1))
    config = TeacherConfig(model=MODEL, stages=stages, lr=2.0, warmup_steps=10)
    assert learning_rate(config, 0) == pytest.approx(0.2)
    assert learning_rate(config, 19) == 2.0
    assert learning_rate(config, 22) == pytest.approx(1.1)
