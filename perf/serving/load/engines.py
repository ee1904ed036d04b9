"""The engines that load is put on, built once under a work directory: the demo's tiny pair and the 213M model."""

from pathlib import Path

from kvforge.compiler import BuildOptions
from kvforge.demo.run import STUDENT, TEACHER, DemoModel
from perf.engine.variants import VARIANTS, prepare
from perf.harness.engines import ASSETS, cached_engine

TINY = {"teacher": TEACHER, "SwiftKV": STUDENT}
VARIANTS_213M = {name: VARIANTS[name] for name in ("no cut", "cut 8")}
MAX_SEQ_LEN_213M = 2112

OPTIONS = BuildOptions(dtype="float32", kv_dtype="float32", max_num_seqs=64, max_num_tokens=2048)
"""float32, so that every answer must equal the offline one whatever the batches were."""


def tiny_engine(work: Path, model: DemoModel = TEACHER) -> Path:
    """The engine of one of the demo's models under ``work``."""
    return cached_engine(work / model.folder, ASSETS / model.folder, OPTIONS)


def engine_213m(work: Path, variant: str) -> Path:
    """The benchmark engine of ``variant`` under ``work``, as perf.engine.variants builds it (one or two minutes)."""
    return prepare(work, variant, *VARIANTS_213M[variant], MAX_SEQ_LEN_213M)
