"""``kvforge predict train`` as a function: from a base and an auxiliary checkpoint to a predictor's checkpoint."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvforge.checkpoint.copy_files import copy_files
from kvforge.checkpoint.model import check_has_no_states
from kvforge.checkpoint.output import check_output, work_folder
from kvforge.checkpoint.predictor import prediction_fields
from kvforge.checkpoint.safetensors_writer import TensorSpec
from kvforge.checkpoint.sharded_writer import write_sharded
from kvforge.common.dtypes import COMPUTE_DTYPES
from kvforge.common.errors import CheckpointError, KvforgeError
from kvforge.common.staging import staging_directory
from kvforge.distill.data import DataReport, load_data
from kvforge.distill.export import MAX_SHARD_BYTES
from kvforge.distill.packing import DataSettings
from kvforge.prediction.config import PredictConfig
from kvforge.prediction.load import load_base
from kvforge.prediction.predictor import KVPredictor
from kvforge.prediction.ridge import MapFit, Progress, fit_maps
from kvforge.prediction.train import train
from kvforge.rewire.source import PlainCheckpoint, open_source
from kvforge.tokenization.calibration import calibration_samples
from model_defs import ModelError
from model_defs.prediction import MAPS, Prediction, check_runs, spread_layers


@dataclass(frozen=True)
class FitOptions:
    """The start of the maps: ``ridge`` is the regulariser relative to the mean square of the inputs; ``num_samples``
    sequences of at most ``num_tokens`` tokens of ``calibration``, a text file or generated text."""

    ridge: float = 1e-3
    num_samples: int = 64
    num_tokens: int = 512
    calibration: Path | None = None

    def __post_init__(self) -> None:
        if not 1e-12 <= self.ridge < float("inf"):
            raise KvforgeError(f"--ridge is {self.ridge:g}; give a number of at least 1e-12.")
        if self.num_samples < 2 or self.num_tokens < 16:
            raise KvforgeError("--num-samples must be at least 2 and --num-tokens at least 16.")


@dataclass(frozen=True)
class PredictSummary:
    """What was written: the checkpoint ``output``; ``fits`` are the maps' before training. ``steps`` is 0 without
    training, and ``metrics`` the last line of the log."""

    output: str
    layers: tuple[int, ...]
    parameters: int
    fits: tuple[MapFit, ...]
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    data: DataReport | None = None


def train_predictor(
    base_path: str | Path,
    auxiliary_path: str | Path,
    output: str | Path,
    data: str | Path | None,
    config: PredictConfig,
    settings: DataSettings | None = None,
    fit: FitOptions | None = None,
    *,
    layers: tuple[int, ...] | None = None,
    work: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    fitting: Progress = lambda stage, done, total: None,
) -> PredictSummary:
    """Fit the maps of a predictor, train it on ``data`` (see ``load_data``; None trains nothing), and write it.

    A run that was interrupted continues from ``work`` (by default ``output`` and ``.training``), which is left there
    with the log; ``overwrite`` replaces a checkpoint at ``output``, never a run. ``layers`` names the auxiliary layer
    that each owner reads, by default the one at the same depth.

    Raises:
        CheckpointError: a checkpoint cannot be read, is quantized, has a cut, or the two have other tokenizers.
        KvforgeError: ``output`` may not be written (``check_output``), ``work`` is in it or is a checkpoint, the data
            is unusable, or see ``fit_maps`` and ``train``.
    """
    output, fit = Path(output), fit or FitOptions()
    checkpoints = [Path(base_path), Path(auxiliary_path)]
    check_output(output, [*checkpoints, fit.calibration, None if data is None else Path(data)], overwrite)
    work = work_folder(work, output, checkpoints)
    base, auxiliary = open_source(base_path), open_source(auxiliary_path)
    for source in (base, auxiliary):
        check_has_no_states(source.checkpoint)
    prediction = _prediction(base, auxiliary, layers)
    _check_tokenizers(base, auxiliary)
    length = min(fit.num_tokens, base.config.max_position, auxiliary.config.max_position)
    samples = calibration_samples(
        base.checkpoint.folder, base.config.vocab_size, fit.calibration, fit.num_samples, length
    )
    packed, report = None, None
    if data is not None:
        settings = settings or DataSettings(config.loop.length)
        length = min(settings.length, base.config.max_position, auxiliary.config.max_position)
        settings = dataclasses.replace(settings, length=length)
        config = dataclasses.replace(config, loop=dataclasses.replace(config.loop, length=length))
        packed, report = load_data(data, base.checkpoint.folder, base.config.vocab_size, settings, progress)
    with staging_directory(output, replace=overwrite) as staging:
        folder = staging / ".calibration"
        folder.mkdir()
        fits, maps = fit_maps(base, auxiliary, prediction, samples, fit.ridge, folder, fitting)
        for file in sorted(folder.rglob("*"), reverse=True):
            file.rmdir()
        folder.rmdir()
        predictor = new_predictor(auxiliary, prediction, maps)
        summary = PredictSummary(
            str(output), prediction.layers, sum(p.numel() for p in predictor.parameters()), tuple(fits), data=report
        )
        if packed is not None:
            dtype = COMPUTE_DTYPES[config.loop.dtype]
            state = train(
                config, load_base(base, dtype), predictor, packed, work, fit=_digest(fit, samples), progress=progress
            )
            summary = dataclasses.replace(
                summary, steps=state.step, tokens=state.tokens, seconds=state.seconds, metrics=state.metrics
            )
        _write(auxiliary, prediction, predictor.state_dict(), staging)
    return summary


def _digest(fit: FitOptions, samples: Sequence[Sequence[int]]) -> str:
    """Return a hash of what the maps are fitted to, and how."""
    return hashlib.sha256(json.dumps([fit.ridge, [list(sample) for sample in samples]]).encode()).hexdigest()[:16]


def new_predictor(auxiliary: PlainCheckpoint, prediction: Prediction, maps: Mapping[str, Tensor]) -> KVPredictor:
    """Return a predictor of an auxiliary model's weights and these maps, in float32."""
    with torch.device("meta"):
        predictor = KVPredictor(prediction)
    weights = {
        name: maps[name].clone()  # no inference tensor: it is trained
        if name.startswith(f"{MAPS}.")
        else auxiliary.checkpoint.read(name, tuple(tensor.shape), torch.float32)
        for name, tensor in predictor.state_dict().items()
    }
    predictor.load_state_dict(weights, assign=True)
    return predictor


def _prediction(base: PlainCheckpoint, auxiliary: PlainCheckpoint, layers: tuple[int, ...] | None) -> Prediction:
    layers = layers or spread_layers(len(base.config.owners), auxiliary.config.num_layers)
    try:
        prediction = Prediction(auxiliary.config, base.config, layers)
        check_runs(prediction)
        return prediction
    except ModelError as error:
        raise CheckpointError(f"{auxiliary.checkpoint.path}: {error}") from None


def _check_tokenizers(base: PlainCheckpoint, auxiliary: PlainCheckpoint) -> None:
    """Raise CheckpointError where the two models' tokens of one number are not the same text, added ones included."""
    vocabularies = []
    for source in (base, auxiliary):
        file = source.checkpoint.folder / "tokenizer.json"
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            added = sorted((token["id"], token["content"]) for token in content.get("added_tokens") or ())
            vocabularies.append((content["model"]["vocab"], added))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file} cannot be read ({type(error).__name__}); put the tokenizer there.") from None
    if vocabularies[0] != vocabularies[1]:
        raise CheckpointError(
            f"{auxiliary.checkpoint.path} has another tokenizer than {base.checkpoint.path}; choose an auxiliary model "
            "of the same vocabulary."
        )


def _write(auxiliary: PlainCheckpoint, prediction: Prediction, weights: Mapping[str, Tensor], directory: Path) -> None:
    """Write the predictor's checkpoint; maps in the dtype of the auxiliary model's embedding."""
    embedding = auxiliary.specs["model.embed_tokens.weight"].dtype
    specs = [
        TensorSpec(name, tuple(tensor.shape), auxiliary.specs[name].dtype if name in auxiliary.specs else embedding)
        for name, tensor in weights.items()
    ]
    write_sharded(directory, specs, lambda spec: weights[spec.name].detach().cpu().to(spec.dtype), MAX_SHARD_BYTES)
    hf_config = dict(auxiliary.checkpoint.hf_config) | {MAPS: prediction_fields(prediction)}
    (directory / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n", encoding="utf-8")
    copy_files(auxiliary.checkpoint.folder, directory)
