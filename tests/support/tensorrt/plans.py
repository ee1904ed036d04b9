"""Builds plans of claims with TensorRT for RTX, as the product does."""

import dataclasses
import json
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from kvforge.compiler import tensorrt_build
from kvforge.manifest import PLANS_FILE
from plugins.trt_launch import MAGIC, Launch, unpack
from tests.support.tensorrt.claims import Claim
from tests.support.tensorrt.exports import export


def answer(trt: ModuleType, question: dict[str, Any]) -> dict[str, Any]:
    """What `ask_rtx` asks: of a claim the manifest's fields, and of each of its graphs the builder's report and the
    kernels in the plan."""
    claim = Claim(**question)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "rank0"
        folder.mkdir()
        export(claim, folder, claim.options.graphs)
        fields = tensorrt_build.build_plans(folder, claim.options, lambda stage: None)
        reports = json.loads((Path(temporary) / PLANS_FILE).read_text())
        kernels = {graph: kernels_in((folder / f"{graph}.plan").read_bytes()) for graph in claim.options.graphs}
        left = sorted(file.name for file in folder.iterdir())
    return {"fields": fields, "reports": reports, "kernels": kernels, "files": left}


def kernels_in(plan: bytes) -> list[list[dict[str, Any]]]:
    """The kernels of each plugin in a plan, without their PTX."""
    found, start = [], plan.find(MAGIC.encode())
    while start >= 0:
        found.append([_named(launch) for launch in unpack(plan[start:])])
        start = plan.find(MAGIC.encode(), start + 1)
    return found


def _named(launch: Launch) -> dict[str, Any]:
    assert launch.entry in launch.ptx
    return {name: value for name, value in dataclasses.asdict(launch).items() if name in ("entry", "capability")}
