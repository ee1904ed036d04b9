"""What distillation changes, what it does not, and that it learns."""

import csv
import math
from pathlib import Path

import pytest
import torch
import transformers

from kvforge.common.errors import CheckpointError, KvforgeError
from kvforge.distill import DistillConfig, distill
from kvforge.distill.config import TRAIN
from kvforge.distill.distiller import Distiller
from kvforge.distill.learning_schedule import learning_rate, share, step_indices
from kvforge.distill.trained_parameters import add_early_exit_head
from kvforge.swiftkv import SwiftKVForCausalLM, make_layout
from tests.support.models.checkpoints import FAMILIES, make_checkpoint
from tests.support.models.distillation import load_with_teacher, random_data, rewired_checkpoint
from tests.support.rounding import assert_near, assert_within, gamma, model_error, rounded_model_error, sum_error

FAST = DistillConfig(dtype="fp32", device="cpu", max_steps=2, batch_size=4, micro_batch=4, lr=1e-3, warmup=0.0)

WRITTEN = 5e-6
"""Half a unit of the last of the six digits that metrics.csv has."""


def config(**changes) -> DistillConfig:
    return DistillConfig(**{**vars(FAST), **changes})


def weights(model: SwiftKVForCausalLM) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_only_swiftkv_and_the_early_exit_head_change(tmp_path: Path, family: str) -> None:
    extra = {"sliding_window": 9} if family == "mistral" else {}
    model = load_with_teacher(rewired_checkpoint(tmp_path / "c", family, early_exit=True, **extra))
    before = weights(model)
    distill(FAST, model, random_data(), tmp_path / "work")
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    parts = ["q_proj", "k_proj", "v_proj"] + (["q_norm", "k_norm"] if model.sizes.qk_norm else [])
    if model.sizes.latent is not None:
        parts = ["q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"]
    expected = {"model.norm_early_exit.weight", "lm_head_early_exit.weight"}
    expected |= {"model.norm_swiftkv.weight"} if model.sizes.pre_norms else set()
    for layer in (2, 3):
        for part in parts:
            if part[0] == "q" or layer == 2:
                expected.add(f"model.layers.{layer}.self_attn.{part}_swiftkv.weight")
                if model.sizes.qkv_bias and part.endswith("proj"):
                    expected.add(f"model.layers.{layer}.self_attn.{part}_swiftkv.bias")
    assert changed == expected


def test_early_exit_gradient_stays_in_its_head(tmp_path: Path) -> None:
    model = load_with_teacher(rewired_checkpoint(tmp_path / "c", early_exit=True))
    sums = Distiller(model, config(train="upper"))(random_data().batch([0, 1]))
    sums[2].backward()
    touched = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert touched == {"model.norm_early_exit.weight", "lm_head_early_exit.weight"}


@pytest.mark.parametrize("train", TRAIN)
def test_an_early_exit_head_does_not_change_the_student(tmp_path: Path, train: str) -> None:
    path, ends = rewired_checkpoint(tmp_path / "c"), []
    for early_exit in (False, True):
        model = load_with_teacher(path)
        settings = config(train=train, early_exit=early_exit, clip_norm=0.01)
        distill(settings, model, random_data(), tmp_path / f"work{early_exit}")
        ends.append(model.state_dict())
    assert all(torch.equal(ends[1][name], tensor) for name, tensor in ends[0].items())
    assert len(ends[1]) == len(ends[0]) + 2


@pytest.mark.parametrize("train", TRAIN[1:])
def test_other_trainings_change_more_and_not_the_teacher(tmp_path: Path, train: str) -> None:
    model = load_with_teacher(rewired_checkpoint(tmp_path / "c"))
    before = weights(model)
    distill(config(train=train), model, random_data(), tmp_path / "work")
    unchanged = {name for name, tensor in model.state_dict().items() if torch.equal(tensor, before[name])}
    teacher = {f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (2, 3) for part in "qkv"}
    lower = {name for name in before if any(f"layers.{i}." in name for i in (0, 1))}
    rest = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert unchanged == (teacher if train == "full" else teacher | lower | rest)


def test_target_is_the_original_model(tmp_path: Path) -> None:
    """What the student is drawn to are transformers' logits of the checkpoint before rewiring."""
    plain = make_checkpoint(tmp_path / "plain", "qwen3")
    model = load_with_teacher(rewired_checkpoint(tmp_path / "c", "qwen3"))
    ids = torch.randint(3, 320, (2, 20), generator=torch.Generator().manual_seed(0))
    distiller = Distiller(model, FAST)
    with torch.no_grad():
        every = torch.ones(ids.shape, dtype=torch.bool)
        _, output, _ = distiller._teacher(ids, make_layout(model.sizes, 20), every)
        hf = transformers.AutoModelForCausalLM.from_pretrained(plain).eval()
        assert_near(model.head(output), hf(ids).logits.flatten(0, 1), model_error(model.sizes, ids.shape[1]))


def test_accumulation_equals_one_large_batch(tmp_path: Path) -> None:
    """The weights of the sequences differ, so a mean of micro-batch means would be another loss."""
    path, data = rewired_checkpoint(tmp_path / "c", early_exit=True, num_hidden_layers=6), random_data()
    sums = [data.batch([i]).weight.sum().item() for i in data.epoch_order(0, 0)[:8]]
    assert max(sums) > 1.2 * min(sums)
    found = {}
    for micro_batch in (8, 3, 1):
        model, rows = load_with_teacher(path), []
        work = tmp_path / f"work{micro_batch}"
        distill(config(batch_size=8, micro_batch=micro_batch, max_steps=1), model, data, work, on_step=rows.append)
        found[micro_batch] = rows[0]
    rounding = sum_error(64, 320, 8 * 32)  # hidden size, vocabulary, positions
    for micro_batch in (3, 1):
        for name in ("loss", "kl", "hidden", "early_exit_kl", "grad_norm", "agreement"):
            assert found[micro_batch][name] == pytest.approx(found[8][name], rel=rounding), name
    kl = found[8]["kl"]
    distiller = Distiller(load_with_teacher(path), FAST)
    with torch.no_grad():
        parts = [distiller(data.batch([i])) for i in data.epoch_order(0, 0)[:8]]
        mean_of_means = sum(part[0].item() / total for part, total in zip(parts, sums, strict=True)) / 8
    assert sum(part[0].item() for part in parts) / sum(sums) == pytest.approx(kl, rel=rounding)
    assert abs(mean_of_means - kl) > 1e-4 * kl
    with torch.no_grad():
        scale = distiller(data.batch(data.epoch_order(0, 0)[:8]), only_scale=True)[1].item()
    assert sum(part[1].item() for part in parts) / scale == pytest.approx(found[8]["hidden"], rel=rounding)
    assert found[8]["hidden"] > 1e-3


def test_terms_of_the_loss(tmp_path: Path) -> None:
    path = rewired_checkpoint(tmp_path / "c", early_exit=True, num_hidden_layers=6)
    losses = []
    for hidden_weight in (0.0, 2.5):
        rows = []
        settings = config(max_steps=1, hidden_weight=hidden_weight)
        distill(settings, load_with_teacher(path), random_data(), tmp_path / str(hidden_weight), on_step=rows.append)
        (row,) = rows
        assert row["loss"] == pytest.approx(
            row["kl"] + hidden_weight * row["hidden"] + row["early_exit_kl"], rel=gamma(3)
        )
        losses.append(row["loss"])
    assert losses[1] > losses[0]


def test_relative_hidden_error_does_not_depend_on_the_size_of_the_states(tmp_path: Path) -> None:
    """Embeddings, o_proj and down_proj ten times larger make the residual stream so, and the norms undo it."""
    rows = []
    for factor in (1.0, 10.0):
        model = load_with_teacher(rewired_checkpoint(tmp_path / str(factor), num_hidden_layers=6, rms_norm_eps=1e-12))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "embed_tokens" in name or "o_proj" in name or "down_proj" in name:
                    parameter.mul_(factor)
        distill(config(max_steps=1), model, random_data(), tmp_path / f"w{factor}", on_step=rows.append)
    # The error of a state is a difference of two that are each off by the model's rounding.
    rounding = 4 * model_error(model.sizes, 32) / math.sqrt(rows[0]["hidden"])
    assert rows[0]["hidden"] > 1e-3 and rows[1]["hidden"] == pytest.approx(rows[0]["hidden"], rel=rounding)


def test_divergence_falls(tmp_path: Path) -> None:
    model = load_with_teacher(rewired_checkpoint(tmp_path / "c", early_exit=True))
    rows = []
    settings = config(max_steps=30, lr=1e-2, batch_size=8, micro_batch=8, warmup=0.1)
    progress = distill(settings, model, random_data(), tmp_path / "work", on_step=rows.append)
    assert rows[-1]["kl"] < 0.5 * rows[0]["kl"] and rows[-1]["early_exit_kl"] < 0.8 * rows[0]["early_exit_kl"]
    assert rows[-1]["agreement"] > rows[0]["agreement"]
    assert progress.step == progress.total_steps == 30 and progress.tokens == 30 * 8 * 32
    with (tmp_path / "work" / "metrics.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [int(row["step"]) for row in written] == list(range(1, 31))
    assert float(written[-1]["kl"]) == pytest.approx(rows[-1]["kl"], rel=WRITTEN)


def test_bf16_is_near_fp32_and_keeps_fp32_masters(tmp_path: Path) -> None:
    path = rewired_checkpoint(tmp_path / "c", dtype=torch.bfloat16)
    losses = {}
    for dtype in ("fp32", "bf16"):
        model, rows = load_with_teacher(path, torch.bfloat16), []
        distill(config(dtype=dtype, max_steps=3), model, random_data(), tmp_path / dtype, on_step=rows.append)
        losses[dtype] = [row["loss"] for row in rows]
        kept = {tensor.dtype for name, tensor in model.state_dict().items() if "_swiftkv" not in name}
        assert kept == {torch.float32 if dtype == "fp32" else torch.bfloat16}
        assert model.model.norm_swiftkv.weight.dtype == torch.float32
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=rounded_model_error(model.sizes, torch.bfloat16))


def test_early_exit_head_is_added_from_the_final_one(tmp_path: Path) -> None:
    for tied in (False, True):
        model = load_with_teacher(rewired_checkpoint(tmp_path / str(tied), tie_word_embeddings=tied))
        add_early_exit_head(model)
        hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
        assert torch.equal(model.early_exit_logits(hidden), model.head(model.model.norm(hidden)))
        assert model.sizes.early_exit


def test_without_weight_decay_on_norms_and_with_it_on_matrices(tmp_path: Path) -> None:
    path = rewired_checkpoint(tmp_path / "c")
    ends = {}
    for decay in (0.0, 50.0):
        model = load_with_teacher(path)
        distill(config(max_steps=1, weight_decay=decay, lr=1e-3), model, random_data(), tmp_path / f"w{decay}")
        ends[decay] = model.state_dict()
    name = "model.layers.2.self_attn.k_proj_swiftkv.weight"
    start = load_with_teacher(path).state_dict()[name]
    # Adam's step is rate-sized, and each update rounds a weight; the one with decay multiplies it before.
    wanted = ends[0.0][name] - 1e-3 * 50 * start
    assert_within(ends[50.0][name], wanted, gamma(4) * (start.abs() + ends[0.0][name].abs()))
    norm = "model.norm_swiftkv.weight"
    torch.testing.assert_close(ends[50.0][norm], ends[0.0][norm], rtol=0, atol=0)


def test_schedules() -> None:
    def rates(schedule: str) -> list[float]:
        settings = config(schedule=schedule, lr=1.0, warmup=0.2)
        return [learning_rate(settings, step, 10) for step in range(10)]

    assert rates("constant") == [0.5] + 9 * [1.0]
    assert rates("linear") == pytest.approx([0.5, 1.0, *(1 - step / 8 for step in range(8))])
    assert rates("cosine") == pytest.approx([0.5, 1.0, *((1 + math.cos(math.pi * step / 8)) / 2 for step in range(8))])
    assert DistillConfig(epochs=2, batch_size=32).total_steps(100) == 7


def test_steps_run_through_epochs_without_short_batches() -> None:
    orders = {0: [2, 0, 1], 1: [1, 2, 0], 2: [0, 1, 2]}
    steps = [step_indices(lambda seed, epoch: orders[epoch], 0, 3, 2, step) for step in range(4)]
    assert steps == [[2, 0], [1, 1], [2, 0], [0, 1]]
    assert step_indices(lambda seed, epoch: orders[epoch], 0, 3, 8, 0) == [2, 0, 1, 1, 2, 0, 0, 1]
    assert [share(list(range(8)), rank, 2, 3) for rank in (0, 1)] == [[[0, 1, 2], [3]], [[4, 5, 6], [7]]]


def test_models_that_cannot_be_distilled_are_refused(tmp_path: Path) -> None:
    plain = load_with_teacher(make_checkpoint(tmp_path / "plain"))
    with pytest.raises(CheckpointError, match=r"without a cut .* kvforge rewire"):
        distill(FAST, plain, random_data(), tmp_path / "work")
    alone = SwiftKVForCausalLM(load_with_teacher(rewired_checkpoint(tmp_path / "c")).sizes)
    with pytest.raises(CheckpointError, match=r"teacher's projections.*kvforge rewire"):
        distill(FAST, alone, random_data(), tmp_path / "work")
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": "some"}, "--train 'some' is unknown; choose from partial, upper, full"),
        ({"lr": math.nan}, "--lr is nan; it must be positive"),
        ({"batch_size": 0}, "--batch-size is 0; it must be at least 1"),
        ({"temperature": 0.0}, "--temperature is 0.0; it must be positive"),
        ({"warmup": 5}, "--warmup is 5; it must be a share"),
        ({"max_steps": 0}, "--max-steps is 0"),
        ({"seed": -1}, "--seed is -1; it must be 0 or more"),
        ({"hidden_weight": -1}, "--hidden-weight is -1"),
    ],
)
def test_impossible_settings_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(KvforgeError, match=message):
        config(**changes)


def test_names_of_dtypes_agree_with_those_of_builds() -> None:
    for short, whole in (("bf16", "bfloat16"), ("fp32", "float32")):
        assert DistillConfig(dtype=short) == DistillConfig(dtype=whole) and DistillConfig(dtype=short).dtype == whole
