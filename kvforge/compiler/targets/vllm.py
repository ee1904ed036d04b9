"""Target ``vllm``: nothing is compiled; the engine says which checkpoint vLLM runs, with which interpreter, and how."""

import dataclasses
import math
import platform
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open

from kvforge.checkpoint import Checkpoint, open_checkpoint
from kvforge.checkpoint.head import TIED
from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.common.checkpoint_files import is_gguf
from kvforge.common.errors import BuildError, KvforgeError
from kvforge.common.number_formats import automatic_dtype
from kvforge.common.staging import staging_directory
from kvforge.compiler.checkpoint_texts import check_texts
from kvforge.compiler.hosted_model import general_model
from kvforge.compiler.manifest_fields import copy_tokenizer, manifest_of
from kvforge.compiler.options import BuildOptions, ResolvedOptions, check_limits, compute_dtype, longest_sequence
from kvforge.compiler.targets import Progress
from kvforge.kv_policies import Need
from kvforge.kv_policies.features import VLLM, all_features
from kvforge.manifest import TOKENIZER_DIR, Manifest, save_manifest
from kvforge.vllm_engine.environment import find_interpreter
from kvforge.vllm_engine.settings import CHECKPOINT_DIR, VllmSettings, parse_arguments, save_settings
from kvforge.vllm_models.coverage import check_cut
from model_defs import ModelConfig, family_of


def isa() -> tuple[str, ...]:
    """Return the architecture: vLLM brings its own code."""
    return (platform.machine(),)


def stages() -> tuple[str, ...]:
    """Return what ``write_engine`` calls ``progress`` with, between reading and the manifest."""
    return ("checkpoint",)


def write_engine(
    checkpoint_path: Path, output: Path, options: BuildOptions, overwrite: bool, progress: Progress
) -> Manifest:
    """Write an engine for the checkpoint at ``checkpoint_path``; it appears whole or not at all.

    Raises:
        CheckpointError: the checkpoint is not readable.
        BuildError: an option is for other targets, vLLM does not run the model's cut, the model does not go with the
            ranks, or there is no vLLM.
    """
    check_own_options(options)
    check_limits(options)
    arguments = parse_arguments(options.engine_args)
    progress("read")
    if is_gguf(checkpoint_path):
        raise BuildError(
            f"{checkpoint_path} is a GGUF file, which target vllm is not given; build it for another target, or give a "
            "directory with config.json and *.safetensors."
        )
    checkpoint = open_checkpoint(checkpoint_path)
    model = None if family_of(checkpoint.hf_config) is None else open_model(checkpoint_path)
    config = None if model is None else read_model_config(model)
    if config is not None:
        check_cut_kind(config)
    has_cut = config is not None and config.is_swiftkv
    if config is not None and has_cut:
        try:
            check_cut(config, checkpoint.quantization is not None)
        except ValueError as error:
            raise BuildError(str(error)) from None
    hosted = _model(checkpoint, config)
    resolved = _resolved(checkpoint, hosted, options)
    check_texts(checkpoint, hosted.vocab_size)
    _check_ranks(hosted, has_cut, options)
    try:
        interpreter = find_interpreter(options.engine_python)
    except KvforgeError as error:
        raise BuildError(str(error)) from None
    with staging_directory(output, replace=overwrite) as staging:
        progress("checkpoint")
        files = {str(file.relative_to(checkpoint.path)): file.stat().st_size for file in checkpoint.files()}
        if options.copy_checkpoint:
            (staging / CHECKPOINT_DIR).mkdir()
            for name in files:
                (staging / CHECKPOINT_DIR / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(checkpoint.path / name, staging / CHECKPOINT_DIR / name)
        settings = VllmSettings(
            python=interpreter.python,
            vllm_version=interpreter.vllm,
            checkpoint=CHECKPOINT_DIR if options.copy_checkpoint else str(checkpoint.path.resolve()),
            tensor_parallel_size=options.tensor_parallel_size,
            pipeline_parallel_size=options.pipeline_parallel_size,
            has_cut=has_cut,
            config=_config_overrides(checkpoint, model, has_cut),
            arguments=arguments,
            checkpoint_bytes=files,
        )
        save_settings(settings, staging)
        copy_tokenizer(checkpoint, staging / TOKENIZER_DIR)
        progress("manifest")
        manifest = manifest_of(
            checkpoint.sha256(),
            hosted,
            resolved,
            staging,
            CHECKPOINT_DIR,
            isa=isa(),
            torch_version=interpreter.torch,
            num_parameters=_num_parameters(checkpoint),
            weights_file_bytes=0,
            operators={},
        )
        save_manifest(manifest, staging)
    return manifest


def check_cut_kind(config: ModelConfig) -> None:
    """Raise BuildError for a blind cut."""
    if config.is_blind:
        raise BuildError("Target vllm does not run blind cuts; build with --target cpu.")


def check_own_options(options: BuildOptions) -> None:
    """Raise BuildError for an option whose feature target vllm does not go with."""
    reason, remedy = VLLM.limits[Need.OWN_ENGINE].reason, VLLM.remedy
    for feature in all_features():
        name = feature.option
        is_given = bool(name) and getattr(options, name) != getattr(BuildOptions, name)
        if Need.OWN_ENGINE in feature.needs and is_given:
            flag = f"--{name.replace('_', '-')}"
            raise BuildError(f"{flag} is for {Need.OWN_ENGINE.value}, but with target vllm {reason}; {remedy}.")


def _model(checkpoint: Checkpoint, config: ModelConfig | None) -> ModelConfig:
    """The model as vLLM runs it, of a family of ``model_defs`` or of any other (None): without an early exit."""
    if config is None:
        return general_model(checkpoint.path, checkpoint.hf_config, checkpoint.generation_config)
    return dataclasses.replace(config, early_exit=False)


def _resolved(checkpoint: Checkpoint, model: ModelConfig, options: BuildOptions) -> ResolvedOptions:
    """The options as the manifest has them."""
    dtype = compute_dtype(options, automatic_dtype(checkpoint.dtype(min(checkpoint.file_of_tensor))))
    return ResolvedOptions(
        target="vllm",
        dtype=dtype,
        kv_dtype=dtype,
        max_num_seqs=options.max_num_seqs,
        max_num_tokens=options.max_num_tokens,
        max_seq_len=longest_sequence(options, model.max_position),
        page_size=options.page_size,
        decoupled_mode=options.decoupled_mode,
    )


def _config_overrides(checkpoint: Checkpoint, model: Checkpoint | None, has_cut: bool) -> dict[str, Any]:
    """What vLLM reads in the place of fields of config.json: the class by which it knows the model, where config.json
    names none, or the one without the cut; and whether the head is tied, where the tensors of ``model``, the checkpoint
    as kvforge reads it, say otherwise."""
    family = family_of(checkpoint.hf_config)
    if family is None or model is None:
        return {}
    wanted = family.swiftkv_architecture if has_cut else family.architecture
    named = checkpoint.hf_config.get("architectures")
    overrides: dict[str, Any] = {}
    if not (named == [wanted] or (named and not has_cut)):
        overrides["architectures"] = [wanted]
    if (is_tied := model.hf_config.get(TIED)) != checkpoint.hf_config.get(TIED):
        overrides[TIED] = is_tied
    return overrides


def _check_ranks(model: ModelConfig, has_cut: bool, options: BuildOptions) -> None:
    size = options.tensor_parallel_size
    if model.num_heads % size:
        raise BuildError(
            f"--tensor-parallel-size {size} does not divide the {model.num_heads} heads of this model; give another."
        )
    if has_cut and model.num_kv_heads % size:
        raise BuildError(
            f"--tensor-parallel-size {size} does not divide the {model.num_kv_heads} KV heads of this model, which "
            "its cut needs; give another."
        )
    if has_cut and options.pipeline_parallel_size > 1:
        raise BuildError(
            "--pipeline-parallel-size above 1 is not there for models with a cut, whose state every later rank would "
            "need; give --tensor-parallel-size."
        )


def _num_parameters(checkpoint: Checkpoint) -> int:
    """Numbers in all tensors of the checkpoint, by the heads of its files."""
    total = 0
    for file in set(checkpoint.file_of_tensor.values()):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                total += math.prod(tensors.get_slice(name).get_shape())
    return total
