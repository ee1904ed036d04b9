"""Names of TensorRT's API in source text, and whether a module has them."""

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any


def resolve(trt: ModuleType, chain: str) -> Any:
    """The object that a dotted name beginning with trt or trtp means; raises AttributeError."""
    first, *rest = chain.split(".")
    value: Any = trt
    if first == "trtp":
        import tensorrt.plugin as trtp

        value = trtp
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
        kind = ast.unparse(annotation).strip("'").removesuffix(" | None")
        if kind.startswith("trt.") and kind.replace(".", "").isidentifier():
            assert found.setdefault(name, kind) == kind, f"{name} is annotated with two types"
    return found


def problems(trt, source: str) -> list[str]:
    """Names that do not exist: of the module, on annotated variables, and methods that override nothing."""
    tree, missing = ast.parse(source), []

    def check(*chains: str) -> None:
        """One of them must exist."""
        for chain in chains:
            with contextlib.suppress(AttributeError):
                resolve(trt, chain)
                return
        missing.append(chains[0])

    for name in dotted_names(tree):
        check(name)
    types = annotated_types(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in types:
            check(f"{types[ast.unparse(node.value)]}.{node.attr}")
        if isinstance(node, ast.ClassDef):
            bases = [base for base in map(ast.unparse, node.bases) if base.startswith("trt.")]
            methods = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
            for method in methods if bases else []:
                if method.startswith("__") or not method.startswith("_"):
                    check(*(f"{base}.{method}" for base in bases))
    return missing


def answer(trt: ModuleType, question: dict[str, list[str]]) -> dict[str, list[str]]:
    """What `ask_rtx` asks: the problems of each of the `files`, or which `names` are unknown."""
    if "names" in question:
        return {"unknown": [name for name in question["names"] if not _exists(trt, name)]}
    return {file: problems(trt, Path(file).read_text(encoding="utf-8")) for file in question["files"]}


def _exists(trt: ModuleType, name: str) -> bool:
    try:
        resolve(trt, name)
    except AttributeError:
        return False
    return True
