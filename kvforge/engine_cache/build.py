"""From a checkpoint or its name to an engine: the one of the cache, or a new one that is kept there."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvforge.checkpoint.model import open_model, open_with_mtp
from kvforge.checkpoint.mtp_head import MTP
from kvforge.checkpoint.reader import open_directory
from kvforge.checkpoint.scorer import FOLDER
from kvforge.checkpoint.text_part import what_is_left_out
from kvforge.common.checkpoint_files import gguf_name
from kvforge.common.display import Display
from kvforge.common.errors import BuildError, EngineError, first_line
from kvforge.common.file_lock import hold, locked
from kvforge.common.staging import staging_directory
from kvforge.compiler import BuildOptions, build_engine
from kvforge.compiler.build import stages
from kvforge.compiler.calibration import text_hash
from kvforge.compiler.progress import BuildProgress
from kvforge.engine_cache.key import content_of, engine_key
from kvforge.engine_cache.store import ENGINE, ENTRY, Entry, cache_folder, save_entry
from kvforge.hub import HubName, find_checkpoint, parse_name
from kvforge.kv_policies import Need, parse
from kvforge.manifest import load_manifest
from kvforge.version import __version__


@dataclass(frozen=True)
class CachedEngine:
    """An engine directory in the cache. It is not removed as long as this process has not called ``release``.

    ``name`` is what to call the model: the repository on the Hub, or the checkpoint's folder or file."""

    path: Path
    key: str
    name: str
    release: Callable[[], None]


def cached_engine(
    checkpoint: str | Path,
    options: BuildOptions | None = None,
    *,
    revision: str | None = None,
    on_hub: HubName | None = None,
    display: Display | None = None,
    folder: Path | None = None,
) -> CachedEngine:
    """Return the engine of ``checkpoint``, a directory, a GGUF file or a name of the Hub, from the cache in ``folder``,
    built first if it is not there. ``on_hub`` is the name of one whose snapshot ``checkpoint`` is. Of several processes
    that ask at once one builds, and the others wait for it.

    Raises:
        CheckpointError, BuildError: as ``find_checkpoint`` and ``build_engine`` do, or the cache cannot be written.
            The cache is as before then, also after an interrupt.
    """
    options, display, folder = options or BuildOptions(), display or Display(), folder or cache_folder()
    on_hub = on_hub or parse_name(checkpoint, revision)
    path = find_checkpoint(checkpoint, revision, show_progress=display.bars)
    source = str(on_hub) if on_hub is not None else str(path.resolve())
    if (sentence := what_is_left_out(path, options.draft_head == MTP)) is not None:
        display.note(sentence)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        content = content_of(open_model(path), folder)
        key = engine_key(
            content,
            options,
            None if options.kv_prediction is None else content_of(open_model(options.kv_prediction), folder),
            text_hash(options),
            _content_of_draft_head(path, options, folder),
            _content_of_scorer(path, options, folder),
        )
        with locked(folder / f"{key}.lock", lambda: display.note(f"another process builds an engine of {source}")):
            if not _is_whole(folder / key, display):
                given = {k: v for k, v in dataclasses.asdict(options).items() if v != getattr(BuildOptions(), k)}
                entry = Entry(key, source, given, content, __version__, time.time())
                _build(path, options, entry, folder / key, display)
            return _use(folder / key, on_hub.repository if on_hub is not None else _name_of(path))
    except OSError as error:
        raise BuildError(
            f"The cache of engines in {folder} cannot be used ({error.strerror or first_line(error)}); set "
            "KVFORGE_ENGINE_CACHE to a writable directory."
        ) from error


def _name_of(path: Path) -> str:
    """What to call the model in a directory, or in a GGUF file."""
    path = path.resolve()
    return gguf_name(path) if path.is_file() else path.name


def _content_of_draft_head(checkpoint: Path, options: BuildOptions, folder: Path) -> str | None:
    """That of the checkpoint's own module with it: the model alone may be in other files."""
    if options.draft_head is None:
        return None
    is_own = options.draft_head == MTP
    return content_of(open_with_mtp(checkpoint) if is_own else open_directory(Path(options.draft_head)), folder)


def _content_of_scorer(checkpoint: Path, options: BuildOptions, folder: Path) -> str | None:
    """That of the checkpoint's own scorer, where the KV policy has one."""
    scorer = checkpoint / FOLDER
    is_used = Need.TOKEN_SCORES in parse(options.kv_policy).needs and scorer.is_dir()
    return content_of(open_directory(scorer), folder) if is_used else None


def _is_whole(directory: Path, display: Display) -> bool:
    if not directory.exists():
        return False
    try:
        load_manifest(directory / ENGINE)
    except EngineError as error:
        display.note(f"the engine in the cache is built anew: {first_line(error)}")
        return False
    return (directory / ENTRY).is_file()


def _build(checkpoint: Path, options: BuildOptions, entry: Entry, directory: Path, display: Display) -> None:
    display.note(f"building an engine of {entry.source}, once; kvforge cache list shows it as {entry.key}")
    with (
        staging_directory(directory, replace=True) as staging,
        BuildProgress(display, stages(options)) as shown,
    ):
        build_engine(checkpoint, staging / ENGINE, options, progress=shown.stage, converted=shown.converted)
        save_entry(entry, staging)
    display.note(f"built in {time.time() - entry.built:.0f} s")


def _use(directory: Path, name: str) -> CachedEngine:
    """Note the time, and keep the engine from being removed."""
    with contextlib.suppress(OSError):  # a cache that this user may only read
        os.utime(directory / ENTRY)
    descriptor = hold(directory / ENTRY)
    held = [] if descriptor is None else [descriptor]

    def release() -> None:
        while held:
            os.close(held.pop())

    return CachedEngine(directory / ENGINE, directory.name, name, release)
