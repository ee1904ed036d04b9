"""Checkpoints and engines that benchmarks run on, built once under a work directory."""

import contextlib
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from kvforge.common.errors import EngineError, KvforgeError
from kvforge.compiler import BuildOptions, build_engine
from kvforge.manifest import TOKENIZER_DIR, load_manifest
from kvforge.runtime.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "model_defs" / "assets"
TEACHER_DIR, STUDENT_DIR = ASSETS / "tiny-teacher", ASSETS / "tiny-swiftkv"
WORKLOADS = ROOT / "perf" / "workloads.json"
WORK = Path(tempfile.gettempdir()) / "kvforge-bench"


def is_loadable(engine: Path) -> bool:
    """An engine is there, and this version reads it; one that an older version left is to be built again."""
    try:
        load_manifest(engine)
    except EngineError:
        return False
    return True


def cached_engine(
    engine: Path, checkpoint: Path | Callable[[], Path], options: BuildOptions, is_current: bool = True
) -> Path:
    """Return ``engine``, built from ``checkpoint`` (or what it makes) if it cannot be loaded or is not current."""
    if not is_current or not is_loadable(engine):
        engine.parent.mkdir(parents=True, exist_ok=True)
        print(f"building {engine} ...", file=sys.stderr, flush=True)
        with quiet_build():
            build_engine(checkpoint() if callable(checkpoint) else checkpoint, engine, options, overwrite=True)
    return engine


@contextlib.contextmanager
def quiet_build() -> Iterator[None]:
    """Leave out what torch says of itself while it exports and compiles."""
    logger = logging.getLogger("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        logger.setLevel(logging.ERROR)
        yield


def tokenizer_of(engine: Path) -> Tokenizer:
    """Raises KvforgeError when the engine has none."""
    tokenizer = Tokenizer.from_dir(engine / TOKENIZER_DIR)
    if tokenizer is None:
        raise KvforgeError(f"{engine} has no tokenizer.json, which prompts as text need; build it from a checkpoint.")
    return tokenizer
