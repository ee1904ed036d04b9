"""The build: checkpoint in, engine directory out."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer

import plugins
from kvforge import __version__
from kvforge.checkpoint import Checkpoint, open_checkpoint
from kvforge.checkpoint.reader import TOKENIZER_FILES
from kvforge.compiler.aot_inductor import compile_package
from kvforge.compiler.convert import check_weights, convert_weights
from kvforge.compiler.engine_dir import check_output, staging_directory
from kvforge.compiler.export import export_lower, export_upper
from kvforge.compiler.options import DTYPES, BuildOptions, ResolvedOptions, resolve
from kvforge.compiler.toolchain import check_compiler
from kvforge.compiler.verify import verify
from kvforge.engine import (
    LOWER_FILE,
    OPERATORS_FILE,
    RANK_DIR,
    SCHEMA_VERSION,
    TOKENIZER_DIR,
    UPPER_FILE,
    WEIGHTS_FILE,
    Manifest,
    save_manifest,
    sha256_of,
)
from kvforge.errors import BuildError, CheckpointError
from kvforge.hardware import cpu_isa
from model_defs import ModelConfig, ModelError, load_config
from plugins.build import build_library

Progress = Callable[[str], object]
STAGES = ("weights", "operators", "export lower", "compile lower", "export upper", "compile upper", "manifest")


def build_engine(
    checkpoint_path: str | Path,
    output: str | Path,
    options: BuildOptions | None = None,
    *,
    overwrite: bool = False,
    progress: Progress = lambda stage: None,
) -> Manifest:
    """Build an engine for this machine from a Hugging Face-format checkpoint.

    ``progress`` is called with each of ``STAGES`` as it begins. ``output`` appears whole or not at all.

    Raises:
        CheckpointError: the checkpoint is not readable, incomplete or of an unsupported model.
        BuildError: impossible options, ``output`` exists, no C++ compiler, or code generation failed.
    """
    output = Path(output)
    check_output(output, overwrite)
    checkpoint = open_checkpoint(checkpoint_path)
    try:
        config = load_config(checkpoint.hf_config, checkpoint.generation_config)
    except ModelError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None
    check_weights(checkpoint, config)
    _check_tokenizer(checkpoint)
    resolved = resolve(options or BuildOptions(), config, checkpoint.dtype("model.embed_tokens.weight"))
    check_compiler()
    with staging_directory(output) as staging:
        (staging / RANK_DIR).mkdir()
        progress("weights")
        num_parameters = convert_weights(checkpoint, config, DTYPES[resolved.dtype], staging / WEIGHTS_FILE)
        _copy_tokenizer(checkpoint, staging / TOKENIZER_DIR)
        progress("operators")
        try:
            build_library(staging / OPERATORS_FILE)
        except plugins.PluginError as error:
            raise BuildError(str(error)) from error
        for name, export, file in (("lower", export_lower, LOWER_FILE), ("upper", export_upper, UPPER_FILE)):
            progress(f"export {name}")
            graph = export(config, resolved)
            verify(graph, config, resolved)
            progress(f"compile {name}")
            compile_package(graph.program, staging / file)
        progress("manifest")
        manifest = _manifest(checkpoint, config, resolved, num_parameters, staging)
        save_manifest(manifest, staging)
    return manifest


def _check_tokenizer(checkpoint: Checkpoint) -> None:
    path = checkpoint.path / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{checkpoint.path} has no tokenizer.json; save the tokenizer in fast (Rust) format there."
        )
    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"{path} is not a readable tokenizer ({error}); save it again.") from None


def _copy_tokenizer(checkpoint: Checkpoint, target: Path) -> None:
    target.mkdir()
    for name in TOKENIZER_FILES:
        if (checkpoint.path / name).is_file():
            shutil.copyfile(checkpoint.path / name, target / name)


def _manifest(
    checkpoint: Checkpoint, config: ModelConfig, options: ResolvedOptions, num_parameters: int, staging: Path
) -> Manifest:
    files = sorted(path for path in staging.rglob("*") if path.is_file())
    return Manifest(
        schema_version=SCHEMA_VERSION,
        kvforge_version=__version__,
        target=options.target,
        isa=cpu_isa(),
        torch_version=torch.__version__,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        model_type=config.model_type,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_position=config.max_position,
        layer_windows=config.layer_windows,
        cut=config.cut,
        owner_of_layer=config.owner_of_layer,
        page_size=options.page_size,
        max_num_seqs=options.max_num_seqs,
        max_num_tokens=options.max_num_tokens,
        max_seq_len=options.max_seq_len,
        bos_token_id=config.bos_token_id,
        eos_token_ids=config.eos_token_ids,
        num_parameters=num_parameters,
        checkpoint_sha256=checkpoint.sha256(),
        operators={operator.name: operator.version for operator in plugins.OPERATORS.values()},
        files={str(path.relative_to(staging)): sha256_of(path) for path in files},
    )
