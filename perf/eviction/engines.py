"""Engines of the 213M-parameter model, one for each KV policy, cut and format of the cache."""

from dataclasses import dataclass
from pathlib import Path

from kvforge.compiler import BuildOptions
from kvforge.manifest import load_manifest
from perf.harness.engines import cached_engine, is_loadable
from perf.peers.systems import Variant, checkpoint_of, sources_digest

NO_CUT = Variant()


@dataclass(frozen=True)
class PolicyEngine:
    """``policy`` as ``--kv-policy`` takes it, on a ``variant`` of the model."""

    policy: str
    variant: Variant = NO_CUT

    @property
    def folder(self) -> str:
        """The engine's, among others."""
        name = self.policy.replace(":", "-").replace(",", "-").replace("=", "")
        cut = "" if self.variant.cut is None else f"-cut{self.variant.cut}x{self.variant.group_size}"
        return f"engine-{name}{cut}-{self.variant.kv_dtype}"


def prepare(work: Path, engine: PolicyEngine, max_seq_len: int, max_num_seqs: int = 32) -> Path:
    """Return the engine under ``work``, built where none of these sources is there (about a minute)."""
    path = work / engine.folder
    sources = path.with_name(f"{path.name}.sources")
    digest = sources_digest()
    is_current = sources.is_file() and sources.read_text() == digest and is_loadable(path)
    if is_current:
        manifest = load_manifest(path)
        is_current = (manifest.max_seq_len, manifest.max_num_seqs) == (max_seq_len, max_num_seqs)
    options = BuildOptions(
        max_seq_len=max_seq_len, max_num_seqs=max_num_seqs, kv_dtype=engine.variant.kv_dtype, kv_policy=engine.policy
    )
    cached_engine(path, lambda: checkpoint_of(work, engine.variant), options, is_current)
    if not is_current:
        sources.write_text(digest)
    return path
