"""Dependencies point one way, read from the import statements of every source file."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

MODEL_MAKING = ("kvforge.swiftkv", "kvforge.rewire", "kvforge.distill", "kvforge.training")
"""Packages that make checkpoints; what builds, runs and serves engines does without them."""

FORBIDDEN = {
    "plugins": ("model_defs", "kvforge"),
    "model_defs": ("kvforge",),
    "kvforge/checkpoint": ("kvforge.compiler", "kvforge.runtime", "kvforge.serving", "kvforge.commands", "model_defs"),
    "kvforge/compiler": (
        "kvforge.runtime",
        "kvforge.serving",
        "kvforge.quantize",
        "kvforge.commands",
        "kvforge.evaluation",
        *MODEL_MAKING,
    ),
    "kvforge/number_formats.py": ("torch", "kvforge"),
    "kvforge/engine.py": ("torch", "kvforge.compiler", "kvforge.runtime", "kvforge.serving", "model_defs", "plugins"),
    "kvforge/kv_policies": (
        "kvforge.engine",
        "kvforge.compiler",
        "kvforge.runtime",
        "kvforge.serving",
        "plugins",
    ),
    "kvforge/tasks": (
        "torch",
        "kvforge.compiler",
        "kvforge.runtime",
        "kvforge.serving",
        "kvforge.evaluation",
        "model_defs",
        "plugins",
    ),
    "kvforge/planning": (
        "torch",
        "kvforge.compiler",
        "kvforge.runtime",
        "kvforge.serving",
        "kvforge.quantize",
        "kvforge.commands",
        "plugins",
    ),
    "kvforge/rewire": (
        "kvforge.compiler",
        "kvforge.runtime",
        "kvforge.serving",
        "kvforge.quantize",
        "kvforge.distill",
        "kvforge.evaluation",
        "kvforge.commands",
        "plugins",
    ),
    "kvforge/quantize": (
        "kvforge.compiler",
        "kvforge.runtime",
        "kvforge.serving",
        "kvforge.rewire",
        "kvforge.distill",
        "kvforge.evaluation",
        "kvforge.training",
        "kvforge.commands",
        "plugins",
    ),
    "kvforge/staging.py": ("torch", "kvforge.checkpoint", "kvforge.compiler", "kvforge.engine", "model_defs"),
    "kvforge/model_checkpoint.py": ("torch", "kvforge.compiler", "kvforge.runtime", "kvforge.swiftkv"),
    "kvforge/chat_template.py": ("torch", "kvforge.runtime", "kvforge.checkpoint", "kvforge.evaluation"),
    "kvforge/tokenizer_files.py": ("torch", "kvforge.runtime", "kvforge.checkpoint", "kvforge.evaluation"),
    "kvforge/figures.py": ("torch", "kvforge.runtime", "kvforge.checkpoint", "kvforge.evaluation"),
    "kvforge/runtime": (
        "kvforge.compiler",
        "kvforge.serving",
        "kvforge.quantize",
        "kvforge.commands",
        "kvforge.checkpoint",
        "kvforge.evaluation",
        "kvforge.tasks",
        "model_defs",
        *MODEL_MAKING,
    ),
    "kvforge/workers": ("torch", "numpy", "kvforge.runtime", "kvforge.serving", "kvforge.gateway", "kvforge.commands"),
    "kvforge/guides": (
        "torch",
        "kvforge.compiler",
        "kvforge.runtime.engine",
        "kvforge.runtime.guide",
        "kvforge.runtime.guide_compiler",
        "kvforge.serving",
        "kvforge.gateway",
        "kvforge.commands",
        "model_defs",
        "plugins",
    ),
    "kvforge/evaluation": (
        "kvforge.compiler",
        "kvforge.serving",
        "kvforge.quantize",
        "kvforge.rewire",
        "kvforge.distill",
        "kvforge.training",
        "kvforge.commands",
    ),
    "kvforge/serving": (
        "kvforge.compiler",
        "kvforge.commands",
        "kvforge.checkpoint",
        "kvforge.evaluation",
        "kvforge.quantize",
        "model_defs",
        "plugins",
        *MODEL_MAKING,
    ),
    "kvforge/gateway": (
        "torch",
        "kvforge.compiler",
        "kvforge.commands",
        "kvforge.checkpoint",
        "kvforge.evaluation",
        "kvforge.quantize",
        "kvforge.tasks",
        "model_defs",
        "plugins",
        *MODEL_MAKING,
    ),
    "kvforge/swiftkv": (
        "kvforge.compiler",
        "kvforge.runtime",
        "kvforge.serving",
        "kvforge.quantize",
        "kvforge.rewire",
        "kvforge.distill",
        "kvforge.evaluation",
        "kvforge.training",
        "kvforge.commands",
    ),
    "kvforge/distill": (
        "kvforge.compiler",
        "kvforge.runtime",
        "kvforge.serving",
        "kvforge.quantize",
        "kvforge.rewire",
        "kvforge.evaluation",
        "kvforge.training",
        "kvforge.commands",
    ),
    "triton_repo": ("kvforge.compiler", "kvforge.commands", "kvforge.runtime", "model_defs", "plugins", "torch"),
}
"""What each part must not import, at any depth of nesting inside its files."""


def imported_modules(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def sources(part: str) -> list[Path]:
    path = ROOT / part
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


@pytest.mark.parametrize("part", FORBIDDEN)
def test_dependency_direction(part: str) -> None:
    files = sources(part)
    assert files
    for file in files:
        for module in imported_modules(file):
            for forbidden in FORBIDDEN[part]:
                assert module != forbidden and not module.startswith(f"{forbidden}."), f"{file} imports {module}"


def test_the_rule_is_able_to_fail(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("def f():\n    from model_defs import config\n    import torch.nn\n")
    assert imported_modules(file) == {"model_defs", "model_defs.config", "torch.nn"}


def test_scheduler_handles_numbers_not_tensors() -> None:
    numbers = (
        "scheduler", "schedule", "sequence", "slot_table", "page_pool", "prefix_cache", "planned_prefixes",
        "state_pages", "retention", "cached_pages",
    )  # fmt: skip
    for name in numbers:
        assert "torch" not in imported_modules(ROOT / f"kvforge/runtime/{name}.py")


def test_build_is_a_folder_of_scripts_and_not_ignored() -> None:
    assert not (ROOT / "build" / "__init__.py").exists()
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    result = subprocess.run(["git", "check-ignore", "--no-index", "build/recipes/any.yaml"], cwd=ROOT)
    assert result.returncode == 1, "build/ is ignored by git"


def test_triton_models_are_thin() -> None:
    models = sorted((ROOT / "triton_repo").glob("*/1/model.py"))
    assert len(models) >= 3
    for model in models:
        assert len(model.read_text().splitlines()) <= 60, model
