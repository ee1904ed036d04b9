"""Every name of TensorRT's API that the project uses exists in NVIDIA's modules; read from the source text."""

import ast
from pathlib import Path

import pytest

from tests.support.tensorrt.api_names import annotated_types, problems
from tests.support.tensorrt.rtx import ask_rtx

ROOT = Path(__file__).resolve().parents[2]
OF_BOTH = sorted(
    [
        *ROOT.glob("kvforge/compiler/tensorrt_*.py"),
        *ROOT.glob("kvforge/runtime/sessions/tensorrt*.py"),
        ROOT / "kvforge/tensorrt/api.py",
    ]
)
OF_ONE = {
    "tensorrt": [ROOT / "plugins/trt_aot.py", ROOT / "kvforge/tensorrt/tensorrt11.py"],
    "tensorrt-rtx": [ROOT / "plugins/trt_v3.py", *ROOT.glob("kvforge/tensorrt/rtx*.py")],
}
FILES = [*OF_BOTH, *OF_ONE["tensorrt"]]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_names_exist(trt, file):
    assert problems(trt, file.read_text(encoding="utf-8")) == []


def test_names_exist_in_rtx():
    files = [*OF_BOTH, *OF_ONE["tensorrt-rtx"]]
    assert ask_rtx("api_names", {"files": [str(file) for file in files]}) == {str(file): [] for file in files}


def test_every_file_is_checked():
    users = {file for folder in ("kvforge", "plugins") for file in (ROOT / folder).rglob("*.py") if uses_trt(file)}
    assert users <= {*OF_BOTH, *OF_ONE["tensorrt"], *OF_ONE["tensorrt-rtx"]}


def uses_trt(file: Path) -> bool:
    names = (node.id for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Name))
    return not {"trt", "trtp"}.isdisjoint(names)


def test_the_check_sees_names(trt):
    source = (
        "class Bars(trt.IProgressMonitor):\n    def phase_begin(self): pass\n"
        "builder: trt.Builder | None = trt.Builder2()\nbuilder.create_networks()\nbuilder.create_network()\n"
    )
    assert sorted(problems(trt, source)) == [
        "trt.Builder.create_networks",
        "trt.Builder2",
        "trt.IProgressMonitor.phase_begin",
    ]


def test_builder_and_runtime_are_checked(trt):
    kinds = set().union(*(annotated_types(ast.parse(file.read_text())).values() for file in FILES))
    assert kinds >= {"trt.Builder", "trt.IBuilderConfig", "trt.OnnxParser", "trt.ICudaEngine", "trt.IExecutionContext"}
