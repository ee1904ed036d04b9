"""Whether the packages that kvforge uses are there and can be imported."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvforge.common.extras import how_to_install
from kvforge.doctor.finding import EVERY_COMMAND, GPU, SERVE, Check, installed_version

IMPORT_SECONDS = 120
"""An import that takes longer counts as broken."""
LONGEST = "modelopt"
"""The extra whose packages take as long to import as all the others."""

_IMPORT = """
import importlib, sys
sys.path.pop(0)  # the folder that doctor was started in is not what commands import from
try:
    for module in sys.argv[1:]:
        importlib.import_module(module)
except BaseException as error:
    lines = str(error).strip().splitlines() or [""]
    print("\\nFAILED", type(error).__name__ + ": " + lines[0])
    sys.exit(1)
"""

NEEDED_FOR = {
    "": EVERY_COMMAND,
    "serve": SERVE,
    "gguf": "checkpoints in GGUF files",
    "perf": "plots",
    "train": "kvforge distill --data NAME",
    "eval": "kvforge lm-eval",
    "modelopt": "kvforge quantize --recipe fp8",
    "onnx": "ONNX of target tensorrt",
    "cuda": GPU,
    "tensorrt": "plans of target tensorrt by TensorRT 11, for the GPU here",
    "tensorrt-rtx": "plans of target tensorrt by TensorRT for RTX, built anywhere",
}
"""What each extra is for, and the packages that come without one."""


@dataclass(frozen=True)
class Package:
    """A distribution, the module by which kvforge begins to use it, and the extra that brings it; without an extra
    every command needs it. ``advice`` stands for the extra's where there is none that brings it."""

    distribution: str
    module: str
    extra: str = ""
    advice: str = ""

    @property
    def remedy(self) -> str:
        """The command, or the sentence, that brings it."""
        return self.advice or (how_to_install(self.extra) if self.extra else f"pip install {self.distribution}")


PACKAGES = (
    Package("torch", "torch", advice="pip install 'torch>=2.11,<2.14'"),
    Package("safetensors", "safetensors.torch"),
    Package("tokenizers", "tokenizers"),
    Package("huggingface_hub", "huggingface_hub"),
    Package("numpy", "numpy"),
    Package("jinja2", "jinja2"),
    Package("pyyaml", "yaml"),
    Package("tqdm", "tqdm"),
    Package("tritonclient", "tritonclient.grpc", "serve"),
    Package("fastapi", "fastapi", "serve"),
    Package("uvicorn", "uvicorn", "serve"),
    Package("llguidance", "llguidance", "serve"),
    Package("gguf", "gguf", "gguf"),
    Package("matplotlib", "matplotlib.figure", "perf"),
    Package("datasets", "datasets", "train"),
    Package("lm_eval", "lm_eval.evaluator", "eval"),
    Package("transformers", "transformers", "modelopt"),
    Package("nvidia-modelopt", "modelopt.torch.quantization", "modelopt"),
    Package("onnx", "onnx", "onnx"),
    Package("onnxscript", "onnxscript", "onnx"),
    Package(
        "triton",
        "triton",
        "cuda",
        advice="comes with a CUDA build of torch",
    ),
    Package("tensorrt", "tensorrt", "tensorrt"),
    Package("tensorrt-rtx-cu13-bindings", "tensorrt_rtx_bindings", "tensorrt-rtx"),
    Package("tensorrt-rtx-cu13-libs", "tensorrt_rtx_libs", "tensorrt-rtx"),
)


def package_checks(packages: tuple[Package, ...] = PACKAGES) -> list[Check]:
    """Return what is found of each: absent, broken with the reason, or its version.

    Those that are there are imported together, in two processes, as most import the same; where one of them fails,
    each in a process of its own, which tells which.
    """
    installed = [package for package in packages if installed_version(package.distribution) is not None]
    groups = [[each for each in installed if (each.extra == LONGEST) is longest] for longest in (True, False)]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        whole = list(pool.map(lambda group: not group or why_broken(*(each.module for each in group)) is None, groups))
        sound = {each for group, is_whole in zip(groups, whole, strict=True) if is_whole for each in group}
        return list(pool.map(lambda package: _check(package, package in sound), packages))


def _check(package: Package, is_sound: bool) -> Check:
    version, use = installed_version(package.distribution), NEEDED_FOR[package.extra]
    if version is None:
        absent = "optional" if package.extra else "missing"
        return Check(package.distribution, absent, "not installed", package.remedy, use)
    reason = None if is_sound else why_broken(package.module)
    if reason is None:
        return Check(package.distribution, "ok", version, needed_for=use)
    return Check(package.distribution, "broken", f"{version}, cannot be imported: {reason}", package.remedy, use)


def why_broken(*modules: str) -> str | None:
    """Import ``modules`` in a process of their own, which they may end; returns what went wrong, or None."""
    try:
        result = subprocess.run(
            [sys.executable, "-c", _IMPORT, *modules],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=IMPORT_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"importing {', '.join(modules)} takes longer than {IMPORT_SECONDS} s"
    if result.returncode == 0:
        return None
    _, failed, reason = result.stdout.rpartition("\nFAILED ")
    return (
        reason.strip() if failed else f"importing {', '.join(modules)} ends the process with code {result.returncode}"
    )
