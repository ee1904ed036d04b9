"""One name, one meaning: a public class has a name of its own in all of the product."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = ("kvforge", "model_defs", "plugins")
ALLOWED = {
    "LLM": "kvforge.LLM is the runtime's and takes checkpoints, too: programs know both by the name of vLLM's class",
    "SwiftKVForCausalLM": "checkpoints name the class; it is the model in torch, and in vLLM",
}
"""Names of several public classes, and why they are one thing."""


def classes(sources: dict[str, str]) -> dict[str, list[str]]:
    """The files by the public classes that they define at their top; ``sources`` are contents by name."""
    found = defaultdict(list)
    for name, text in sources.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name)
    return found


def test_no_two_public_classes_have_one_name() -> None:
    files = [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]
    found = classes({str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files})
    assert len(found) > 500
    assert {name: places for name, places in found.items() if len(places) > 1 and name not in ALLOWED} == {}
    assert all(len(found[name]) > 1 for name in ALLOWED)


def test_the_rule_is_able_to_fail() -> None:
    assert classes({"a": "class A: ...\nclass _B: ...", "b": "class A: ...\nclass _B: ..."}) == {"A": ["a", "b"]}


PARTS = {
    "a part that every operator's folder has": (
        "bench", "cases", "cuda", "cuda_cases", "cuda_kernels", "functional", "inputs", "onnx", "packing", "reference",
        "trt", "trt_cases",
    ),
    "a part that every policy's folder has": ("policy", "state", "verify", "pyramid", "shared", "squeeze"),
    "a part that packages of any subject have": (
        "__main__", "batch", "checks", "config", "errors", "export", "failures", "fields", "files", "limits",
        "load", "model", "names", "options", "plot", "process", "reading", "registry", "report", "request", "run",
        "score", "server", "settings", "threads", "train",
    ),
    "a command, and the package that does its work": ("build", "cache", "plan"),
    "one thing as two packages have it: to run it and to build, judge, read, count or speak it": (
        "admission", "calibration", "compatibility", "conversation", "convert", "cpu", "deepseek_v3", "draft_head",
        "early_exit", "engine", "gemma4", "granite", "harmony", "int4", "layers", "llm", "mistral", "onnx_nodes",
        "params", "prediction", "predictor", "probe", "prompts", "ridge", "sampling", "similarity", "tensorrt",
        "tensors", "text_part", "thinking", "weights",
    ),
}  # fmt: skip
"""Names of several modules, by why they are one word for one kind of thing."""


def test_no_new_module_has_the_name_of_another() -> None:
    names = [path.stem for folder in PRODUCT for path in (ROOT / folder).rglob("*.py") if path.stem != "__init__"]
    several = {name for name in names if names.count(name) > 1}
    allowed = [name for part in PARTS.values() for name in part]
    assert several - {*allowed} == set() and {*allowed} - several == set() and len(allowed) == len({*allowed})
