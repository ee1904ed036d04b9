"""The engines that load is put on, built once under a work directory: the demo's tiny pair and the 213M model."""

import contextlib
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from kvforge.compiler import BuildOptions, build_engine
from kvforge.demo.run import STUDENT, TEACHER, DemoModel
from kvforge.engine import TOKENIZER_DIR
from kvforge.errors import KvforgeError
from kvforge.runtime.tokenizer import Tokenizer
from perf.engine.variants import is_loadable, prepare

WORK = Path(tempfile.gettempdir()) / "kvforge-bench"
ASSETS = Path(__file__).resolve().parents[3] / "model_defs" / "assets"
TINY = {"teacher": TEACHER, "SwiftKV": STUDENT}
VARIANTS_213M: dict[str, tuple[int | None, int]] = {"no cut": (None, 1), "cut 8": (8, 1)}
MAX_SEQ_LEN_213M = 2112

OPTIONS = BuildOptions(dtype="float32", kv_dtype="float32", max_num_seqs=64, max_num_tokens=2048)
"""float32, so that every answer must equal the offline one whatever the batches were."""


def tiny_engine(work: Path, model: DemoModel = TEACHER) -> Path:
    """The engine of one of the demo's models under ``work``."""
    engine = work / model.folder
    if not is_loadable(engine):
        work.mkdir(parents=True, exist_ok=True)
        print(f"building {engine} ...", file=sys.stderr, flush=True)
        with _quiet():
            build_engine(ASSETS / model.folder, engine, OPTIONS, overwrite=True)
    return engine


def engine_213m(work: Path, variant: str) -> Path:
    """The benchmark engine of ``variant`` under ``work``, as perf.engine.variants builds it (one or two minutes)."""
    with _quiet():
        return prepare(work, variant, *VARIANTS_213M[variant], MAX_SEQ_LEN_213M)


def tokenizer_of(engine: Path) -> Tokenizer:
    """Raises KvforgeError when the engine has none."""
    tokenizer = Tokenizer.from_dir(engine / TOKENIZER_DIR)
    if tokenizer is None:
        raise KvforgeError(f"{engine} has no tokenizer.json, which prompts as text need; build it from a checkpoint.")
    return tokenizer


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        logging.getLogger("torch").setLevel(logging.ERROR)
        yield
