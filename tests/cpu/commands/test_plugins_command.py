"""`kvforge plugins` tells the truth: every face it lists has its file and its tests, and no face is left out."""

import json
from pathlib import Path

import pytest

import plugins
from kvforge.cli import main
from kvforge.commands.plugins import FACES, describe

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("operator", describe(), ids=lambda operator: operator["name"])
def test_faces_are_those_that_exist(operator: dict) -> None:
    folder = ROOT / "plugins" / operator["name"]
    assert [face["name"] for face in operator["faces"]] == [
        name for name, face in FACES.items() if (folder / face.file).is_file()
    ]


@pytest.mark.parametrize("operator", describe(), ids=lambda operator: operator["name"])
def test_every_face_names_tests_that_exist(operator: dict) -> None:
    for face in operator["faces"]:
        assert face["verified_by"], f"nothing verifies {face['name']} of {operator['name']}"
        for test in face["verified_by"]:
            assert (ROOT / test).is_file(), test


def test_the_command_prints_every_operator(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == describe()
    assert main(["plugins"]) == 0
    table = capsys.readouterr().out
    for name, operator in plugins.OPERATORS.items():
        assert f"kvforge::{name}, version {operator.version}\n" in table
