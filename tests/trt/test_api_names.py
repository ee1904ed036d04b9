"""Every name of TensorRT's API that the project uses exists in NVIDIA's module; read from the source text."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    [
        *ROOT.glob("kvforge/compiler/tensorrt_*.py"),
        *ROOT.glob("kvforge/runtime/sessions/tensorrt*.py"),
        *ROOT.glob("plugins/trt_*.py"),
        *ROOT.glob("plugins/*/trt.py"),
    ]
)


def resolve(trt, chain: str):
    """The object that a dotted name beginning with trt or trtp means; raises AttributeError."""
    import tensorrt.plugin as trtp

    first, *rest = chain.split(".")
    value = {"trt": trt, "trtp": trtp}[first]
    for name in rest:
        value = getattr(value, name)
    return value


def dotted_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if text.split(".")[0] in ("trt", "trtp") and text.replace(".", "").isidentifier():
            yield text


def annotated_types(tree: ast.AST) -> dict[str, str]:
    """Variables and fields annotated with a type of TensorRT, `| None` aside: {"self._engine": "trt.ICudaEngine"}."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            name, annotation = ast.unparse(node.target), node.annotation
        elif isinstance(node, ast.arg) and node.annotation is not None:
            name, annotation = node.arg, node.annotation
        else:
            continue
        kind = ast.unparse(annotation).removesuffix(" | None")
        if kind.startswith("trt.") and kind.replace(".", "").isidentifier():
            assert found.setdefault(name, kind) == kind, f"{name} is annotated with two types"
    return found


def problems(trt, source: str) -> list[str]:
    """Names that do not exist: of the module, on annotated variables, and methods that override nothing."""
    tree, missing = ast.parse(source), []

    def check(chain: str) -> None:
        try:
            resolve(trt, chain)
        except AttributeError:
            missing.append(chain)

    for name in dotted_names(tree):
        check(name)
    types = annotated_types(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in types:
            check(f"{types[ast.unparse(node.value)]}.{node.attr}")
        if isinstance(node, ast.ClassDef):
            for base in (ast.unparse(base) for base in node.bases):
                methods = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
                for method in methods if base.startswith("trt.") else []:
                    check(f"{base}.{method}")
    return missing


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_names_exist(trt, file):
    assert problems(trt, file.read_text(encoding="utf-8")) == []


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
