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


def check_is_rounded(checkpoint: Path, options: "BuildOptions") -> None:
    """Raise BuildError unless an engine with ``options`` runs here and loses something of its model; CheckpointError
    where the checkpoint cannot be read."""
    from kvforge.checkpoint.model import open_model, read_model_config
    from kvforge.common.errors import BuildError
    from kvforge.compiler.options import resolve

    if options.target != "cpu":
        raise BuildError(
            f"--check-against runs engines of --target cpu, not of {options.target}; leave it out, and compare where "
            "the engine runs with kvforge eval --teacher."
        )
    opened = open_model(checkpoint)
    stored = opened.quantization.kv_cache_algo if opened.quantization is not None else None
    resolved = resolve(options, read_model_config(opened), opened.dtype("model.embed_tokens.weight"), stored)
    is_cut_down = options.kv_prediction is not None or resolved.policy.name != "full"
    if resolved.quantized_weights is None and resolved.kv_dtype == resolved.dtype and not is_cut_down:
        raise BuildError(
            "--check-against has nothing to compare: weights and cache of this engine are not rounded; give "
            "--weight-dtype or --kv-dtype, or leave it out."
        )


def compare(
    checkpoint: Path, engine: Path, manifest: "Manifest", options: "BuildOptions", text: str, display: "Display"
) -> dict[str, Any]:
    """Return what ``kvforge eval --teacher`` finds on ``text``, a file or ``PACKAGE``, where the teacher is an engine
    of the checkpoint without rounded weights, with a whole cache in the dtype of the computation.

    Raises:
        KvforgeError: the text cannot be read, or is shorter than two documents.
    """
    from kvforge.compiler import BuildOptions, build_engine
    from kvforge.evaluation.run import EvalOptions, run_evaluation
    from kvforge.tokenization.calibration import CHECK_TEXT

    length = min(LENGTH, manifest.max_seq_len)
    source = str(CHECK_TEXT) if text == PACKAGE else text
    exact = BuildOptions(
        dtype=manifest.dtype, kv_dtype=manifest.dtype, page_size=options.page_size, max_seq_len=length,
        early_exit=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="kvforge-check-") as folder:
        display.note("building the model unrounded to compare with")
        teacher = Path(folder) / "engine"
        build_engine(checkpoint, teacher, exact)
        asked = EvalOptions(tasks=(), documents=source, num_documents=NUM_DOCUMENTS, length=length)
        found = run_evaluation(engine, teacher, asked, use_tqdm=display.bars).documents
    assert found is not None
    return {**found, "source": text}


def sentence(found: dict[str, Any]) -> str:
    """Return in words what ``compare`` returns."""
    kl, agreement, text = found["kl"], found["agreement"], f"{found['num_tokens']} tokens of {found['source']}"
    return (
        f"beside the model unrounded, {text}: KL {kl['value']:.4f} nats a token ({kl['low']:.4f} to {kl['high']:.4f}), "
        f"the same most probable token before {100 * agreement['value']:.1f}%"
    )
