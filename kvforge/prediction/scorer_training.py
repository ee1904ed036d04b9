"""``kvforge predict scorer`` as a function: from a checkpoint to what scores its tokens for the KV policy kvzap."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvforge.checkpoint.model import check_weights, open_model, read_model_config
from kvforge.checkpoint.output import check_output, work_folder
from kvforge.checkpoint.scorer import MAX_UNITS, MIN_UNITS, write_scorer
from kvforge.common.errors import CheckpointError, KvforgeError
from kvforge.common.staging import staging_directory
from kvforge.distill import DistillConfig, world
from kvforge.distill.learning_schedule import step_indices
from kvforge.distill.lock import locked
from kvforge.distill.loop import Progress, Run, take_steps
from kvforge.distill.trained_parameters import fingerprint
from kvforge.kv_policies.compatibility import check
from kvforge.kv_policies.features import Asked, features_of
from kvforge.kv_policies.registry import load
from kvforge.prediction.repetition_scores import repetition_scores
from kvforge.rewire.inputs import HELD_OUT_EVERY
from kvforge.rewire.least_squares import InputSums, ResidualSums, solve
from kvforge.swiftkv import SwiftKVForCausalLM, load_model
from kvforge.tokenization.calibration import calibration_samples
from kvforge.tokenization.files import read_tokenizer
from kvforge.tokenization.token_classes import text_ids

RIDGE = 1e-6
"""Relative to the mean square of the inputs."""
LOOP = DistillConfig(
    epochs=15, batch_size=512, lr=5e-3, warmup=0.0, weight_decay=0.01, betas=(0.9, 0.999), dtype="float32", device="cpu"
)
"""Steps over tokens, as kvpress takes them."""
COLUMNS = ("step", "tokens", "seconds", "lr", "loss", "agreement", "grad_norm")

Examples = list[tuple[Tensor, Tensor]]
"""Of each owner what its K and V are made of, ``[N, hidden]`` bfloat16, and scores ``[N, kv_heads]`` float32."""


@dataclass(frozen=True)
class ScorerOptions:
    """``units`` of the hidden layer, 0 for a linear scorer, which is solved for and takes no steps; ``num_samples``
    texts of at most ``num_tokens`` tokens of ``calibration``, a text file or generated text."""

    units: int = 0
    num_samples: int = 128
    num_tokens: int = 512
    calibration: Path | None = None
    loop: DistillConfig = LOOP

    def __post_init__(self) -> None:
        if self.units and not MIN_UNITS <= self.units <= MAX_UNITS:
            raise KvforgeError(f"--hidden-units is {self.units}; give 0, or {MIN_UNITS} to {MAX_UNITS}.")
        if self.num_samples < 2 or self.num_tokens < 16:
            raise KvforgeError("--num-samples must be at least 2 and --num-tokens at least 16.")


@dataclass(frozen=True)
class ScorerSummary:
    """What was written; ``unexplained`` is, of each owner, the share of the variance of the logarithms of scores that
    the scorer misses on texts that it was not trained on."""

    output: str
    units: int
    parameters: int
    tokens: int
    unexplained: tuple[float, ...]
    steps: int = 0


class Scorer(nn.Module):
    """kvpress' KVzapModel: ``layers`` has a linear layer, or two with GELU between them, for each owner."""

    def __init__(self, num_owners: int, hidden: int, units: int, heads: int) -> None:
        super().__init__()
        sizes = (nn.Linear(hidden, units or heads) for _ in range(num_owners))
        self.layers = nn.ModuleList(
            nn.Sequential(first, nn.GELU(), nn.Linear(units, heads)) if units else first for first in sizes
        )


def train_scorer(
    checkpoint_path: str | Path,
    output: str | Path,
    options: ScorerOptions | None = None,
    *,
    work: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    scoring: Callable[[int, int], object] = lambda done, total: None,
) -> ScorerSummary:
    """Score the tokens of texts by KVzip+, train a scorer on it, and write it as kvpress would. Steps that were
    interrupted continue from ``work`` (by default ``output`` and ``.training``), where their log is. ``scoring`` is
    called with texts that are scored and that will be.

    Raises:
        KvforgeError: the checkpoint cannot be read, is quantized or does not go with kvzap, ``output`` may not be
            written, or ``work`` is another run's.
    """
    output, options = Path(output), options or ScorerOptions()
    check_output(output, [Path(checkpoint_path), options.calibration], overwrite)
    work = work_folder(work, output, [Path(checkpoint_path)])
    model, samples, request = _open(checkpoint_path, options)
    config = model.sizes
    held = set(range(HELD_OUT_EVERY - 1, len(samples), HELD_OUT_EVERY)) or {len(samples) - 1}
    found: list[list[Examples]] = [[], []]
    for index, ids in enumerate(samples):
        scoring(index, len(samples))
        found[index in held].append(repetition_scores(model, ids, request))
    trained, held_out = ([_joined(of_owner) for of_owner in zip(*each, strict=True)] for each in found)
    torch.manual_seed(options.loop.seed)
    scorer = Scorer(config.num_owners, config.hidden_size, options.units, config.num_kv_heads)
    steps = 0
    if options.units:
        data = hashlib.sha256(json.dumps([samples, request]).encode()).hexdigest()[:16]
        with world.processes("cpu"):
            if world.size() > 1:
                world.fail("kvforge predict scorer runs in one process; start it without torchrun.")
            with locked(work):
                run = _ScorerRun(options, scorer, trained, work, {"data": data, "teacher": fingerprint(model)})
                take_steps(run, work, options.loop.checkpoint_every, None, lambda row: None, progress)
        steps = run.progress.step
    else:
        for layer, (inputs, targets) in zip(scorer.layers, trained, strict=True):
            _solve(layer, inputs, targets)
    missed = tuple(_unexplained(layer, *one) for layer, one in zip(scorer.layers, held_out, strict=True))
    with staging_directory(output, replace=overwrite) as staging:
        write_scorer(staging, config, options.units, scorer.state_dict())
    parameters = sum(p.numel() for p in scorer.parameters())
    return ScorerSummary(str(output), options.units, parameters, len(trained[0][0]), missed, steps)


def _open(path: str | Path, options: ScorerOptions) -> tuple[SwiftKVForCausalLM, list[list[int]], tuple[int, ...]]:
    """Return the model, texts and what asks it to repeat them."""
    checkpoint = open_model(path)
    if checkpoint.quantization is not None:
        raise CheckpointError(f"{path} is quantized ({checkpoint.quantization}); train on the original.")
    config = read_model_config(checkpoint)
    check(features_of(Asked(config, load("kvzap"), "float32", "float32")))
    check_weights(checkpoint, config)
    length = min(options.num_tokens, (config.max_position - 64) // 2)
    samples = calibration_samples(
        checkpoint.folder, config.vocab_size, options.calibration, options.num_samples, length
    )
    probing = load("kvzip").probing
    assert probing is not None
    request = text_ids(read_tokenizer(checkpoint.folder / "tokenizer.json"), probing.texts[0], config.vocab_size)
    return load_model(checkpoint, config, torch.float32), samples, request


def _joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*parts, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def _solve(layer: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """Give a linear layer the weights of ridge regression."""
    sums = InputSums(inputs.shape[1], intercept=True)
    residuals = ResidualSums(inputs.shape[1], targets.shape[1])
    for x, y in zip(inputs.split(4096), targets.split(4096), strict=True):
        sums.add(x.double())
        residuals.add(x.double(), y.double())
    weight, bias = solve(sums, sums.factor(RIDGE), residuals)
    layer.load_state_dict({"weight": weight, "bias": bias})


@torch.no_grad()
def _unexplained(layer: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    variance = float((targets - targets.mean(0)).square().sum())
    return float((layer(inputs.float()) - targets).square().sum()) / max(variance, 1e-12)


class _ScorerRun(Run[Progress]):
    """Steps over tokens, of all owners at once; a token of any text is a row."""

    columns = COLUMNS

    def __init__(
        self, options: ScorerOptions, scorer: Scorer, examples: Examples, work: Path, identity: dict[str, object]
    ) -> None:
        self.scorer, self.examples, self.count = scorer, examples, len(examples[0][0])
        self.variance = sum(float(y.var(0, correction=0).mean()) for _, y in examples) / len(examples)
        identity = options.loop.identity() | {"units": options.units} | identity
        new = Progress(total_steps=options.loop.total_steps(self.count))
        trained = dict(scorer.named_parameters())
        super().__init__(options.loop, work, trained, identity, new, options.loop.batch_size)

    def _order(self, seed: int, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed * 10007 + epoch)
        return torch.randperm(self.count, generator=generator).tolist()

    def step(self) -> dict[str, float]:
        """See ``kvforge.distill.loop.Run``; the loss is the mean squared error, "agreement" the explained variance."""
        started, config, step = time.perf_counter(), self.config, self.progress.step
        index = torch.tensor(step_indices(self._order, config.seed, self.count, config.batch_size, step))
        losses = [
            F.mse_loss(layer(inputs[index].float()), targets[index])
            for layer, (inputs, targets) in zip(self.scorer.layers, self.examples, strict=True)
        ]
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(list(self.trained.values()), config.clip_norm)
        row = {"loss": loss.item(), "agreement": 1 - loss.item() / max(self.variance, 1e-12), "grad_norm": float(norm)}
        return self.finish_step(row, started)
