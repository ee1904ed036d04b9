"""What can be brought to a bare GPU machine: a folder each, made here without a GPU."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvforge.common.errors import KvforgeError
from perf.gpu.carry.pieces import pack, split
from perf.gpu.carry.wheels import unpack_wheels
from perf.harness.engines import ROOT


@dataclass(frozen=True)
class Content:
    """``make`` fills an empty folder; ``is_path``: it goes on the experiments' PYTHONPATH."""

    what: str
    make: Callable[[Path], None]
    is_path: bool = True


def _by_program(module: str) -> Callable[[Path], None]:
    """Return a maker that runs a program with ``--prepare FOLDER``."""

    def make(folder: Path) -> None:
        done = subprocess.run([sys.executable, "-m", module, "--prepare", str(folder)], cwd=ROOT, check=False)
        if done.returncode != 0:
            raise KvforgeError(f"python -m {module} --prepare failed; see above.")

    return make


CONTENTS = {
    "tensorrt-rtx": Content(
        "TensorRT for RTX",
        lambda folder: unpack_wheels(("tensorrt-rtx-cu13-libs", "tensorrt-rtx-cu13-bindings"), folder),
    ),
    "plans": Content("plans of TensorRT for RTX", _by_program("perf.gpu.tensorrt_rtx"), is_path=False),
    "fa3": Content("FlashAttention 3", lambda folder: unpack_wheels(("tokenspeed-fa3",), folder)),
    "gguf": Content("the reader of GGUF files", lambda folder: unpack_wheels(("gguf",), folder)),
    "smollm2": Content("a real model, texts and prompts", _by_program("perf.gpu.student"), is_path=False),
    "tunings": Content("kernels in many block sizes, compiled", _by_program("perf.gpu.tunings"), is_path=False),
}


def tree_bytes(root: Path = ROOT) -> int:
    """Return the bytes of the files that git tracks, which go along with every piece.

    Raises:
        KvforgeError: this is no checkout.
    """
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=False)
    if listed.returncode != 0:
        raise KvforgeError(f"{root} is no checkout of git, so its size is not known; give --piece-mib.")
    paths = [root / name.decode() for name in listed.stdout.split(b"\0") if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


def prepare(names: Sequence[str], out: Path, piece_bytes: int) -> list[Path]:
    """Make the contents and write them to ``out`` in pieces, with a line each; returns the pieces.

    Raises:
        KvforgeError: ``out`` is not empty, a piece would have no room, or a content could not be made.
    """
    if piece_bytes < 1 << 20:
        raise KvforgeError("the working tree leaves no room for pieces; give --piece-mib, or thin the tree.")
    if out.exists() and any(out.iterdir()):
        raise KvforgeError(f"{out} is not empty; remove it, or give another folder.")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvforge-carry-") as temporary:
        archives = {}
        for name in dict.fromkeys(names):
            start, folder = time.monotonic(), Path(temporary) / name
            print(f"{name}: {CONTENTS[name].what}", flush=True)
            folder.mkdir()
            CONTENTS[name].make(folder)
            archives[name] = folder.with_name(f"{name}.tar.xz")
            pack(folder, archives[name])
            size, seconds = archives[name].stat().st_size / (1 << 20), time.monotonic() - start
            print(f"{name}: {size:.1f} MiB in {seconds:.0f} s", flush=True)
        pieces = split(archives, out, piece_bytes)
    print("\n".join(str(piece) for piece in pieces))
    return pieces
