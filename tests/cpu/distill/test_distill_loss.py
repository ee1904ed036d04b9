"""The loss by hand, and that no way of cutting a batch into pieces changes it."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from kvforge.distill import distill
from kvforge.distill.config import DistillConfig
from kvforge.distill.data import pack_samples
from kvforge.distill.distiller import SUMS, Distiller
from kvforge.distill.loss import divergence, hidden_error, logit_sums
from kvforge.distill.packing import Batch, DataSettings
from kvforge.distill.samples import Sample
from model_defs.reference import reference_logits
from tests.support.models.checkpoints import load_weights, make_checkpoint
from tests.support.models.distillation import load_with_teacher, random_data, rewired_checkpoint
from tests.support.rounding import logprob_error, model_error, sum_error

HIDDEN, VOCAB = 64, 320
"""What `make_checkpoint` makes: terms of a logit and of a softmax."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rewired_checkpoint(tmp_path_factory.mktemp("loss") / "c", early_exit=True, num_hidden_layers=6)


SIX_DIGITS = 1e-6
"""Half a unit of a number written with six digits, and as much for fp32's rounding of numbers up to 2."""


def test_divergence_by_hand() -> None:
    """T = 2. Teacher logits (2 ln 3, 0): probabilities (3/4, 1/4); student (0, 0): (1/2, 1/2).

    4 * (3/4 ln(3/2) + 1/4 ln(1/2)) = 4 * (0.304099 - 0.173287) = 0.523248.
    """
    value = divergence(torch.zeros(1, 2), torch.tensor([[2 * math.log(3), 0.0]]), temperature=2.0)
    assert value.item() == pytest.approx(0.523248, abs=SIX_DIGITS)


def test_sums_by_hand() -> None:
    """Three positions, one-dimensional states h with logits (2 h, 0), so that at T = 2 the odds are e^h.

    Position 0, weight 2: teacher h = ln 3, student 0: KL 0.523248 as above. The student's logits tie, of which argmax
    takes the first, as the teacher does: they agree.
    Position 1, weight 1: teacher 0, student ln 3: 4 * (1/2 ln((1/2)/(3/4)) + 1/2 ln((1/2)/(1/4)))
    = 2 * (ln 2/3 + ln 2) = 2 ln 4/3 = 0.575364; they agree.
    Position 2, weight 3: teacher ln 3, student -ln 3: 4 * (3/4 ln 3 + 1/4 ln 1/3) = 2 ln 3 = 2.197225; they do not.
    KL: 2 * 0.523248 + 0.575364 + 3 * 2.197225 = 8.213535; agreement 2 + 1 = 3.
    Early exit from states (ln 3, ln 3, ln 3): (0, 0.575364, 0) -> 0.575364.
    """

    def head(h: torch.Tensor) -> torch.Tensor:
        return torch.cat((2 * h, torch.zeros_like(h)), -1)

    ln3 = math.log(3)
    student, teacher = torch.tensor([[0.0], [ln3], [-ln3]]), torch.tensor([[ln3], [0.0], [ln3]])
    early, weight = torch.full((3, 1), ln3), torch.tensor([2.0, 1.0, 3.0])
    sums = logit_sums(student, teacher, early, weight, head, head, head, temperature=2.0, vocab_size=2)
    assert [x.item() for x in sums] == pytest.approx([8.213535, 0.575364, 3.0], abs=2 * SIX_DIGITS)


def test_hidden_error_by_hand() -> None:
    """Errors (3, 4) and (1, 1) of two dimensions: mean squares 12.5 and 1; weights 2 and 5: 25 + 5 = 30."""
    student = torch.tensor([[3.0, 4.0], [2.0, 0.0]])
    teacher = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    assert hidden_error(student, teacher, torch.tensor([2.0, 5.0])).item() == 30.0


def gradients(checkpoint: Path, batch: Batch, max_logits: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = load_with_teacher(checkpoint)
    sums = Distiller(model, DistillConfig(dtype="fp32", train="upper"), max_logits)(batch)
    sums[:3].sum().backward()
    return sums.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("positions", [1, 7, 64])
def test_chunks_of_logits_do_not_change_loss_or_gradients(checkpoint: Path, positions: int) -> None:
    batch = random_data().batch([0, 1, 2])
    assert (batch.weight > 0).sum() > 32
    whole, expected = gradients(checkpoint, batch, 1 << 25)
    chunked, found = gradients(checkpoint, batch, positions * 320 + 5)
    assert (whole > 0.1).all()  # every term takes part
    rounding = sum_error(HIDDEN, VOCAB, int((batch.weight > 0).sum()))
    torch.testing.assert_close(chunked, whole, rtol=rounding, atol=0)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        atol = rounding * float(gradient.abs().max())  # terms of either sign: the result may be far smaller than they
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=atol, msg=name)


def test_logits_of_a_large_vocabulary_are_never_whole() -> None:
    vocab, rows = 50_000, []
    weight_of_head = torch.randn(vocab, 4, generator=torch.Generator().manual_seed(0))

    def head(h: torch.Tensor) -> torch.Tensor:
        rows.append(len(h))
        return h @ weight_of_head.T

    student, teacher = torch.randn(2, 23, 4, generator=torch.Generator().manual_seed(1))
    student.requires_grad_()
    kl, _, _ = logit_sums(student, teacher, None, torch.ones(23), head, head, head, 2.0, vocab, 6 * vocab)
    kl.backward()
    assert max(rows) == 6 and sum(rows) == 4 * 23  # teacher and student, forward and backward
    assert student.grad is not None and (student.grad.abs().sum(-1) > 0).all()


def test_packing_equals_padding(checkpoint: Path) -> None:
    """Samples that share sequences have the sums that each has alone in a padded one."""
    generator = np.random.default_rng(1)
    samples = []
    for size in (5, 30, 9, 17, 3, 22, 31, 8):
        weights = (generator.uniform(size=size) < 0.6) * generator.uniform(0.5, 2, size)
        weights[-1] = 1.0
        samples.append(Sample(generator.integers(3, 320, size).astype(np.int32), weights.astype(np.float32)))
    packed, _ = pack_samples(samples, DataSettings(48))
    assert packed.num_sequences < len(samples)
    distiller = Distiller(load_with_teacher(checkpoint), DistillConfig(dtype="fp32"))
    with torch.no_grad():
        together = distiller(packed.batch(range(packed.num_sequences)))
        padded = torch.zeros(len(SUMS))
        for sample in samples:
            data, _ = pack_samples([sample], DataSettings(48))
            padded += distiller(data.batch([0]))
    positions = sum(len(sample.ids) for sample in samples)
    torch.testing.assert_close(together, padded, rtol=sum_error(HIDDEN, VOCAB, positions), atol=0)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_kl_of_a_step_is_that_of_independent_models(tmp_path: Path, family: str) -> None:
    """Teacher by transformers, student by the plain reference, each sample alone; with sliding windows, samples that
    fill a sequence, are split, have one token, weights of zero, or a weight on their first token only."""
    windows = {"sliding_window": 6} | (
        {"use_sliding_window": True, "max_window_layers": 3} if family == "qwen3" else {"tie_word_embeddings": True}
    )
    plain = make_checkpoint(tmp_path / "plain", family, **windows)
    rewired = rewired_checkpoint(tmp_path / "rewired", family, **windows)
    generator = np.random.default_rng(3)
    samples = []
    for size in (1, 2, 16, 16, 40, 7, 33):
        weights = generator.uniform(0.2, 2, size) * (generator.random(size) < 0.6)
        samples.append(Sample(generator.integers(3, 320, size).astype(np.int32), weights.astype(np.float32)))
    for first, second in ((9, 0), (0, 0)):
        samples.append(Sample(np.array([5, 6], np.int32), np.array([first, second], np.float32)))
    model, weights = load_with_teacher(rewired), load_weights(rewired)
    hf = transformers.AutoModelForCausalLM.from_pretrained(plain).eval()
    divergences = total = 0.0
    for ids, target in (
        (s.ids[at : at + 16], s.weights[at : at + 16]) for s in samples for at in range(0, len(s.ids), 16)
    ):
        tokens = torch.from_numpy(ids.astype(np.int64))
        with torch.no_grad():
            logits = hf(tokens[None]).logits[0], reference_logits(model.sizes, weights, tokens)
        teacher, student = (torch.log_softmax(x.double() / 2, -1) for x in logits)
        kl = 4 * (teacher.exp() * (teacher - student)).sum(-1)
        divergences += sum(float(kl[at]) * float(target[at + 1]) for at in range(len(ids) - 1))
        total += float(target[1:].sum())
    data, _ = pack_samples(samples, DataSettings(16))
    rows: list = []
    config = DistillConfig(
        dtype="fp32", device="cpu", max_steps=1, batch_size=data.num_sequences, micro_batch=2, length=16
    )
    distill(config, model, data, tmp_path / "work", on_step=rows.append)
    # A divergence is a mean of log-ratios, which move with the logits of both models.
    largest = max(float(x.abs().max()) for x in logits)
    off = 4 * 2 * logprob_error(model.sizes.vocab_size, largest / 2, model_error(model.sizes, 16))
    assert rows[0]["kl"] == pytest.approx(divergences / total, abs=off) and rows[0]["kl"] > max(0.05, 20 * off)


def test_only_positions_with_a_weight_count(checkpoint: Path) -> None:
    """The last prompt position predicts the first answer token and counts; the last answer token does not."""
    ids = np.arange(10, 20, dtype=np.int32)
    data, _ = pack_samples([Sample(ids, (np.arange(10) >= 6).astype(np.float32))], DataSettings(16))
    assert data.batch([0]).weight[0].nonzero().flatten().tolist() == [5, 6, 7, 8]
    model = load_with_teacher(checkpoint)
    changed = model.model.embed_tokens.weight.detach().clone()
    distiller = Distiller(model, DistillConfig(dtype="fp32"))
    with torch.no_grad():
        before = distiller(data.batch([0]))
        changed[19] += 1  # the last answer token's state is seen by no position that counts
        model.model.embed_tokens.weight.copy_(changed)
        torch.testing.assert_close(distiller(data.batch([0])), before, rtol=0, atol=0)
        changed[15] += 1  # the last prompt token's is
        model.model.embed_tokens.weight.copy_(changed)
        assert (distiller(data.batch([0])) - before).abs().max() > 1e-3


def test_a_batch_without_weights_gives_zeros_and_gradients(checkpoint: Path) -> None:
    batch = random_data().batch([0])
    model = load_with_teacher(checkpoint)
    sums = Distiller(model, DistillConfig(dtype="fp32"))(Batch(batch.input_ids, batch.segments, batch.weight * 0))
    sums[:3].sum().backward()
    assert sums.tolist() == [0, 0, 0, 0]
    assert model.model.norm_swiftkv.weight.grad.abs().sum() == 0
