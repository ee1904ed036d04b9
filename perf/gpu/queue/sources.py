"""Which files decide a result, as patterns below the repository's root, and their digest."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from perf.harness.engines import ROOT

KERNELS = ("plugins/*/cuda*.py", "plugins/triton_*.py", "plugins/cuda_ops.py", "plugins/kv_quantization.py")
GRAPHS = (
    "model_defs/*.py", "kvforge/compiler/*.py", "kvforge/compiler/targets/cuda.py", "kvforge/runtime/sessions/*.py",
    *KERNELS,
)  # fmt: skip
"""Of the packages of target ``cuda``, and of what runs them."""
TIMING = ("perf/gpu/timing.py", "perf/gpu/machine.py")


def digest_of(patterns: Iterable[str], said: str = "", root: Path = ROOT) -> str:
    """Return a SHA-256 of ``said`` and of the names and contents of all files that the patterns find.

    Raises:
        FileNotFoundError: a pattern finds no file.
    """
    digest = hashlib.sha256(said.encode())
    for pattern in patterns:
        files = sorted(path for path in root.glob(pattern) if path.is_file())
        if not files:
            raise FileNotFoundError(f"no file is named {pattern}")
        for path in files:
            digest.update(f"\0{path.relative_to(root)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
