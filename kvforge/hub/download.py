"""Downloads of what kvforge reads of a repository, and nothing besides."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvforge.common.checkpoint_files import CONFIG, QUANTIZATION, TOKENIZER_FILES, WEIGHTS, WEIGHTS_INDEX
from kvforge.common.errors import CheckpointError, first_line
from kvforge.common.relative_names import is_inside
from kvforge.hub.names import HubName, parse_name


def find_checkpoint(checkpoint: str | Path, revision: str | None = None, *, show_progress: bool = True) -> Path:
    """Return the directory of a checkpoint: the path itself, or, for OWNER/NAME or OWNER/NAME@REVISION of the Hub,
    its snapshot in huggingface_hub's cache, with the files that are missing there downloaded.

    A path that exists is never looked up. Environment variables and tokens are huggingface_hub's own. Bars are shown
    on a terminal if ``show_progress``.

    Raises:
        CheckpointError: no such repository or revision, no access to it, no network and not in the cache, no space for
            it, or no checkpoint with safetensors weights. What was downloaded whole stays in the cache.
    """
    name = parse_name(checkpoint, revision)
    if name is None:
        return Path(checkpoint)
    from kvforge.hub.failures import explained

    with explained(name), _bars(show_progress and sys.stderr.isatty()):
        folder = _snapshot(name, (CONFIG, QUANTIZATION, *TOKENIZER_FILES, WEIGHTS_INDEX))
        _check(folder, [CONFIG], f"{name} on the Hub has no {CONFIG}; give a repository in Hugging Face's format.")
        weights = _weights(name, folder)
        commit = HubName(name.repository, folder.name)  # what the index says, whatever is pushed meanwhile
        _snapshot(commit, weights)
        _check(folder, weights, f"{name} on the Hub has no safetensors weights, or not all; choose one that has.")
    return folder


def find_config(name: HubName) -> Path:
    """Return ``config.json`` of a repository, downloaded if it is not in the cache. Raises as :func:`find_checkpoint`
    does."""
    from kvforge.hub.failures import explained

    with explained(name), _bars(False):
        folder = _snapshot(name, (CONFIG,))  # without a network it ends at once, where a single file is tried again
        _check(folder, [CONFIG], f"{name} on the Hub has no {CONFIG}; give a repository in Hugging Face's format.")
    return folder / CONFIG


def _snapshot(name: HubName, files: Sequence[str]) -> Path:
    """Return the folder of a snapshot, with those of ``files`` in it that the repository has."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name.repository, revision=name.revision, allow_patterns=list(files)))


def _check(folder: Path, files: Sequence[str], otherwise: str) -> None:
    """Raise unless all of ``files`` are in a snapshot: without a network, older releases of huggingface_hub return one
    that lacks some."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    if not all((folder / file).is_file() for file in files):
        raise LocalEntryNotFoundError(otherwise) if constants.HF_HUB_OFFLINE else CheckpointError(otherwise)


def _weights(name: HubName, folder: Path) -> list[str]:
    """Return the files that hold the weights: those of the index, or the one that has none."""
    if not (folder / WEIGHTS_INDEX).is_file():
        return [WEIGHTS]
    try:
        files = sorted(set(json.loads((folder / WEIGHTS_INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        if not files or not all(is_inside(file) and file.endswith(".safetensors") for file in files):
            raise ValueError("it names files that hold no weights")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{WEIGHTS_INDEX} of {name} has no weight_map to safetensors files ({first_line(error)}); choose another "
            "revision."
        ) from None
    return files


@contextlib.contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """Within the block huggingface_hub shows its bars only if ``shown``."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
