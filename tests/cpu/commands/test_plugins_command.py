"""`kvforge plugins` tells the truth: every backend it lists has its file and its tests, and no backend is left out."""

import json
from pathlib import Path

import pytest

import plugins
from kvforge.cli import main
from kvforge.commands.plugins import BACKENDS, describe
from plugins.operator import BACKEND_FILES

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("operator", describe(), ids=lambda operator: operator["name"])
def test_backends_are_those_that_exist(operator: dict) -> None:
    folder = ROOT / "plugins" / operator["name"]
    assert [backend["name"] for backend in operator["backends"]] == [
        name for name in BACKENDS if (folder / BACKEND_FILES[name]).is_file()
    ]


@pytest.mark.parametrize("operator", describe(), ids=lambda operator: operator["name"])
def test_every_backend_names_tests_that_exist(operator: dict) -> None:
    for backend in operator["backends"]:
        assert backend["verified_by"], f"nothing verifies {backend['name']} of {operator['name']}"
        for test in backend["verified_by"]:
            assert (ROOT / test).is_file(), test


def test_the_command_prints_every_operator(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == describe()
    assert main(["plugins"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=2) for line in lines] == [
        [name, str(operator.version), ", ".join(operator.backends)] for name, operator in plugins.OPERATORS.items()
    ]


def test_an_operator_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("paged_attention", "kvforge::paged_attention"):
        assert main(["plugins", name]) == 0
        first, *lines = capsys.readouterr().out.splitlines()
        assert first == f"kvforge::paged_attention, version {plugins.OPERATORS['paged_attention'].version}"
        assert "  triton     targets cuda and tensorrt: Triton kernels" in lines
        assert "             tests/gpu/test_operators_cuda.py (needs a GPU)" in lines
    assert main(["plugins", "paged_attention", "--json"]) == 0
    assert [operator["name"] for operator in json.loads(capsys.readouterr().out)] == ["paged_attention"]
    for name, advice in (("paged_atention", "did you mean paged_attention?"), ("x", "kvforge plugins lists them.")):
        assert main(["plugins", name]) == 1
        assert capsys.readouterr().err.endswith(f"There is no operator {name}; {advice}\n")
