"""What is compared: this project's engines of one model, and what else runs that model on a CPU."""

import hashlib
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvforge.common.errors import KvforgeError
from kvforge.compiler import BuildOptions
from kvforge.manifest import load_manifest
from perf.harness.engines import ROOT, cached_engine, is_loadable
from perf.harness.random_checkpoint import LLAMA_213M, cached_checkpoint
from perf.peers.prepare import LLAMA_FILE, LLAMA_Q4, prepare_peer


@dataclass(frozen=True)
class Variant:
    """An engine of the 16-layer model: ``cut`` (None: none), AcrossKV group size, dtypes of weights and cache."""

    cut: int | None = None
    group_size: int = 1
    weight_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"


NO_CUT, CUT, CUT_4WAY = "no cut", "cut 8", "cut 8, 4-way"
NO_CUT_INT8, CUT_4WAY_INT8 = f"{NO_CUT}, int8", f"{CUT_4WAY}, int8"
NO_CUT_INT4, CUT_4WAY_INT4 = f"{NO_CUT}, int4", f"{CUT_4WAY}, int4"
TRANSFORMERS, OPENVINO, OPENVINO_INT8 = "transformers", "OpenVINO GenAI", "OpenVINO GenAI, int8"
OPENVINO_INT4, LLAMA_CPP, VLLM, PACE = "OpenVINO GenAI, int4", "llama.cpp, Q4_0", "vLLM", "PACE"
LLAMA_CPP_FILE = "llama.cpp, the file"

VARIANTS = {
    NO_CUT: Variant(), CUT: Variant(8), CUT_4WAY: Variant(8, 4), NO_CUT_INT8: Variant(weight_dtype="int8"),
    f"{CUT}, int8": Variant(8, weight_dtype="int8"), CUT_4WAY_INT8: Variant(8, 4, weight_dtype="int8"),
}  # fmt: skip
INT4_VARIANTS = {
    NO_CUT_INT4: Variant(weight_dtype="int4"),
    CUT_4WAY_INT4: Variant(8, 4, weight_dtype="int4"),
}
NO_CUT_INT4_KV, CUT_4WAY_INT4_KV = f"{NO_CUT}, int4 KV", f"{CUT_4WAY}, int4 KV"
KV_VARIANTS = {
    NO_CUT_INT4_KV: Variant(kv_dtype="int4"),
    f"{CUT_4WAY}, fp8 KV": Variant(8, 4, kv_dtype="fp8"),
    f"{CUT_4WAY}, int8 KV": Variant(8, 4, kv_dtype="int8"),
    CUT_4WAY_INT4_KV: Variant(8, 4, kv_dtype="int4"),
}
PEERS = {
    TRANSFORMERS: ("transformers_worker", "transformers"), OPENVINO: ("openvino_worker", "openvino"),
    OPENVINO_INT8: ("openvino_worker", "openvino-int8"), OPENVINO_INT4: ("openvino_worker", "openvino-int4"),
    LLAMA_CPP: ("llama_worker", LLAMA_Q4), LLAMA_CPP_FILE: ("llama_worker", LLAMA_FILE),
    VLLM: ("vllm_worker", "transformers"), PACE: ("pace_worker", "transformers"),
}  # fmt: skip
"""Name to the worker's module and the name of its model in ``prepare_peer``."""

SAME_WORK = {
    OPENVINO_INT8: NO_CUT_INT8,
    **dict.fromkeys((OPENVINO_INT4, LLAMA_CPP, LLAMA_CPP_FILE), NO_CUT_INT4),
}
"""Peer to the engine that computes what it computes, where that is not ``NO_CUT``."""

EVERY_VARIANT = VARIANTS | INT4_VARIANTS | KV_VARIANTS
KV_WORKLOADS = ("prompt_heavy", "chat")
"""Where the dtypes of the cache are compared."""


WORK = Path(tempfile.gettempdir()) / "kvforge-peers"

SOURCES = ("model_defs", "plugins", "kvforge/compiler")
"""What engines are made of."""


def sources_digest() -> str:
    """Return a digest of the sources that decide what an engine does."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def checkpoint_of(work: Path, variant: Variant, given: Path | None = None) -> Path:
    """The checkpoint that is ``given``, or the random one of a variant, written where it is not there yet: one for all
    dtypes. Raises KvforgeError for a variant with a cut of one that is given."""
    if given is not None:
        if variant.cut is not None:
            raise KvforgeError(f"systems with a cut are of random weights; leave them out for {given}.")
        return given
    path = work / ("checkpoint-no-cut" if variant.cut is None else f"checkpoint-{variant.cut}-{variant.group_size}")
    return cached_checkpoint(path, LLAMA_213M, variant.cut, variant.group_size)


def prepare_engine(
    work: Path, name: str, variant: Variant, max_seq_len: int, reuse: bool = False, given: Path | None = None
) -> Path:
    """Return the engine of a variant under ``work``, built where none that fits is there (about a minute), or where
    the sources have changed since and it is not to ``reuse``. ``given`` is the checkpoint, by default a random one."""
    engine = work / "engine-{}".format(name.replace(",", "").replace(" ", "-"))
    built_from, sources = engine.with_name(f"{engine.name}.sources"), sources_digest()
    if given is not None:
        sources += f" {given.resolve()} {given.stat().st_mtime_ns}"
    is_current = reuse or (built_from.is_file() and built_from.read_text() == sources)
    options = BuildOptions(max_seq_len=max_seq_len, kv_dtype=variant.kv_dtype, weight_dtype=variant.weight_dtype)
    is_current = is_current and fits(engine, variant, max_seq_len)
    cached_engine(engine, lambda: checkpoint_of(work, variant, given), options, is_current)
    if not is_current:
        built_from.write_text(sources)
    return engine


def fits(engine: Path, variant: Variant, max_seq_len: int) -> bool:
    """Whether an engine is there that this version reads and that was built so."""
    if not is_loadable(engine):
        return False
    manifest = load_manifest(engine)
    wanted = (max_seq_len, variant.weight_dtype, variant.kv_dtype)
    return (manifest.max_seq_len, manifest.weight_dtype, manifest.kv_dtype) == wanted


def prepare_commands(
    work: Path, names: list[str], max_seq_len: int, pythons: dict[str, Path], reuse: bool,
    llama_source: Path | None = None, given: Path | None = None,
) -> dict[str, list[str]]:  # fmt: skip
    """Return the command of each system's worker, with its engine or model made; ``pythons`` are the peers' own,
    ``llama_source`` the directory of llama.cpp's sources, ``given`` the checkpoint in place of random ones."""
    commands = {}
    for name in names:
        if name in EVERY_VARIANT:
            engine = prepare_engine(work, name, EVERY_VARIANT[name], max_seq_len, reuse, given)
            commands[name] = [sys.executable, "-m", "perf.peers.kvforge_worker", str(engine)]
    for name in names:
        if name in PEERS:
            worker, model = PEERS[name]
            checkpoint = checkpoint_of(work, Variant(), given)
            directory = prepare_peer(checkpoint, work, pythons[name], model, llama_source)
            commands[name] = [str(pythons[name]), "-m", f"perf.peers.{worker}", str(directory)]
    return commands
