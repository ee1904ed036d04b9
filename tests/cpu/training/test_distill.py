"""The student: its initialisation, its loss mask, and what distillation may change."""

import pytest
import torch
from torch.nn import functional as F

from kvforge.training.config import Stage, StudentConfig
from kvforge.training.distill import distill_student, distillation_loss
from kvforge.training.model import LanguageModel, ModelConfig
from kvforge.training.student import init_student
from kvforge.training.tokenizer import FastEncoder, train_tokenizer

SMALL = ModelConfig(
    vocab_size=1000,
    hidden_size=32,
    intermediate_size=48,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    cut=5,
)


def random_parts(seed: int):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 6, 11), (2, 6, 11), (2, 6, 4), (2, 6, 4))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def test_loss_is_the_mean_over_supervised_positions_only():
    student, teacher, student_hidden, teacher_hidden = random_parts(0)
    weight = torch.zeros(2, 6)
    supervised = [(0, 2), (0, 3), (1, 5)]
    for b, t in supervised:
        weight[b, t] = 1.0
    loss = distillation_loss(student, teacher, student_hidden, teacher_hidden, weight, 2.0, 0.0)
    expected = 0.0
    for b, t in supervised:
        p, q = (teacher[b, t] / 2).softmax(-1), (student[b, t] / 2).softmax(-1)
        expected += 4.0 * float((p * (p / q).log()).sum()) / len(supervised)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_unsupervised_positions_get_no_gradient():
    student, teacher, student_hidden, teacher_hidden = random_parts(1)
    student.requires_grad_()
    student_hidden.requires_grad_()
    weight = torch.zeros(2, 6)
    weight[0, 2] = 1.0
    distillation_loss(student, teacher, student_hidden, teacher_hidden, weight, 2.0, 1.0).backward()
    for gradient in (student.grad, student_hidden.grad):
        touched = gradient.abs().sum(-1) > 0
        assert touched.nonzero().tolist() == [[0, 2]]


def test_loss_is_zero_for_equal_models_and_hidden_error_is_relative():
    logits, _, hidden, _ = random_parts(2)
    weight = torch.ones(2, 6)
    assert distillation_loss(logits, logits, hidden, hidden, weight, 2.0, 1.0).item() == pytest.approx(0, abs=1e-6)
    once = distillation_loss(logits, logits, 1.1 * hidden, hidden, weight, 2.0, 1.0)
    scaled = distillation_loss(logits, logits, 110 * hidden, 100 * hidden, weight, 2.0, 1.0)
    assert once.item() == pytest.approx(0.01, rel=1e-3) and scaled.item() == pytest.approx(0.01, rel=1e-3)


def test_initialisation_follows_the_reference():
    teacher = LanguageModel(SMALL, seed=3)
    student = init_student(teacher, cut=2, group_size=2)
    old, new = teacher.state_dict(), student.state_dict()
    assert {n for n in new if n not in old} == {
        "model.norm_swiftkv.weight",
        *(f"model.layers.{i}.self_attn.q_proj_swiftkv.weight" for i in (2, 3, 4)),
        *(f"model.layers.{i}.self_attn.{p}_proj_swiftkv.weight" for i in (2, 4) for p in "kv"),
    }
    assert {n for n in old if n not in new} == {
        f"model.layers.{i}.self_attn.{p}_proj.weight" for i in (2, 3, 4) for p in "qkv"
    }
    attention = "model.layers.{}.self_attn.{}.weight".format
    assert torch.equal(new["model.norm_swiftkv.weight"], old["model.layers.2.input_layernorm.weight"])
    assert torch.equal(new[attention(3, "q_proj_swiftkv")], old[attention(3, "q_proj")])
    mean = (old[attention(2, "k_proj")] + old[attention(3, "k_proj")]) / 2
    assert torch.allclose(new[attention(2, "k_proj_swiftkv")], mean)
    assert torch.equal(new[attention(4, "v_proj_swiftkv")], old[attention(4, "v_proj")])


def test_student_with_the_teachers_keys_is_the_teacher():
    """A cut at the last layer with no groups computes the same function as the teacher."""
    teacher = LanguageModel(SMALL, seed=4)
    student = init_student(teacher, cut=4, group_size=1)
    ids = torch.randint(0, 1000, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(student(ids), teacher(ids), atol=1e-6)
        deeper = init_student(teacher, cut=2, group_size=2)(ids)
        assert not torch.allclose(deeper, teacher(ids), atol=1e-4)


@pytest.mark.parametrize("train_upper", [False, True])
def test_distillation_changes_only_what_it_may_and_lowers_the_loss(tmp_path, train_upper):
    encode = FastEncoder(train_tokenizer(vocab_size=1000, seed=0, num_items=100))
    teacher = LanguageModel(SMALL, seed=5)
    with torch.no_grad():
        for parameter in teacher.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)  # attention that matters
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    config = StudentConfig(
        cut=2, group_size=2, stages=(Stage(64, 8, 25),), lr=3e-3, warmup_steps=5, train_upper=train_upper
    )
    start = init_student(teacher, 2, 2)
    student, progress = distill_student(config, teacher, tmp_path, encode)
    assert progress.step == 25
    assert all(torch.equal(before[name], tensor) for name, tensor in teacher.state_dict().items())
    changed = {
        name for name, tensor in student.state_dict().items() if not torch.equal(tensor, start.state_dict()[name])
    }
    swiftkv = {name for name in student.state_dict() if "_swiftkv" in name}
    assert swiftkv <= changed
    if train_upper:
        assert any("mlp" in name for name in changed) and not any(f"layers.{i}." in n for i in (0, 1) for n in changed)
    else:
        assert changed == swiftkv
    ids = torch.randint(2, 1000, (4, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        target = F.log_softmax(teacher(ids), -1)
        first, last = (
            F.kl_div(F.log_softmax(m(ids), -1), target, reduction="batchmean", log_target=True)
            for m in (start, student)
        )
    assert last < first
