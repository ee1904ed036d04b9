"""An operator is one folder: `tests/support/extensions/operators/scaled_add/` gets all that the product's have."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import plugins
from tests.support import warm

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "tests" / "support" / "extensions" / "operators"
NAME = "scaled_add"
TWENTY = ",".join(map(str, range(20)))


def python(*arguments: str, folder: Path = FOLDER, **environment: str) -> subprocess.CompletedProcess:
    """Python in a process of its own, where the folder's operators are found."""
    env = os.environ | {"KVFORGE_PLUGIN_PATH": str(folder), "PYTHONPATH": str(ROOT)} | environment
    return warm.run(arguments, env)


def output(*arguments: str, **environment: str) -> str:
    result = python(*arguments, **environment)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def checked(module: str, *arguments: str, folder: Path = FOLDER) -> list:
    """What a helper of the tests found wrong in each of twenty random cases."""
    command = ("-W", "ignore::RuntimeWarning", "-m", f"tests.support.{module}", *arguments)
    result = python(*command, folder=folder, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_the_product_does_not_name_it():
    assert NAME not in plugins.OPERATORS
    files = [f for folder in ("plugins", "kvforge", "model_defs", "perf") for f in (ROOT / folder).rglob("*.py")]
    assert files and not any(NAME in file.read_text() for file in files)


@pytest.mark.parametrize("backend", ["cpu", "onnx", "triton"])
def test_backends_equal_the_definition(backend):
    found = checked("operators.backends", backend, TWENTY, NAME)
    assert [case["seed"] for case in found] == list(range(20)) and not any(case["wrong"] for case in found)


def test_its_kernels_are_run_and_compiled_with_the_others():
    found = checked("cuda.triton_cases", NAME, TWENTY)
    assert len(found) == 20 and not any(case["error"] for case in found)
    compiled = """
from plugins.registry import modules
from plugins.triton_ptx import compile_ptx
print([compile_ptx(spec, 90).entry for spec in dict(modules("cuda_cases"))["scaled_add"].kernel_specs(90, False)])
"""
    assert output("-c", compiled) == "['scaled_add_kernel']\n"


@pytest.mark.parametrize("backend", ["onnx", "triton"])
def test_a_backend_that_is_wrong_is_found(backend, tmp_path):
    shutil.copytree(FOLDER / NAME, tmp_path / NAME)
    file, right, wrong = {"onnx": ("onnx.py", "body.Add", "body.Sub"), "triton": ("cuda.py", "+ SCALE", "- SCALE")}[
        backend
    ]
    source = (tmp_path / NAME / file).read_text()
    assert right in source
    (tmp_path / NAME / file).write_text(source.replace(right, wrong))
    found = checked("operators.backends", backend, TWENTY, NAME, folder=tmp_path)
    assert any("relative error" in (case["wrong"] or "") for case in found)


def test_the_tests_of_all_operators_take_it_up():
    files = [f"tests/cpu/plugins/test_{name}.py" for name in ("every_backend", "triton_kernels", "onnx_operators")]
    listed = output(
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=--import-mode=importlib",
        *files,
    )
    for test in ("test_full_size[cpu-scaled_add-block0]", "test_full_size[onnx-scaled_add-block0]"):
        assert test in listed
    for test in (
        "test_small[cpu-scaled_add]",
        "test_small[onnx-scaled_add]",
        "test_equals_the_reference[scaled_add]",
        "agree[ScaledAdd]",
    ):
        assert test in listed


def test_the_command_lists_it():
    row = next(row for row in json.loads(output("-m", "kvforge.cli", "plugins", "--json")) if row["name"] == NAME)
    assert (row["version"], row["schema"]) == (3, "(Tensor x, Tensor y, float scale=1.0) -> Tensor")
    assert [backend["name"] for backend in row["backends"]] == ["reference", "cpu", "triton", "onnx"]
    for backend in row["backends"]:
        assert (ROOT / backend["file"]).is_file() and all((ROOT / test).is_file() for test in backend["verified_by"])


def test_the_benchmark_has_a_row():
    table = output("-m", "perf.operators.bench", "--only", "scaled", "--seconds", "0.01")
    (row,) = [line for line in table.splitlines() if NAME in line]
    assert row.endswith("scaled_add 1000 elements")


def test_it_is_called_like_the_others():
    code = """
import torch, plugins
plugins.load_library()
x, y = torch.randn(2, 3, 4)
assert torch.allclose(plugins.scaled_add(x, y, scale=2.0), x + 2 * y)
torch.library.opcheck(torch.ops.kvforge.scaled_add.default, (x, y, 2.0))
try:
    plugins.scaled_add(x, y[:2])
except RuntimeError as error:
    print(error)
"""
    assert "scaled_add: y must have shape [3, 4], not [2, 4]" in output("-c", code)


def test_two_folders_of_one_name_are_refused(tmp_path):
    shutil.copytree(FOLDER / NAME, tmp_path / "paged_attention")
    result = python("-c", "import plugins", folder=tmp_path)
    assert result.returncode != 0 and "Two folders are the operator paged_attention" in result.stderr


FAULTS = {
    "no folder": ({}, "missing", "$KVFORGE_PLUGIN_PATH names {folder}, which is no folder; correct it."),
    "a name of ours": (
        {"paged_attention": ""}, "", "Two folders are the operator paged_attention; rename one in $KVFORGE_PLUGIN_PATH."
    ),
    "no name for Python": ({"my-op": ""}, "", "has a name that no operator can have; use a-z, 0-9 and _."),
    "a keyword": ({"class": ""}, "", "has a name that no operator can have; use a-z, 0-9 and _."),
    "no OPERATOR": (
        {"empty": ""}, "", "cannot be loaded (AttributeError: module 'plugins.empty' has no attribute 'OPERATOR')."
    ),
    "another OPERATOR": ({"other": "OPERATOR = 7"}, "", "has an OPERATOR that is no plugins.operator.Operator."),
    "one that raises": ({"raising": "raise OSError('boom')"}, "", "cannot be loaded (OSError: boom)."),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_with_a_fault_is_refused_in_a_sentence(fault, tmp_path):
    """By every command, because the user asked for the folder."""
    files, below, sentence = FAULTS[fault]
    for name, text in files.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
        (tmp_path / name / "reference.py").write_text("")
    folder = tmp_path / below
    refused = python("-m", "kvforge", "plugins", folder=folder)
    assert refused.returncode == 1 and refused.stdout == "" and refused.stderr.count("\n") == 1
    assert refused.stderr.startswith("kvforge: error: ") and refused.stderr.strip().endswith(
        sentence.format(folder=folder)
    )
