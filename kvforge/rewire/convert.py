"""Writes a SwiftKV checkpoint made from a plain one."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvforge.calibration import calibration_samples
from kvforge.checkpoint.safetensors_writer import TensorSpec
from kvforge.checkpoint.sharded_writer import write_sharded
from kvforge.compiler.engine_dir import staging_directory
from kvforge.errors import KvforgeError
from kvforge.rewire.cut_search import Candidate, choose_cut, measure_cuts
from kvforge.rewire.initialise import New, new_tensors
from kvforge.rewire.inputs import LayerInputs, record_inputs
from kvforge.rewire.options import RewireOptions
from kvforge.rewire.plot import check_plot, plot_similarity
from kvforge.rewire.ridge import OwnerFit, fit_owners
from kvforge.rewire.similarity import input_similarity
from kvforge.rewire.source import Source, open_source
from model_defs import ModelConfig

ARCHITECTURES = {
    "llama": "LlamaSwiftKVForCausalLM",
    "mistral": "MistralSwiftKVForCausalLM",
    "qwen2": "Qwen2SwiftKVForCausalLM",
    "qwen3": "Qwen3SwiftKVForCausalLM",
}
_WEIGHT_FILES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")

Progress = Callable[[str, int, int], object]


@dataclasses.dataclass(frozen=True)
class RewireSummary:
    """What was written. ``weight_bytes`` are those of all tensors, ``new_parameters`` counts what SwiftKV added;
    ``owners`` is empty unless the projections were fitted, ``candidates`` unless the cut was chosen."""

    output: str
    model_type: str
    num_layers: int
    cut: int
    group_size: int
    init: str
    early_exit: bool
    with_teacher: bool
    weight_bytes: int
    new_parameters: int
    num_tokens: int
    owners: tuple[OwnerFit, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    similarity: tuple[tuple[float, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class _Measured:
    cut: int
    num_tokens: int = 0
    inputs: LayerInputs | None = None
    candidates: tuple[Candidate, ...] = ()
    similarity: Tensor | None = None


def rewire_checkpoint(
    source_path: str | Path,
    output: str | Path,
    options: RewireOptions,
    *,
    calibration: str | Path | None = None,
    plot: str | Path | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> RewireSummary:
    """Write the SwiftKV checkpoint of a Llama, Mistral or Qwen one to ``output``, whole or not at all.

    One tensor is in memory at a time, with calibration one layer or what :func:`fit_owners` says. Calibration, on the
    text file ``calibration`` or on generated text, runs where the cut is to be chosen, ``init`` is ridge, or ``plot``
    names a file for the similarity of the layers' inputs.

    Raises:
        CheckpointError: the source cannot be read, is quantized, a SwiftKV one already, or incomplete.
        KvforgeError: ``output`` is not empty, the cut is outside the model, no cut is within the quality budget, the
            calibration text is unusable, or the disk is full.
    """
    output, source = Path(output), open_source(source_path)
    _check(output, source, options)
    if plot is not None:
        check_plot(Path(plot))
    samples = []
    if options.cut is None or options.init == "ridge" or plot is not None:
        count = min(options.num_tokens, source.config.max_position)
        text = None if calibration is None else Path(calibration)
        samples = calibration_samples(
            source.checkpoint.path, source.config.vocab_size, text, options.num_samples, count
        )
        if len(samples) < 2:
            raise KvforgeError(
                f"{calibration} has one sample of {count} tokens and two are needed; give a longer text."
            )
    with staging_directory(output) as staging:
        work = staging / ".calibration"
        work.mkdir()
        device = "cuda" if samples and torch.cuda.is_available() else "cpu"
        measured = _measure(source, options, samples, work, plot is not None, device, progress)
        config = dataclasses.replace(
            source.config, cut=measured.cut, group_size=options.group_size, early_exit=options.early_exit
        )
        fits: list[OwnerFit] = []
        fitted: dict[str, Callable[[], Tensor]] = {}
        if options.init == "ridge" and measured.inputs is not None:
            fits, fitted = fit_owners(source, config, measured.inputs, options.ridge, device, progress)
        new = new_tensors(source, config, options.init, fitted)
        weight_bytes = _write_weights(source, config, new, options, staging, progress)
        _write_config(source, config, staging)
        shutil.rmtree(work)
        _copy_files(source.checkpoint.path, staging)
        if plot is not None and measured.similarity is not None:
            plot_similarity(measured.similarity, config.cut, source.checkpoint.path.name, Path(plot))
    similarity = () if measured.similarity is None else tuple(tuple(row) for row in measured.similarity.tolist())
    return RewireSummary(
        output=str(output),
        model_type=f"{config.model_type}_swiftkv",
        num_layers=config.num_layers,
        cut=config.cut,
        group_size=config.group_size,
        init=options.init,
        early_exit=options.early_exit,
        with_teacher=not options.drop_teacher,
        weight_bytes=weight_bytes,
        new_parameters=sum(torch.Size(spec.shape).numel() for spec, _ in new.values()),
        num_tokens=measured.num_tokens,
        owners=tuple(fits),
        candidates=measured.candidates,
        similarity=similarity,
    )


def _check(output: Path, source: Source, options: RewireOptions) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise KvforgeError(f"{output} exists and is not an empty directory; choose another one or remove it.")
    layers = source.config.num_layers
    if layers < 2:
        raise KvforgeError(f"{source.checkpoint.path} has one layer, and a cut needs two.")
    if options.cut is not None and not 1 <= options.cut < layers:
        raise KvforgeError(f"--cut-layer is {options.cut}; a model of {layers} layers can be cut at 1 to {layers - 1}.")


def _measure(
    source: Source,
    options: RewireOptions,
    samples: list[list[int]],
    work: Path,
    plot: bool,
    device: str,
    progress: Progress,
) -> _Measured:
    """Run the calibration that is needed, and settle the cut."""
    if not samples:
        assert options.cut is not None
        return _Measured(options.cut)
    num_tokens = sum(len(ids) for ids in samples)
    every_layer = options.cut is None or plot
    first = 0 if every_layer or options.cut is None else options.cut
    inputs = record_inputs(source, samples, work, first, device, progress)
    similarity = input_similarity(inputs, source.config.num_layers) if every_layer else None
    if options.cut is not None or similarity is None:
        return _Measured(options.cut or 0, num_tokens, inputs, (), similarity)
    candidates = measure_cuts(source, inputs, similarity, options.ridge, device, progress)
    cut = choose_cut(candidates, options.quality_budget)
    return _Measured(cut, num_tokens, inputs, tuple(candidates), similarity)


def _write_weights(
    source: Source, config: ModelConfig, new: New, options: RewireOptions, directory: Path, progress: Progress
) -> int:
    dropped = _teacher_only(source, config) if options.drop_teacher else set()
    specs = [spec for name, spec in source.specs.items() if name not in dropped] + [spec for spec, _ in new.values()]
    done = 0

    def produce(spec: TensorSpec) -> Tensor:
        nonlocal done
        progress("writing", done, len(specs))
        done += 1
        return new[spec.name][1]() if spec.name in new else source.checkpoint.read_raw(spec.name)

    size = write_sharded(directory, specs, produce, options.max_shard_bytes)
    progress("writing", done, len(specs))
    return size


def _teacher_only(source: Source, config: ModelConfig) -> set[str]:
    """Return the names that the student has no use for: q, k and v as the layers above the cut had them."""
    parts = ("q_proj.", "k_proj.", "v_proj.", "q_norm.", "k_norm.")
    prefixes = tuple(
        f"model.layers.{layer}.self_attn.{part}" for layer in range(config.cut, config.num_layers) for part in parts
    )
    return {name for name in source.specs if name.startswith(prefixes)}


def _write_config(source: Source, config: ModelConfig, directory: Path) -> None:
    hf: dict[str, Any] = dict(source.checkpoint.hf_config)
    hf |= {
        "architectures": [ARCHITECTURES[config.model_type]],
        "model_type": f"{config.model_type}_swiftkv",
        "swiftkv": True,
        "num_key_value_layers": config.cut,
        "key_value_group_size": config.group_size,
    }
    if config.early_exit:
        hf["early_exit"] = True
    (directory / "config.json").write_text(json.dumps(hf, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _copy_files(source: Path, directory: Path) -> None:
    """Copy what is neither weights nor config.json: tokenizer, generation settings, templates, licence."""
    for file in sorted(source.iterdir()):
        skip = file.name == "config.json" or file.name.startswith(".") or file.name.endswith(_WEIGHT_FILES)
        if file.is_file() and not skip:
            shutil.copyfile(file, directory / file.name)
