"""The build: checkpoint in, engine directory out."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import plugins
from kvforge.checkpoint import Checkpoint
from kvforge.checkpoint.draft_head import open_draft_head
from kvforge.checkpoint.kv_scales import kv_scales
from kvforge.checkpoint.model import check_weights, int4_dtype, open_model, read_model_config
from kvforge.checkpoint.mtp_head import carrier_of, open_mtp_head
from kvforge.checkpoint.predictor import open_predictor
from kvforge.checkpoint.scorer import FOLDER, open_scorer
from kvforge.common.collector import without_collector
from kvforge.common.errors import BuildError
from kvforge.common.number_formats import INT4_WEIGHTS, keeping_int4
from kvforge.common.staging import staging_directory
from kvforge.compiler.calibration import calibration_of, check_calibration, may_calibrate
from kvforge.compiler.checkpoint_texts import check_texts
from kvforge.compiler.convert import basis_of, convert_weights
from kvforge.compiler.manifest_fields import copy_tokenizer, manifest_of
from kvforge.compiler.options import BuildOptions, ResolvedOptions, check_prediction, resolve
from kvforge.compiler.targets import HOSTED, Progress, load_hosted, load_target
from kvforge.compiler.weights_process import WeightsProcess, weights_process
from kvforge.kv_policies import KVPolicy, Need
from kvforge.manifest import RANK_DIR, TOKENIZER_DIR, WEIGHTS_FILE, Manifest, graph_names, save_manifest
from kvforge.manifest.engine_dir import check_output
from model_defs import ModelConfig
from model_defs.draft_head import DraftHead
from model_defs.prediction import Prediction
from model_defs.weights import weight_specs

MIN_APART = 10**8
"""Parameters of a model whose weights take longer to write than the start of a process that does it beside."""

REST = "rest of weights"
"""The stage in which a build waits for that process."""


def build_engine(
    checkpoint_path: str | Path,
    output: str | Path,
    options: BuildOptions | None = None,
    *,
    overwrite: bool = False,
    progress: Progress = lambda stage: None,
    converted: Callable[[int, int], object] = lambda done, total: None,
) -> Manifest:
    """Build an engine from a Hugging Face-format checkpoint.

    ``progress`` is called with each of :func:`stages` as it begins, ``converted`` with the bytes of the weights that
    are written and that will be. ``output`` appears whole or not at all.

    Raises:
        CheckpointError: the checkpoint is not readable, incomplete or of an unsupported model.
        BuildError: impossible options, ``output`` exists, a tool that the
            target needs is missing, or code generation failed.
    """
    output, options = Path(output), options or BuildOptions()
    check_output(output, overwrite)
    check_calibration(options)
    if options.target in HOSTED:
        return load_hosted(options.target).write_engine(Path(checkpoint_path), output, options, overwrite, progress)
    with without_collector():
        target = load_target(options.target)
    progress("read")
    checkpoint = open_model(checkpoint_path)
    config = read_model_config(checkpoint)
    if not options.early_exit:
        config = dataclasses.replace(config, early_exit=False)
    check_weights(checkpoint, config)
    resolved, predictor = _resolve(options, config, checkpoint), None
    config = config.for_length(resolved.max_seq_len)
    scorer, config = find_scorer(options, resolved, config, checkpoint)
    if options.kv_prediction is not None:
        predictor = open_prediction(options.kv_prediction, config, resolved)
        resolved = dataclasses.replace(resolved, prediction=predictor[1])
    draft = None
    if options.draft_head is not None:
        draft = open_draft(options.draft_head, checkpoint, config, resolved)
        resolved = dataclasses.replace(resolved, draft_head=draft[1])
    check_texts(checkpoint, config.vocab_size)
    calibration = calibration_of(options, resolved, config, checkpoint)
    own_fields = tokens_of_policy(checkpoint.folder / "tokenizer.json", config.vocab_size, resolved.policy)
    target.check_toolchain(resolved)
    with staging_directory(output, replace=overwrite) as staging:
        (staging / RANK_DIR).mkdir()
        rounded = None
        if calibration is not None:
            if options.weight_bits is not None:
                progress("choose")
            resolved = calibration.mix(checkpoint, config, resolved, options.weight_bits, converted)
            progress("round")
            rounded = calibration.round(checkpoint, config, resolved, converted)
            own_fields["calibration"] = calibration.name
        progress("weights")
        how = {
            "dtype": resolved.torch_dtype,
            "path": staging / WEIGHTS_FILE,
            "packed_dtype": resolved.packed_dtype,
            "num_positions": num_positions(resolved),
            "int8_layers": resolved.int8_layers,
        }
        with contextlib.ExitStack() as running:
            stage, apart, checkpoint_sha256 = progress, None, None
            if target.BESIDE_WEIGHTS and _is_apart(config, rounded, predictor, draft, scorer):
                apart = running.enter_context(weights_process(checkpoint_path, config=config, **how))
                stage = _checking(apart, progress)
            else:
                written = convert_weights(
                    checkpoint,
                    config,
                    progress=converted,
                    predictor=predictor,
                    rounded=rounded,
                    draft=draft,
                    scorer=scorer,
                    **how,
                )
            copy_tokenizer(checkpoint, staging / TOKENIZER_DIR)
            with without_collector():
                own_fields |= target.write_graphs(config, resolved, staging, stage) or {}
            if apart is not None:
                progress(REST)
                written, checkpoint_sha256 = apart.wait(converted)
        progress("manifest")
        manifest = manifest_of(
            checkpoint.sha256() if checkpoint_sha256 is None else checkpoint_sha256,
            config,
            resolved,
            staging,
            isa=target.isa(),
            torch_version=torch.__version__,
            known={staging / WEIGHTS_FILE: written.sha256},
            num_parameters=written.num_parameters,
            weights_file_bytes=(staging / WEIGHTS_FILE).stat().st_size,
            operators={operator.name: operator.version for operator in plugins.OPERATORS.values()},
            **own_fields,
        )
        save_manifest(manifest, staging)
    return manifest


def _is_apart(config: ModelConfig, *more: object) -> bool:
    """Whether the weights of a model, with what ``convert_weights`` takes ``more``, are written in a process of their
    own: one reads a checkpoint by its path, and begins in some seconds."""
    is_large = sum(weight.num_parameters for weight in weight_specs(config)) >= MIN_APART
    return is_large and torch.get_num_threads() > 1 and all(one is None for one in more)


def _checking(apart: WeightsProcess, progress: Progress) -> Progress:
    """Return ``progress``, which raises an error of the process that writes the weights when the next stage begins."""

    def stage(name: str) -> None:
        apart.check()
        progress(name)

    return stage


def open_prediction(path: str | Path, config: ModelConfig, options: ResolvedOptions) -> tuple[Checkpoint, Prediction]:
    """Return a predictor's checkpoint and how it predicts the cache of the model ``config``.

    Raises:
        CheckpointError: it cannot be read, or is for another model.
        BuildError: an engine with ``options`` cannot have one.
    """
    checkpoint, prediction = open_predictor(path, config)
    check_prediction(options, prediction)
    auxiliary = prediction.auxiliary.for_length(options.max_seq_len)
    return checkpoint, dataclasses.replace(prediction, auxiliary=auxiliary)


def open_draft(
    path: str | Path, checkpoint: Checkpoint, config: ModelConfig, options: ResolvedOptions
) -> tuple[Checkpoint, DraftHead]:
    """Return the checkpoint of a draft head, or of the module (``carrier_of``), for the model ``config`` of
    ``checkpoint``, and the head as an engine with ``options`` has it: with an embedding and an LM head of its own where
    the engine's are in another basis.

    Raises:
        CheckpointError: it cannot be read, or is for another model.
    """
    carrier = carrier_of(path, checkpoint)
    if carrier is None:
        own, head = open_draft_head(path, checkpoint, config)
    else:
        own, head = open_mtp_head(carrier, checkpoint, config)
    is_changed = basis_of(checkpoint, config, options.packed_dtype) is not None
    return own, dataclasses.replace(
        head,
        model=head.model.for_length(options.max_seq_len),
        own_embedding=head.own_embedding or is_changed,
        own_lm_head=head.own_lm_head or is_changed,
        is_turned=carrier is not None and is_changed,
    )


def find_scorer(
    options: BuildOptions, resolved: ResolvedOptions, config: ModelConfig, checkpoint: Checkpoint
) -> tuple[Checkpoint | None, ModelConfig]:
    """Return the scorer that the KV policy asks for, and the model with it; None and the model where it asks for none.

    Raises:
        CheckpointError: it cannot be read, or is for another model.
        BuildError: there is none, or the policy takes none.
    """
    policy, given = resolved.policy, options.kv_scorer
    if Need.TOKEN_SCORES not in policy.needs:
        if given is not None:
            raise BuildError(f"--kv-policy {policy.name} has no scorer; leave --kv-scorer out, or choose kvzap.")
        return None, config
    path = Path(given) if given is not None else checkpoint.folder / FOLDER
    if given is None and not path.is_dir():
        raise BuildError(
            f"--kv-policy {policy.name} needs a scorer, and {checkpoint.path} has none in {FOLDER}/; give one by "
            "--kv-scorer, or train one with kvforge predict scorer."
        )
    return open_scorer(path, config)


def num_positions(options: ResolvedOptions) -> int:
    """Return how many positions the engine's table of cos and sin has: 0 where its KV policy needs none."""
    insertion = options.policy.insertion.layer_insertion()
    return options.max_seq_len if insertion is not None and insertion.needs_positions else 0


def tokens_of_policy(tokenizer_file: Path, vocab_size: int, policy: KVPolicy) -> dict[str, Any]:
    """Return the manifest's fields of tokens that the policy asks for: ``special_tokens`` and ``punctuation_tokens``,
    ``policy_texts``, or none.

    Raises:
        CheckpointError: there is no tokenizer, or a damaged one.
    """
    # Here: compiling graphs alone (perf/gpu) needs no tokenizers.
    from kvforge.tokenization.files import read_tokenizer
    from kvforge.tokenization.token_classes import punctuation_ids, special_ids, text_ids

    tokenizer = read_tokenizer(tokenizer_file)
    fields: dict[str, Any] = {}
    if policy.keeping.reads_tokens:
        fields["special_tokens"] = special_ids(tokenizer, vocab_size)
        fields["punctuation_tokens"] = punctuation_ids(tokenizer, vocab_size)
    if policy.probing is not None:
        fields["policy_texts"] = tuple(text_ids(tokenizer, text, vocab_size) for text in policy.probing.texts)
    return fields


def stages(options: BuildOptions) -> tuple[str, ...]:
    """Return the stages that a build with ``options`` can have, in order; a checkpoint without an early exit skips
    those of that graph, one whose weights are not calibrated "choose" and "round", and one of a small model REST.
    Raises BuildError for an unknown target."""
    if options.target in HOSTED:
        return ("read", *load_hosted(options.target).stages(), "manifest")
    optional = options.kv_prediction is not None, options.draft_head is not None
    graphs = graph_names(options.max_draft_len, options.early_exit, *optional)
    rounding = ("round",) if may_calibrate(options) else ()
    if options.weight_bits is not None:
        rounding = ("choose", *rounding)
    target = load_target(options.target)
    rest = (REST,) if target.BESIDE_WEIGHTS else ()
    return ("read", *rounding, "weights", *target.stages(graphs), *rest, "manifest")


def _resolve(options: BuildOptions, config: ModelConfig, checkpoint: Checkpoint) -> ResolvedOptions:
    """Return the resolved options, with the checkpoint's scales where the cache is static."""
    quantization = checkpoint.quantization
    algorithm = quantization.kv_cache_algo if quantization is not None else None
    resolved = resolve(options, config, checkpoint.dtype("model.embed_tokens.weight"), algorithm)
    if resolved.quantized_weights in INT4_WEIGHTS:
        chosen = keeping_int4(resolved.quantized_weights, int4_dtype(checkpoint, config))
        resolved = dataclasses.replace(resolved, quantized_weights=chosen)
    if not resolved.has_static_scales:
        return resolved
    return dataclasses.replace(resolved, kv_scales=kv_scales(checkpoint, config, resolved.kv_dtype))
