"""Reports on disk."""

import json
import math
from pathlib import Path

import pytest

from perf.harness.files import read_json, write_json


@pytest.mark.parametrize(
    ("given", "written"),
    [
        (1 / 3, 0.333333),
        (-123.456789, -123.457),
        (1234567.89, 1234568.0),
        (3.14159265e-8, 3.14159e-8),
        (1234567890, 1234567890),
        (0.0, 0.0),
        (0.25, 0.25),
        (True, True),
        (None, None),
        ({"a": (1 / 3, [2 / 3, "1.23456789"])}, {"a": [0.333333, [0.666667, "1.23456789"]]}),
    ],
)
def test_a_report_has_six_digits(given: object, written: object, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    write_json(file, given)
    found = read_json(file, None)
    assert found == written and type(found) is type(written)
    write_json(file, found)
    assert read_json(file, None) == written, "rounded again it stays"


def test_what_is_no_number_stays(tmp_path: Path) -> None:
    write_json(tmp_path / "report.json", [math.inf, math.nan])
    assert json.loads((tmp_path / "report.json").read_text())[0] == math.inf
