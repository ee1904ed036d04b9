"""``kvforge build --check-against``: how far a built engine is from its model with nothing rounded."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvforge.common.display import Display
    from kvforge.compiler import BuildOptions
    from kvforge.manifest import Manifest

PACKAGE = "package"
"""The text that comes with kvforge."""
LENGTH, NUM_DOCUMENTS = 448, 8
"""Tokens of a document, and documents at most."""


def check_comparable(checkpoint: Path, options: "BuildOptions", text: str) -> None:
    """Raise BuildError unless an engine with ``options`` runs here and loses something of its model; CheckpointError
    where the checkpoint cannot be read; KvforgeError where the text cannot, or is shorter than two documents."""
    from kvforge.checkpoint.model import open_model, read_model_config
    from kvforge.common.errors import BuildError
    from kvforge.compiler.options import resolve
    from kvforge.evaluation.documents import text_documents
    from kvforge.kv_policies import Need
    from kvforge.runtime.text.tokenizer import Tokenizer

    if options.target != "cpu":
        raise BuildError(
            f"--check-against runs engines of --target cpu, not of {options.target}; leave it out, and compare where "
            "the engine runs with kvforge eval --teacher."
        )
    opened = open_model(checkpoint)
    stored = opened.quantization.kv_cache_algo if opened.quantization is not None else None
    resolved = resolve(options, read_model_config(opened), opened.dtype("model.embed_tokens.weight"), stored)
    is_cut_down = options.kv_prediction is not None or Need.OWN_CACHE in resolved.policy.needs
    if resolved.quantized_weights is None and resolved.kv_dtype == resolved.dtype and not is_cut_down:
        raise BuildError(
            "--check-against has nothing to compare: weights and cache of this engine are not rounded; give "
            "--weight-dtype or --kv-dtype, or leave it out."
        )
    tokenizer = Tokenizer.from_dir(opened.folder)
    if tokenizer is not None:  # else the build says so
        text_documents(_path(text), tokenizer, NUM_DOCUMENTS, min(LENGTH, resolved.max_seq_len))


def compare(
    checkpoint: Path, engine: Path, manifest: "Manifest", options: "BuildOptions", text: str, display: "Display"
) -> dict[str, Any]:
    """Return what ``kvforge eval --teacher`` finds on ``text``, a file or ``PACKAGE``, where the teacher is an engine
    of the checkpoint without rounded weights, with a whole cache in the dtype of the computation.

    Raises:
        KvforgeError: the text cannot be read, or is shorter than two documents.
    """
    from kvforge.compiler import build_engine
    from kvforge.evaluation.run import EvalOptions, run_evaluation

    length = min(LENGTH, manifest.max_seq_len)
    with tempfile.TemporaryDirectory(prefix="kvforge-check-") as folder:
        display.note("building the model unrounded to compare with")
        teacher = Path(folder) / "engine"
        build_engine(checkpoint, teacher, unrounded(manifest, options))
        asked = EvalOptions(tasks=(), documents=str(_path(text)), num_documents=NUM_DOCUMENTS, length=length)
        found = run_evaluation(engine, teacher, asked, use_tqdm=display.bars).documents
    assert found is not None
    return {**found, "source": text}


def unrounded(manifest: "Manifest", options: "BuildOptions") -> "BuildOptions":
    """Return the options of the engine to compare with: also its sequences are as long, by which ``longrope`` chooses
    its factors."""
    from kvforge.compiler import BuildOptions

    return BuildOptions(
        dtype=manifest.dtype, kv_dtype=manifest.dtype, page_size=options.page_size, max_seq_len=manifest.max_seq_len,
        early_exit=False,
    )  # fmt: skip


def _path(text: str) -> Path:
    from kvforge.tokenization.calibration import CHECK_TEXT

    return CHECK_TEXT if text == PACKAGE else Path(text)


def sentence(found: dict[str, Any]) -> str:
    """Return in words what ``compare`` returns."""
    kl, agreement, text = found["kl"], found["agreement"], f"{found['num_tokens']} tokens of {found['source']}"
    return (
        f"beside the model unrounded, {text}: KL {kl['value']:.4f} nats a token ({kl['low']:.4f} to {kl['high']:.4f}), "
        f"the same most probable token before {100 * agreement['value']:.1f}%"
    )
