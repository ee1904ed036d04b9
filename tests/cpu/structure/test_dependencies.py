"""Dependencies point one way, read from the import statements of every source file."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.import_graph import ROOT, cycles, imported_modules, imported_names, main, module_graph, rooms
from tests.support.models.shelf import BUILT_FROM

MODEL_MAKING = (
    "kvforge.swiftkv", "kvforge.rewire", "kvforge.distill", "kvforge.quantize", "kvforge.prediction"
)  # fmt: skip
"""What makes checkpoints; what builds, runs and serves engines does without it."""
ENGINES = ("kvforge.compiler", "kvforge.runtime", "kvforge.serving", "kvforge.gateway")
"""What builds, runs and serves engines; what makes and judges checkpoints does without it."""
ABOVE = ("kvforge.commands", "kvforge.demo", "kvforge.bench", "kvforge.evaluation", "kvforge.engine_cache")

FORBIDDEN = {
    "plugins": ("model_defs", "kvforge"),
    "model_defs": ("kvforge",),
    "kvforge/common": ("model_defs", "plugins", "kvforge.manifest", "kvforge.checkpoint", *ENGINES),
    "kvforge/hub": (
        "model_defs", "plugins", "kvforge.manifest", "kvforge.checkpoint", *ENGINES, *MODEL_MAKING, *ABOVE
    ),
    "kvforge/checkpoint": (*ENGINES, *MODEL_MAKING, *ABOVE),
    "kvforge/costs": ("plugins", "kvforge.manifest", "kvforge.checkpoint", *ENGINES, *ABOVE),
    "kvforge/kv_policies": ("kvforge.manifest", "plugins", *ENGINES, *ABOVE),
    "kvforge/manifest": ("plugins", *ENGINES, *ABOVE),
    "kvforge/tokenization": ("kvforge.checkpoint", "model_defs", "plugins", *ENGINES, *ABOVE),
    "kvforge/remote": ("model_defs", "plugins", *ENGINES, *MODEL_MAKING, *ABOVE),
    "kvforge/tasks": ("model_defs", "plugins", *ENGINES, *ABOVE),
    "kvforge/workers": (*ENGINES, *ABOVE),
    "kvforge/tensorrt": ("model_defs", "kvforge.checkpoint", *ENGINES, *MODEL_MAKING, *ABOVE),
    "kvforge/planning": ("plugins", *ENGINES, *MODEL_MAKING, *ABOVE),
    "kvforge/prefix_store": ("model_defs", "plugins", *ENGINES, *ABOVE),
    "kvforge/compiler": ("kvforge.runtime", "kvforge.serving", "kvforge.gateway", *MODEL_MAKING, *ABOVE),
    "kvforge/runtime": (
        "kvforge.compiler", "kvforge.serving", "kvforge.gateway", "kvforge.checkpoint", "kvforge.tasks", "model_defs",
        *MODEL_MAKING, *ABOVE,
    ),
    "kvforge/serving": (
        "kvforge.compiler", "kvforge.gateway", "kvforge.checkpoint", "kvforge.tasks", "model_defs", "plugins",
        *MODEL_MAKING, *ABOVE,
    ),
    "kvforge/gateway": (
        "kvforge.compiler", "kvforge.checkpoint", "kvforge.tasks", "model_defs", "plugins", *MODEL_MAKING, *ABOVE
    ),
    "kvforge/swiftkv": ("plugins", *ENGINES, *MODEL_MAKING[1:], *ABOVE),
    "kvforge/rewire": ("plugins", *ENGINES, "kvforge.distill", "kvforge.prediction", *ABOVE),
    "kvforge/distill": ("plugins", *ENGINES, "kvforge.rewire", "kvforge.prediction", *ABOVE),
    "kvforge/prediction": ("plugins", *ENGINES, "kvforge.quantize", *ABOVE),
    "kvforge/quantize": (*ENGINES, "kvforge.rewire", "kvforge.distill", *ABOVE),
    "kvforge/engine_cache": ("kvforge.serving", "kvforge.gateway", *MODEL_MAKING, *ABOVE[:-1]),
    "kvforge/completion": ("model_defs", "plugins", "kvforge.manifest", *ENGINES, *MODEL_MAKING, *ABOVE),
    "kvforge/evaluation": ("kvforge.compiler", "kvforge.serving", "kvforge.gateway", *MODEL_MAKING, "kvforge.commands"),
    "kvforge/vllm_models": (
        "plugins", "kvforge.common", "kvforge.manifest", "kvforge.checkpoint", *ENGINES, *MODEL_MAKING, *ABOVE
    ),
    "kvforge/vllm_engine": (
        "model_defs", "plugins", "kvforge.compiler", "kvforge.serving", "kvforge.gateway", "kvforge.checkpoint",
        "kvforge.tasks", *MODEL_MAKING, *ABOVE,
    ),
    "triton_repo": ("kvforge.compiler", "kvforge.commands", "kvforge.runtime", "model_defs", "plugins"),
}  # fmt: skip
"""What each part must not import, at any depth of nesting inside its files."""

WITHOUT_TORCH = (
    "model_defs/config.py", "model_defs/__init__.py", "model_defs/weights.py", "kvforge/common/records.py",
    "kvforge/common/number_formats.py", "kvforge/common/staging.py", "kvforge/common/figures.py", "kvforge/costs",
    "kvforge/manifest", "kvforge/checkpoint/model.py", "kvforge/tokenization", "kvforge/tasks", "kvforge/workers",
    "kvforge/planning", "kvforge/hub", "kvforge/remote", "kvforge/bench/load.py", "kvforge/bench/traces.py",
    "kvforge/runtime/requests", "kvforge/runtime/text", "kvforge/runtime/scheduling", "kvforge/runtime/guides/judge.py",
    "kvforge/runtime/guides/worker.py", "kvforge/runtime/guides/matchers.py", "kvforge/gateway",
    "kvforge/serving", "kvforge/runtime/sessions/missing.py", "triton_repo", "kvforge/vllm_engine",
    "kvforge/prefix_store",
)  # fmt: skip
"""What does without tensors: the scheduler by design, the rest because torch takes seconds to import."""


def sources(part: str) -> list[Path]:
    path = ROOT / part
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def breaches(files: list[Path], forbidden: tuple[str, ...]) -> list[tuple[Path, str]]:
    """The imports of forbidden modules, or of anything inside them."""
    imports = [(file, f"{module}.{name}.") for file in files for module, name in imported_names(file)]
    return [(file, name) for file, name in imports if name.startswith(tuple(f"{module}." for module in forbidden))]


@pytest.mark.parametrize("part", FORBIDDEN)
def test_dependency_direction(part: str) -> None:
    files = sources(part)
    assert files
    assert breaches(files, FORBIDDEN[part]) == []


@pytest.mark.parametrize("part", WITHOUT_TORCH)
def test_parts_without_torch(part: str) -> None:
    files = sources(part)
    assert files
    assert breaches(files, ("torch",)) == []


PROGRAMS_WITHOUT_TORCH = (
    "model_defs.config", "model_defs.weights",
    "kvforge.cli", "kvforge.commands.serve", "kvforge.serving.server.supervisor", "kvforge.serving.stub.stub",
    "kvforge.serving.text_models.bls", "kvforge.serving.text_models.preprocess",
    "kvforge.serving.text_models.postprocess", "kvforge.gateway.http.server", "kvforge.serving.engine.process",
)  # fmt: skip
"""What the processes of a server import to begin with; the engine's own reads torch with its engine."""


def test_programs_start_without_torch() -> None:
    """Nor do the modules that they import, however far away."""
    imports = "".join(f"import {module}\n" for module in PROGRAMS_WITHOUT_TORCH)
    code = f"import sys\n{imports}assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_every_part_has_a_rule() -> None:
    """A new folder of kvforge is either bound by a rule, or above all others."""
    parts = {f"kvforge/{path.name}" for path in (ROOT / "kvforge").iterdir() if (path / "__init__.py").exists()}
    above = {"kvforge/commands", "kvforge/demo", "kvforge/bench", "kvforge/doctor"}
    assert parts - FORBIDDEN.keys() == above


def test_the_rules_are_able_to_fail(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("def f():\n    from model_defs import config\n    import torch.nn\n")
    assert imported_modules(file) == {"model_defs", "torch.nn"}
    assert imported_modules(file, {"model_defs.config"}) == {"model_defs.config", "torch.nn"}
    assert breaches([file], ("torch",)) == [(file, "torch.nn..")]
    assert breaches([file], ("model_defs.config",)) == [(file, "model_defs.config.")]


def test_modules_and_rooms_have_no_cycles(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither modules nor the folders they lie in; imports for type checkers count."""
    modules = module_graph()
    assert len(modules) > 400 and "kvforge.runtime.step.runner" in modules
    assert cycles(modules) == [] and cycles(rooms(modules)) == []
    assert main() == 0 and "0 cycles" in capsys.readouterr().out
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


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


def test_no_process_forks() -> None:
    """Threads of gRPC may stand still for ever in a process that forked; ``subprocess`` forks with ``preexec_fn``. The
    process that forks programs of tests refuses to have threads."""
    forks = re.compile(r"preexec_fn=|os\.fork\(|get_context\(.fork")
    may_fork = (Path(__file__), ROOT / "tests" / "support" / "warm.py")
    files = [file for folder in ("kvforge", "perf", "tests", "plugins") for file in (ROOT / folder).rglob("*.py")]
    assert files and [file for file in files if forks.search(file.read_text()) and file not in may_fork] == []


def test_the_shelf_of_engines_is_named_after_all_that_decides_them() -> None:
    """vLLM's engine process belongs to the runtime, and no engine of the shelf is vLLM's."""
    parts = tuple(name.removesuffix(".py").replace("/", ".") for name in BUILT_FROM)

    def is_inside(module: str) -> bool:
        return any(f"{module}.".startswith(f"{part}.") for part in parts)

    outside = {
        (module, imported)
        for module, imports in module_graph().items()
        for imported in imports
        if is_inside(module) and not module.startswith("kvforge.vllm_engine.") and not is_inside(imported)
    }
    assert outside == set()
